# `make test` and `make run` need python3, g++ and make; the rest is installed on the first call.
PYTHON ?= python3
JOBS   ?= $(shell nproc)
ARGS   ?=
TORCH  ?=

# Another torch has an environment, build folders and a package of its own.
OTHER   := $(addprefix -torch-,$(strip $(TORCH)))
RELEASE := build/release$(OTHER)
ASAN    := build/asan$(OTHER)
TSAN    := build/tsan$(OTHER)
PACKAGE := $(if $(OTHER),$(RELEASE)/package,python)

VENV  := .venv$(OTHER)
BIN   := $(VENV)/bin
CUDA_VENV   := .venv-cuda
CUDA_TARGET ?= all
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)

CXX_DIRS  := $(wildcard ligature python/src tests/cpp examples/cpp examples/cpp_project)
CXX_FILES  = $(shell find $(CXX_DIRS) -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PY_DIRS   := $(wildcard python tests benchmarks examples tools)

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup build package run test bench overlap soak docs sanitize race cuda lint format clean distclean

help:
	@echo "make run [ARGS=...]    build, then run examples/python/demo.py"
	@echo "make test              build, then run the C++ and the Python tests"
	@echo "make bench [ARGS=...]  build, then run benchmarks/bench.py"
	@echo "make overlap [ARGS]    build, then run benchmarks/overlap.py: two ranks over a shaped link"
	@echo "make docs              build, then make the documentation's site in build/site"
	@echo "make soak [ARGS=...]   10,000 random pipelines against plain PyTorch, on all cores"
	@echo "make sanitize          the C++ tests under the address and undefined-behaviour sanitizers"
	@echo "make race              the C++ tests of several ranks, as threads, under the thread sanitizer"
	@echo "make cuda              the library and its C++ tests with the CUDA backend, in build/cuda"
	@echo "make lint | format     check, or fix, the style of C++ and Python; lint also checks types and includes"
	@echo "make clean             remove what was built; 'make distclean' removes the environments too"
	@echo "make ... TORCH=2.15.0  any of these but cuda with that torch, in .venv-torch-2.15.0"

setup: $(READY)

$(READY): requirements-dev.txt tools/setup.sh
	@PYTHON="$(PYTHON)" tools/setup.sh $(VENV) $(PACKAGE) $(TORCH)

build/%$(OTHER)/build.ninja: CMakePresets.json | $(READY)
	@echo "== configure: $*$(OTHER)"
	@cmake --preset $* $(if $(OTHER),-B $(@D) -DPython3_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DLIGATURE_PACKAGE_DIR=$(CURDIR)/$(PACKAGE)/ligature)
	@touch $@

build: $(RELEASE)/build.ninja $(READY)
	@echo "== build: release$(OTHER)"
	@cmake --build $(RELEASE) -j $(JOBS)

# The package alone, without tests and examples in C++.
package: $(RELEASE)/build.ninja $(READY)
	@echo "== build: the package"
	@cmake --build $(RELEASE) -j $(JOBS) --target _C

run: package
	@$(BIN)/python examples/python/demo.py $(ARGS)

# Memory that was freed is used again, as in a training run: else new pages are what is timed.
bench overlap: export MALLOC_MMAP_THRESHOLD_ = 4294967296
bench overlap: export MALLOC_TRIM_THRESHOLD_ = 17179869184
bench: package
	@$(BIN)/python benchmarks/bench.py $(ARGS)

overlap: package
	@$(BIN)/python benchmarks/overlap.py $(ARGS)

docs: package
	@$(BIN)/python tools/docs_site --out build/site

soak: package
	@$(BIN)/python tools/soak.py $(ARGS)

# In one process per core, each with one thread; ARGS are pytest's, which then runs by itself. Threads
# that wait for each other do not spin: on a machine with other work that takes many times as long.
test: export OMP_WAIT_POLICY = passive
test: build
ifeq ($(strip $(ARGS)),)
	@echo "== C++ and Python tests"
	@$(BIN)/python tools/run_tests.py --jobs $(JOBS) --threads 1 --cpp $(RELEASE)/bin/ligature_tests \
	  --logs build/test_logs$(OTHER)
else
	@echo "== Python tests: $(ARGS)"
	@$(BIN)/python -m pytest -q tests/python $(ARGS)
endif

sanitize: $(ASAN)/build.ninja $(READY)
	@echo "== build: asan$(OTHER)"
	@cmake --build $(ASAN) -j $(JOBS)
	@echo "== C++ tests under the address and undefined-behaviour sanitizers"
	@ctest --preset asan --test-dir $(ASAN) -j $(JOBS)

race: $(TSAN)/build.ninja $(READY)
	@echo "== build: tsan$(OTHER)"
	@cmake --build $(TSAN) -j $(JOBS)
	@echo "== C++ tests of several ranks under the thread sanitizer"
	@ctest --preset tsan --test-dir $(TSAN) -j $(JOBS)

# Needs no GPU. CUDA_ARCHITECTURES=80;90a chooses others than the default; CUDA_TARGET=ligature
# leaves the tests out. Its torch is that of tools/setup_cuda.sh.
cuda: $(READY)
	$(if $(OTHER),$(error make cuda has a torch of its own, and takes no TORCH))
	@PYTHON="$(PYTHON)" tools/setup_cuda.sh $(CUDA_VENV)
	@echo "== configure and build: cuda"
	@. $(CUDA_VENV)/cuda.env && cmake --preset cuda \
	  $(if $(CUDA_ARCHITECTURES),"-DLIGATURE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)")
	@cmake --build build/cuda -j $(JOBS) --target $(CUDA_TARGET)

lint: $(READY)
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@echo "== ruff"
	@$(BIN)/ruff check -q $(PY_DIRS)
	@$(BIN)/ruff format -q --check $(PY_DIRS)
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== includes"
	@$(BIN)/python tools/check_includes.py

format: $(READY)
	@$(BIN)/clang-format -i $(CXX_FILES)
	@$(BIN)/ruff check -q --fix --exit-zero $(PY_DIRS)
	@$(BIN)/ruff format -q $(PY_DIRS)

clean:
	@rm -rf build python/ligature/_C*.so python/ligature/libligature.so python/ligature/_build.py
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find $(PY_DIRS) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .venv-torch-* $(CUDA_VENV)

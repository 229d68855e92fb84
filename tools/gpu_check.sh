#!/bin/sh
# Builds and checks Ligature on a machine that already has everything, with its own python3 and
# torch: no virtual environment, no network. Arguments go to the benchmark.
set -eu
cd "$(dirname "$0")/.."

# Not every compiler will do: one that puts its own libstdc++ into each library breaks what torch and
# Ligature hand to each other.
export CXX=${LIGATURE_CXX:-/usr/bin/g++}

python=$(python3 -c 'import sys; print(sys.executable)')
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda,
  torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'

echo "== configure and build"
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0a} cmake --preset gpu \
  -DPython3_EXECUTABLE="$python"
cmake --build build/gpu -j "${JOBS:-16}"

# Both at once, to stay within ten minutes; wheels are tried where there is a compiler cache.
echo "== C++ and Python tests"
build/gpu/bin/ligature_tests --gtest_brief=1 >build/gpu/cpp_tests.log 2>&1 &
cpp_tests=$!
"$python" -m pytest -q tests/python --ignore tests/python/test_install.py
if ! wait "$cpp_tests"; then
  cat build/gpu/cpp_tests.log
  exit 1
fi
tail -n 2 build/gpu/cpp_tests.log
echo "== benchmark"
"$python" benchmarks/bench.py "$@"

#!/bin/sh
# Builds, tests and measures Ligature on a GPU machine that already has everything, with its own
# python3 and CUDA torch: no virtual environment, no network, under ten minutes.
#   tools/gpu_check.sh                    build, test, bench
#   tools/gpu_check.sh build test ...     some of build, test, bench, sanitize, in this order
# JOBS: parallel compile jobs (all cores). CUDA_ARCHITECTURES: as 90a. BENCH_ARGS go to bench.py;
# TEST_FILTER is a gtest filter for test and sanitize; PYTEST_ARGS go to pytest.
set -eu
cd "$(dirname "$0")/.."

# Not every compiler will do: one that puts its own libstdc++ into each library breaks what torch and
# Ligature hand to each other.
export CXX=${LIGATURE_CXX:-/usr/bin/g++}

python=$(python3 -c 'import sys; print(sys.executable)')
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
build=build/gpu

python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda,
  torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'

build() {
  echo "== configure and build"
  cmake --preset gpu -DPython3_EXECUTABLE="$python" \
    "-DLIGATURE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90a}"
  cmake --build $build -j "${JOBS:-$(nproc)}"
}

# Both at once, to stay within ten minutes; wheels are tried where there is a compiler cache.
run_tests() {
  echo "== C++ and Python tests"
  $build/bin/ligature_tests --gtest_brief=1 "--gtest_filter=${TEST_FILTER:-*}" \
    >$build/cpp_tests.log 2>&1 &
  cpp_tests=$!
  failed=""
  workers=""
  "$python" -c 'import xdist' 2>/dev/null && workers="-n 4"
  # shellcheck disable=SC2086
  "$python" -m pytest -q $workers tests/python --ignore tests/python/test_install.py \
    ${PYTEST_ARGS:-} || failed=1
  wait "$cpp_tests" || failed=1
  if [ -n "$failed" ]; then
    cat $build/cpp_tests.log
    return 1
  fi
  tail -n 2 $build/cpp_tests.log
}

bench() {
  echo "== kernels against a copy of the same bytes"
  "$python" benchmarks/cuda_kernels.py
  echo "== benchmark"
  # shellcheck disable=SC2086
  "$python" benchmarks/bench.py ${BENCH_ARGS:-}
}

# The kernels' own tests; torch's caching allocator would hide what is out of bounds.
sanitize() {
  for tool in memcheck racecheck initcheck; do
    echo "== compute-sanitizer: $tool"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 9 \
      --kernel-name-exclude kernel_substring=_ZN2at \
      $build/bin/ligature_tests --gtest_brief=1 "--gtest_filter=${TEST_FILTER:-Cuda*-*MoreThan*}"
  done
}

for part in "${@:-build test bench}"; do
  for name in $part; do
    case $name in
      build) build ;;
      test) run_tests ;;
      bench) bench ;;
      sanitize) sanitize ;;
      *)
        echo "gpu_check.sh: wanted build, test, bench or sanitize, got $name" >&2
        exit 2
        ;;
    esac
  done
done

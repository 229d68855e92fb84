#!/bin/sh
# Builds, tests and measures Ligature on a GPU machine that already has everything, with its own
# python3 and CUDA torch: no virtual environment, no network, under ten minutes.
#   tools/gpu_check.sh                    build, test, bench
#   tools/gpu_check.sh build test ...     some of build, build_package, test, bench, sanitize
# build_package leaves the C++ tests and examples out: enough for bench. What is printed is short;
# whole logs are in $OUT (build/gpu/logs).
# JOBS: parallel compile jobs and test processes (all cores). CUDA_ARCHITECTURES: as 90a. BENCH_ARGS
# go to bench.py (--rounds 2 --compile 40); TEST_FILTER is a gtest filter for test and sanitize; PYTEST_ARGS go to
# pytest. LIGATURE_TEST_DEVICES: "cuda" alone; "cpu cuda" tests what needs no GPU as well.
set -eu
cd "$(dirname "$0")/.."

# Not every compiler will do: one that puts its own libstdc++ into each library breaks what torch and
# Ligature hand to each other.
export CXX=${LIGATURE_CXX:-/usr/bin/g++}

python=$(python3 -c 'import sys; print(sys.executable)')
export LIGATURE_TEST_DEVICES="${LIGATURE_TEST_DEVICES:-cuda}"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
build=build/gpu
logs=${OUT:-$build/logs}
jobs=${JOBS:-$(env -u OMP_NUM_THREADS nproc)}
mkdir -p "$logs"
rm -f "$logs/tests.log"

python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda,
  torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'

# The seconds that a command takes; of its output only the end, when it fails.
quietly() {
  name=$1
  shift
  began=$(date +%s)
  if ! "$@" >"$logs/$name.log" 2>&1; then
    echo "== $name failed after $(($(date +%s) - began)) s"
    grep -n -A 8 -E 'error|FAILED' "$logs/$name.log" | cut -c 1-300 | head -n 60
    tail -n 15 "$logs/$name.log" | cut -c 1-300
    return 1
  fi
  echo "== $name: $(($(date +%s) - began)) s"
}

build() {
  quietly configure cmake --preset gpu -DPython3_EXECUTABLE="$python" \
    "-DLIGATURE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90a}"
  quietly build cmake --build $build -j "$jobs" --target "$1"
}

# Wheels are tried where there is a compiler cache.
run_tests() {
  echo "== C++ and Python tests"
  status=0
  # shellcheck disable=SC2086
  "$python" tools/run_tests.py --gpu --jobs "$jobs" --limit "${TEST_SECONDS:-270}" --logs "$logs" \
    --cpp $build/bin/ligature_tests --cpp-shards 23 "--cpp-filter=${TEST_FILTER:-*}" \
    --ignore test_install.py -- ${PYTEST_ARGS:-} >"$logs/tests.log" || status=$?
  cat "$logs/tests.log"
  return "$status"
}

bench() {
  echo "== benchmark"
  # shellcheck disable=SC2086
  "$python" benchmarks/bench.py --json "$logs/bench.json" ${BENCH_ARGS:---rounds 2 --compile 40}
}

# The kernels' own tests.
sanitize() {
  echo "== compute-sanitizer: memcheck, racecheck, initcheck"
  "$python" tools/run_tests.py --gpu --no-python --jobs "$jobs" --limit "${SANITIZE_SECONDS:-300}" \
    --logs "$logs/sanitize" --cpp $build/bin/ligature_tests --cpp-shards 5 \
    "--cpp-filter=${TEST_FILTER:-Cuda*:QuantizeCuda*-*MoreThan*}" \
    --under memcheck --under racecheck --under initcheck
}

# A build that fails ends it all; tests that fail do not keep the benchmark from being run.
failed=0
for part in "${@:-build test bench}"; do
  for name in $part; do
    case $name in
      build) build all ;;
      build_package) build _C ;;
      test) run_tests || failed=1 ;;
      bench) bench || failed=1 ;;
      sanitize) sanitize || failed=1 ;;
      *)
        echo "gpu_check.sh: wanted build, build_package, test, bench or sanitize, got $name" >&2
        exit 2
        ;;
    esac
  done
done
if [ -f "$logs/tests.log" ]; then tail -n 1 "$logs/tests.log"; fi
exit $failed

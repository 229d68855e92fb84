"""Runs the tests in several processes: Python's files and the C++ tests' shards from one queue.

    python tools/run_tests.py [--jobs 2] [--cpp build/release/bin/ligature_tests] [--logs DIR]
        [--limit SECONDS] [--ignore FILE] [--no-python --under memcheck] [-- arguments for pytest]

The longest come first; a long file is given out in parts, short ones together. What fails is shown
at the end, shortened; whole logs are in the folder of --logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Seconds of the longest files, in one process on a CPU: only what they are to each other counts.
SECONDS = {
    "test_random_pipelines.py": 55.0,
    "test_demo.py": 45.0,
    "test_install.py": 45.0,
    "test_recipe_ops.py": 38.0,
    "test_compile.py": 25.0,
    "test_compile_recipes.py": 20.0,
    "test_recipe_training.py": 15.0,
    "test_recipe_fusions.py": 12.0,
    "test_cpp_forms.py": 11.0,
    "test_compile_custom.py": 9.0,
    "test_module_copies.py": 8.0,
    "test_delayed_scaling.py": 8.0,
    "test_quantizers.py": 8.0,
    "test_integrations_transformers.py": 20.0,
    "test_integrations_state.py": 10.0,
    "test_llama_example.py": 7.0,
    "test_recipe_steps.py": 7.0,
    "test_formats.py": 6.5,
    "test_custom_arguments.py": 5.5,
    "test_docs.py": 5.0,
    "test_docs_site.py": 4.0,
    "test_recipe_explain.py": 4.0,
    "test_autograd_lifetime.py": 3.5,
    "test_state_dict_low_precision.py": 3.5,
    "test_testing_operation.py": 3.0,
    "test_testing_walk.py": 3.0,
}
OTHERS = 1.0
# Beside that on a GPU, where every other test runs on both devices too.
GPU_SECONDS = {
    "test_cuda_formats.py": 40.0,
    "test_cuda_gemm.py": 20.0,
    "test_cuda_stream.py": 5.0,
    "test_formats.py": 10.0,
    "test_quantizers.py": 10.0,
    "test_recipe_ops.py": 40.0,
    "test_recipe_fusions.py": 15.0,
    "test_recipe_steps.py": 15.0,
}
# One long test, or fixtures that would run in every part.
WHOLE = ("test_demo.py", "test_install.py", "test_cpp_forms.py")
# Our own kernels are checked; initcheck has to see what every other one writes.
TOOLS = {
    "memcheck": ["--kernel-name", "kns=ligature"],
    "racecheck": ["--kernel-name", "kns=ligature"],
    "initcheck": [],
}
# What these two do not see: copies that the tensor memory accelerator makes, in cuBLASLt's products
# and in ours.
BLIND = ("racecheck", "initcheck")
BY_TMA = "CudaGemm*:CudaGated*:CudaActivatedLinear*:CudaLaunch*"
START = 3.0  # until a process has imported torch
TOLD = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")
SHOWN = 7000  # characters of failures


# -- a part of a file, in a process of its own


class Part:
    """A plugin of pytest's that takes every so manyth test."""

    def __init__(self, which: int, of: int) -> None:
        self.which, self.of = which, of

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self.which :: self.of]


def run_part(part: str, arguments: list[str]) -> int:
    import pytest

    sys.path[0] = os.getcwd()  # as python -m pytest has it, and not this file's folder
    which, of = map(int, part.split("/"))
    return int(pytest.main(arguments, plugins=[Part(which, of)]))


# -- what is to be run


@dataclass
class Unit:
    name: str
    command: list[str]
    cost: float
    env: dict[str, str] = field(default_factory=dict)
    log: Path = Path()
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0
    code: int | None = None

    @property
    def failed(self) -> bool:
        nothing_collected = self.name.startswith("test_") and self.code == 5
        return self.code != 0 and not nothing_collected


def python_units(jobs: int, gpu: bool, ignored: list[str], arguments: list[str]) -> list[Unit]:
    known = Counter(SECONDS) + Counter(GPU_SECONDS if gpu else {})
    files = [f for f in sorted((ROOT / "tests/python").glob("test_*.py")) if f.name not in ignored]
    costs = {file: known[file.name] or OTHERS for file in files}
    share = max(10.0, sum(costs.values()) / jobs / 4)
    plain = [
        "-q",
        "--durations=4",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=240",
    ]
    plain += arguments
    units: list[Unit] = []
    together: list[Path] = []

    def command(part: str, files: list[Path]) -> list[str]:
        return [sys.executable, __file__, "part", part, *plain, *map(str, files)]

    def flush() -> None:
        if together:
            cost = START + sum(costs[file] for file in together)
            name = together[0].stem + (f" and {len(together) - 1} more" if together[1:] else "")
            units.append(Unit(name, command("0/1", together), cost))
            together.clear()

    for file in sorted(files, key=lambda file: -costs[file]):
        parts = 1 if file.name in WHOLE else round(costs[file] / share)
        if parts > 1:
            for i in range(parts):
                name = f"{file.stem} {i + 1} of {parts}"
                cost = START + costs[file] / parts
                units.append(Unit(name, command(f"{i}/{parts}", [file]), cost))
            continue
        if sum(costs[f] for f in together) + costs[file] > share:
            flush()
        together.append(file)
    flush()
    return units


def cpp_units(binary: str, shards: int, pattern: str, gpu: bool, tool: str | None) -> list[Unit]:
    env = {}
    if tool in BLIND:
        pattern += (":" if "-" in pattern else "-") + BY_TMA
    command = [binary, "--gtest_brief=1", f"--gtest_filter={pattern}"]
    if tool is not None:
        checker = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--report-api-errors", "no"]
        command = [*checker, "--error-exitcode", "9", "--print-limit", "20", *command]
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # which would hide what is out of bounds
    name = "C++" if tool is None else f"C++ {tool}"
    return [
        Unit(
            f"{name} {i + 1} of {shards}",
            command,
            (200.0 if gpu else 30.0) / shards + START,
            {**env, "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(i)},
        )
        for i in range(shards)
    ]


# -- running


def run_all(units: list[Unit], jobs: int, threads: int, logs: Path, limit: float) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    waiting = sorted(units, key=lambda unit: -unit.cost)
    running: list[Unit] = []
    common = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
    end = time.monotonic() + limit
    while waiting or running:
        while waiting and len(running) < jobs:
            unit = waiting.pop(0)
            unit.log = logs / (unit.name.replace(" ", "_").replace("+", "p") + ".log")
            if not unit.name.startswith("test_"):
                unit.env["GTEST_OUTPUT"] = f"json:{unit.log.with_suffix('.json')}"
            with open(unit.log, "wb") as out:
                unit.process = subprocess.Popen(
                    unit.command,
                    cwd=ROOT,
                    env={**common, **unit.env},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            unit.began = time.monotonic()
            running.append(unit)
        time.sleep(0.05)
        if time.monotonic() > end:
            stop(running)
            waiting.clear()
        for unit in [unit for unit in running if unit.process and unit.process.poll() is not None]:
            assert unit.process is not None
            running.remove(unit)
            unit.code = unit.process.returncode
            unit.seconds = time.monotonic() - unit.began
            if unit.failed:
                print(f"failed: {unit.name} ({unit.seconds:.0f} s)", flush=True)


def stop(running: list[Unit]) -> None:
    for unit in running:
        assert unit.process is not None
        if unit.process.poll() is None:
            os.killpg(unit.process.pid, signal.SIGKILL)
            unit.process.wait()


# -- telling


def failure_text(unit: Unit, size: int) -> str:
    text = unit.log.read_text(errors="replace") if unit.log.is_file() else ""
    if "= FAILURES =" in text or "= ERRORS =" in text:
        text = text[text.find("= FAILURES =") if "= FAILURES =" in text else 0 :]
        summary = text.find("short test summary info")
        names = [
            line for line in text[summary:].splitlines() if line.startswith(("FAILED", "ERROR"))
        ]
        listed = "\n".join(line[:200] for line in names)
        listed = listed[: size // 2]
        return f"{listed}\n{text[: size - len(listed)]}"
    if "Fatal Python error" in text:
        lines = text[text.rfind("Fatal Python error") :].splitlines()
        return "\n".join(line for line in lines if "site-packages/_py" not in line)[:size]
    return text[-size:]


def cpp_seconds(unit: Unit) -> dict[str, float]:
    """Of each C++ test, where its process came to its end."""
    told = unit.log.with_suffix(".json")
    if unit.name.startswith("test_") or not told.is_file():
        return {}
    return {
        f"{test['classname']}.{test['name']}": float(test["time"].rstrip("s"))
        for suite in json.loads(told.read_text())["testsuites"]
        for test in suite["testsuite"]
    }


def report(units: list[Unit], began: float) -> int:
    counts: Counter[str] = Counter()
    for unit in units:
        text = unit.log.read_text(errors="replace") if unit.log.is_file() else ""
        if unit.name.startswith("C++"):
            for n in re.findall(r"\[  PASSED  \] (\d+)", text):
                counts["C++ passed"] += int(n)
            counts["C++ failed"] += len(set(re.findall(r"\[  FAILED  \] (\w+\.\S+)", text)))
            continue
        last = [line for line in text.splitlines() if TOLD.search(line) and " in " in line]
        for number, what in TOLD.findall(last[-1] if last else ""):
            counts[what.replace("errors", "error")] += int(number)
    failed = [unit for unit in units if unit.failed]
    for unit in failed:
        how = "cut off" if unit.code is None or unit.code == -9 else f"exit code {unit.code}"
        print(f"\n-- {unit.name}: {how} after {unit.seconds:.0f} s, {unit.log}")
        print(failure_text(unit, SHOWN // len(failed)))
    longest = sorted(units, key=lambda unit: -unit.seconds)[:6]
    print("longest: " + ", ".join(f"{unit.name} {unit.seconds:.0f} s" for unit in longest))
    tests = [item for unit in units for item in cpp_seconds(unit).items()]
    for name, seconds in sorted(tests, key=lambda item: -item[1])[:6]:
        print(f"{seconds:9.1f} s {name}")
    told = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    print(f"{told}; {time.monotonic() - began:.0f} s in {len(units)} processes")
    return 1 if failed else 0


def main() -> int:
    if sys.argv[1:2] == ["part"]:
        return run_part(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--cpp", help="the C++ tests' program, to be run too")
    parser.add_argument("--cpp-shards", type=int, default=1)
    parser.add_argument("--cpp-filter", default="*")
    parser.add_argument(
        "--under", action="append", choices=TOOLS, help="compute-sanitizer, around the C++ tests"
    )
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="every test runs on a GPU too")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/test_logs")
    parser.add_argument("--limit", type=float, default=3600, help="seconds, for everything")
    parser.add_argument("--ignore", action="append", default=[], help="a file in tests/python")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args()
    began = time.monotonic()
    units = []
    if not args.no_python:
        units = python_units(args.jobs, args.gpu, args.ignore, args.pytest)
    for tool in args.under or [None]:
        if args.cpp:
            units += cpp_units(args.cpp, args.cpp_shards, args.cpp_filter, args.gpu, tool)
    run_all(units, args.jobs, args.threads, args.logs, args.limit)
    return report(units, began)


if __name__ == "__main__":
    sys.exit(main())

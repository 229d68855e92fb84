"""Runs the tests in several processes: Python's files and the C++ tests' shards from one queue.

    python tools/run_tests.py [--jobs 2] [--cpp build/release/bin/ligature_tests] [--logs DIR]
        [--limit SECONDS] [--ignore FILE] [--no-python --under memcheck] [-- arguments for pytest]

The longest come first; a long file is given out in parts, short ones together. Each run
measures how long they take, for the next one. What fails is shown at the end, shortened; whole logs
are in the folder of --logs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
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
# What each file took when it last ran as a whole: {"cpu": {file: seconds, ...}, "gpu": ...}.
SECONDS = ROOT / "build/test_seconds.json"
SECONDS_PER_LINE = 0.02  # of a file that was not measured yet
# What a file says that cannot be cut: one long test, or fixtures that would run in every part.
WHOLE = re.compile(r"^IN_ONE_PROCESS = True\b", re.MULTILINE)
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


# -- some tests, in a process of their own


class Part:
    """A plugin of pytest's that takes one of several equal parts and measures files' seconds."""

    def __init__(self, which: int, of: int) -> None:
        self.which, self.of = which, of
        self.seconds: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        numbers = list(range(len(items)))
        random.Random(0).shuffle(numbers)  # every so manyth alone may be all those of one parameter
        items[:] = [items[number] for number in sorted(numbers[self.which :: self.of])]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[Path(report.nodeid.partition("::")[0]).name] += report.duration


def run_part(part: str, arguments: list[str]) -> int:
    import pytest

    sys.path[0] = os.getcwd()  # as python -m pytest has it, and not this file's folder
    plugin = Part(*map(int, part.split("/")))
    code = int(pytest.main(arguments, plugins=[plugin]))
    Path(os.environ["SECONDS_OUTPUT"]).write_text(json.dumps(plugin.seconds))
    return code


# -- what is to be run


@dataclass
class Unit:
    name: str
    command: list[str]
    cost: float  # the longest come first
    names: list[str]  # of files, or C++
    env: dict[str, str] = field(default_factory=dict)
    log: Path = Path()
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0
    code: int | None = None

    @property
    def is_python(self) -> bool:
        return not self.name.startswith("C++")

    @property
    def times(self) -> Path:
        """The seconds of what it ran, where its process came to its end."""
        return self.log.with_suffix(".json")

    @property
    def failed(self) -> bool:
        nothing_collected = self.is_python and self.code == 5
        return self.code != 0 and not nothing_collected


def python_units(
    jobs: int, measured: dict[str, float], ignored: list[str], arguments: list[str]
) -> list[Unit]:
    """Files in few processes: long ones in parts, short ones together.

    Nobody knows how long a new file takes. All new ones are cut together, into parts of as many
    tests from anywhere, which take about as long as each other. What cannot be cut comes first.
    """
    files = [f for f in sorted((ROOT / "tests/python").rglob("test_*.py")) if f.name not in ignored]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    whole = {file for file in files if WHOLE.search(texts[file])}
    new = [file for file in files if file.name not in measured]
    costs = {f: measured.get(f.name, texts[f].count("\n") * SECONDS_PER_LINE) for f in files}
    share = max(10.0, sum(costs.values()) / jobs / 4)
    plain = ["-q", "--durations=4", "--tb=short", "-p", "no:cacheprovider"]
    plain += ["-o", "faulthandler_timeout=240", *arguments]
    units: list[Unit] = []

    def add(name: str, parts: int, files: list[Path], cost: float) -> None:
        for i in range(parts):
            units.append(
                Unit(
                    name if parts == 1 else f"{name} {i + 1} of {parts}",
                    [sys.executable, __file__, "part", f"{i}/{parts}", *plain, *map(str, files)],
                    START + cost / parts,
                    [file.name for file in files],
                )
            )

    def add_together(files: list[Path], parts: int = 1) -> None:
        if files:
            name = files[0].stem + (f" and {len(files) - 1} more" if files[1:] else "")
            add(name, parts, files, sum(costs[file] for file in files))

    for file in (file for file in new if file in whole):
        add(file.stem, 1, [file], math.inf)
    cut = [file for file in new if file not in whole]
    add_together(cut, min(2 * jobs, math.ceil(sum(costs[file] for file in cut) / share)))
    together: list[Path] = []
    for file in sorted((f for f in files if f not in new), key=lambda file: -costs[file]):
        parts = 1 if file in whole else round(costs[file] / share)
        if parts > 1:
            add(file.stem, parts, [file], costs[file])
            continue
        if sum(costs[f] for f in together) + costs[file] > share:
            add_together(together)
            together = []
        together.append(file)
    add_together(together)
    return units


def cpp_units(
    binary: str, shards: int, pattern: str, measured: dict[str, float], tool: str | None
) -> list[Unit]:
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
            measured.get(name, math.inf) / shards + START,
            [name],
            {**env, "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(i)},
        )
        for i in range(shards)
    ]


# -- running


def run_all(units: list[Unit], jobs: int, threads: int, logs: Path, limit: float) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for unit in units:
        unit.log = logs / (unit.name.replace(" ", "_").replace("+", "p") + ".log")
        unit.log.unlink(missing_ok=True)
        unit.times.unlink(missing_ok=True)
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
            unit.env |= {"SECONDS_OUTPUT": str(unit.times), "GTEST_OUTPUT": f"json:{unit.times}"}
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
    if unit.is_python or not unit.times.is_file():
        return {}
    return {
        f"{test['classname']}.{test['name']}": float(test["time"].rstrip("s"))
        for suite in json.loads(unit.times.read_text())["testsuites"]
        for test in suite["testsuite"]
    }


def seconds_by_name(units: list[Unit]) -> dict[str, float]:
    """Of each file, and of the C++ tests, where all processes that had a part came to their end."""
    found: Counter[str] = Counter()
    lost: set[str] = set()
    for unit in units:
        if not unit.times.is_file():
            lost.update(unit.names)
        elif unit.is_python:
            found.update({**dict.fromkeys(unit.names, 0.0), **json.loads(unit.times.read_text())})
        else:
            found.update({unit.names[0]: sum(cpp_seconds(unit).values())})
    return {name: round(seconds, 2) for name, seconds in found.items() if name not in lost}


def load_seconds(device: str) -> dict[str, float]:
    """What earlier runs measured on this kind of device."""
    known = json.loads(SECONDS.read_text()) if SECONDS.is_file() else {}
    return dict(known.get(device, {}))


def save_seconds(device: str, seconds: dict[str, float]) -> None:
    known = json.loads(SECONDS.read_text()) if SECONDS.is_file() else {}
    known[device] = {**known.get(device, {}), **seconds}
    SECONDS.parent.mkdir(parents=True, exist_ok=True)
    made = SECONDS.with_suffix(f".{os.getpid()}")  # another run may be reading
    made.write_text(json.dumps(known, indent=1, sort_keys=True))
    made.replace(SECONDS)


def report(units: list[Unit], began: float) -> int:
    counts: Counter[str] = Counter()
    for unit in units:
        text = unit.log.read_text(errors="replace") if unit.log.is_file() else ""
        if not unit.is_python:
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
    device = "gpu" if args.gpu else "cpu"
    measured = load_seconds(device)
    units = []
    if not args.no_python:
        units = python_units(args.jobs, measured, args.ignore, args.pytest)
    for tool in args.under or [None]:
        if args.cpp:
            units += cpp_units(args.cpp, args.cpp_shards, args.cpp_filter, measured, tool)
    run_all(units, args.jobs, args.threads, args.logs.resolve(), args.limit)
    if not args.pytest:  # which may choose some tests of a file
        save_seconds(device, seconds_by_name(units))
    return report(units, began)


if __name__ == "__main__":
    sys.exit(main())

"""tools/run_tests.py: how it gives out files, and what it measures however they were given out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_tests
import torch
from run_tests import Unit, cpp_units, python_units

SLEEPS = "import time, pytest\n@pytest.mark.parametrize('i', range(4))\n"
SLEEPS += "def test_sleep(i):\n    time.sleep(0.05)\n"


@pytest.fixture(params=["cpu"], autouse=True)
def device() -> Iterator[str]:
    """Nothing is computed."""
    with torch.device("cpu"):
        yield "cpu"


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository's tests, in two folders."""
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "SECONDS", tmp_path / "build" / "test_seconds.json")
    folder = tmp_path / "tests" / "python"
    for name in ("a/test_long", "a/test_short", "b/test_shorter", "b/test_other"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(SLEEPS)
    (folder / "b/test_whole.py").write_text("IN_ONE_PROCESS = True\n" + SLEEPS)
    return folder


def parts(unit: Unit) -> str:
    return unit.command[unit.command.index("part") + 1]


def given_out(units: list[Unit]) -> list[tuple[list[str], str]]:
    """The files of each process and which part of them it runs, those that come first first."""
    return [(sorted(u.names), parts(u)) for u in sorted(units, key=lambda u: -u.cost)]


def run(units: list[Unit], logs: Path) -> dict[str, float]:
    run_tests.run_all(units, jobs=2, threads=1, logs=logs, limit=600.0)
    return run_tests.seconds_by_name(units)


def test_measured_files(tests: Path) -> None:
    measured = {"test_long.py": 60.0, "test_whole.py": 61.0, "test_short.py": 12.0}
    measured |= {"test_shorter.py": 2.0, "test_other.py": 1.0}
    units = python_units(2, measured, [], [])
    assert given_out(units) == [
        (["test_whole.py"], "0/1"),
        *[(["test_long.py"], f"{i}/4") for i in range(4)],
        (["test_other.py", "test_short.py", "test_shorter.py"], "0/1"),
    ]
    assert sum(unit.cost - run_tests.START for unit in units) == pytest.approx(136.0)
    assert {unit.name for unit in units} >= {"test_whole", "test_long 1 of 4", "test_long 4 of 4"}
    ignored = ["test_long.py", "test_whole.py"]
    assert given_out(python_units(2, measured, ignored, [])) == [
        (["test_short.py"], "0/1"),
        (["test_other.py", "test_shorter.py"], "0/1"),
    ]


@pytest.mark.parametrize(
    ("jobs", "per_line", "count"),
    [(2, 10.0, 4), (8, 10.0, 16), (2, 0.05, 1)],
)
def test_new_files_are_cut_together_and_whole_ones_come_first(
    tests: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, per_line: float, count: int
) -> None:
    monkeypatch.setattr(run_tests, "SECONDS_PER_LINE", per_line)
    new = ["test_long.py", "test_other.py", "test_short.py", "test_shorter.py"]
    assert given_out(python_units(jobs, {}, [], [])) == [
        (["test_whole.py"], "0/1"),
        *[(new, f"{i}/{count}") for i in range(count)],
    ]


def test_new_files_among_measured_ones(tests: Path) -> None:
    measured = dict.fromkeys(["test_long.py", "test_short.py", "test_whole.py"], 4.0)
    assert given_out(python_units(2, measured, [], [])) == [
        (["test_long.py", "test_short.py"], "0/1"),
        (["test_whole.py"], "0/1"),
        (["test_other.py", "test_shorter.py"], "0/1"),
    ]


def test_a_file_is_measured_in_parts_and_together_with_others(tests: Path, tmp_path: Path) -> None:
    measured = {"test_long.py": 20.0, "test_short.py": 1.0, "test_shorter.py": 1.0}
    units = python_units(2, measured, ["test_other.py"], [])
    assert sorted(map(parts, units)) == ["0/1", "0/1", "0/2", "1/2"]
    seconds = run(units, tmp_path / "logs")
    assert [unit.code for unit in units] == [0] * 4
    assert sorted(seconds) == ["test_long.py", "test_short.py", "test_shorter.py", "test_whole.py"]
    assert all(0.2 <= s < 5.0 for s in seconds.values()), seconds
    run_tests.save_seconds("cpu", seconds)
    run_tests.save_seconds("gpu", {"test_long.py": 5.0})
    run_tests.save_seconds("cpu", {"test_whole.py": 7.0})
    assert run_tests.load_seconds("cpu") == {**seconds, "test_whole.py": 7.0}
    assert run_tests.load_seconds("gpu") == {"test_long.py": 5.0}


def test_a_file_of_which_a_part_did_not_end_is_not_measured(tests: Path, tmp_path: Path) -> None:
    text = SLEEPS + "    if i == 2: __import__('os')._exit(3)\n"
    (tests / "a/test_long.py").write_text(text)
    units = python_units(2, {"test_long.py": 20.0}, ["test_whole.py"], [])
    seconds = run(units, tmp_path / "logs")
    assert sorted(seconds) == ["test_other.py", "test_short.py", "test_shorter.py"]
    (failed,) = [unit.name for unit in units if unit.failed]
    assert failed in {"test_long 1 of 2", "test_long 2 of 2"}


@pytest.mark.parametrize("of", [1, 3, 7])
def test_parts_are_all_tests_in_their_order(of: int) -> None:
    found = []
    for which in range(of):
        items = list(range(20))
        run_tests.Part(which, of).pytest_collection_modifyitems(items)
        assert items == sorted(items)
        assert len(items) in {20 // of, -(-20 // of)}
        found += items
    assert sorted(found) == list(range(20))


def test_cpp_tests(tmp_path: Path) -> None:
    new = cpp_units("tests", 3, "*", {}, None)
    assert [unit.cost for unit in new] == [math.inf] * 3
    units = cpp_units("tests", 3, "*", {"C++": 90.0, "C++ memcheck": 9.0}, "memcheck")
    assert [unit.cost for unit in units] == [3.0 + run_tests.START] * 3
    assert [unit.env["GTEST_SHARD_INDEX"] for unit in units] == ["0", "1", "2"]
    for i, unit in enumerate(units):
        unit.log = tmp_path / f"{i}.log"
        tests = [{"classname": "Norm", "name": f"test{i}{k}", "time": "1.5s"} for k in range(2)]
        unit.times.write_text(json.dumps({"testsuites": [{"testsuite": tests}]}))
    assert run_tests.seconds_by_name(units) == {"C++ memcheck": 9.0}
    units[1].times.unlink()
    assert run_tests.seconds_by_name(units) == {}


def test_out_of_time(tests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither what was cut off nor what never began is measured; both have failed."""
    units = python_units(2, {}, [], [])
    run_tests.run_all(units, jobs=1, threads=1, logs=tmp_path, limit=0.0)
    assert run_tests.seconds_by_name(units) == {}
    assert run_tests.report(units, began=0.0) == 1
    assert capsys.readouterr().out.count(": cut off after") == len(units) == 2

"""The range of torch versions is the same wherever it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib

import pytest
import torch
from install_support import tool
from repository import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
(REQUIREMENT,) = (r for r in PYPROJECT["build-system"]["requires"] if r.startswith("torch"))
RANGE = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", REQUIREMENT)
assert RANGE, REQUIREMENT
MAJOR, FIRST, _, END = map(int, RANGE.groups())


def minor(version: str) -> tuple[int, int]:
    major, minor_, *_ = version.split(".")
    return int(major), int(minor_)


def test_range_is_of_one_major_version() -> None:
    assert RANGE is not None
    assert RANGE[1] == RANGE[3] == str(MAJOR)
    assert FIRST < END


@pytest.mark.parametrize("file", ["docs/install.md", "CHANGELOG.md", "requirements-dev.txt"])
def test_text_names_the_range(file: str) -> None:
    text = " ".join((ROOT / file).read_text().split())
    found = re.findall(r"torch (?:from )?(\d+\.\d+) to (\d+\.\d+)", text)
    assert found[:1] == [(f"{MAJOR}.{FIRST}", f"{MAJOR}.{END - 1}")]


def test_pinned_and_running_torch_are_in_the_range() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.M)
    assert pinned
    for version in (pinned[1], torch.__version__):
        assert (MAJOR, FIRST) <= minor(version) < (MAJOR, END)


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        (f"{MAJOR}.{FIRST - 1}.9", "CMake Error"),
        (f"{MAJOR}.{FIRST}.0", ""),
        (f"{MAJOR}.{END - 1}.9", ""),
        (f"{MAJOR}.{END}.0", "CMake Warning"),
    ],
)
def test_cmake_refuses_older_and_warns_of_newer(version: str, outcome: str) -> None:
    script = ROOT / "cmake" / "LigatureTorchRange.cmake"
    done = subprocess.run(
        [tool("cmake"), f"-DLIGATURE_TORCH_VERSION={version}", "-P", script],
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip().startswith(outcome)
    assert bool(done.stderr) == bool(outcome)
    assert done.returncode == (outcome == "CMake Error")
    if outcome:
        assert f"{REQUIREMENT}; got torch {version}" in " ".join(done.stderr.split())


def test_another_torch_shares_nothing_with_the_default() -> None:
    """What `make TORCH=...` runs names no folder that `make` builds into."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")

    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    def commands(*arguments: str) -> str:
        command = [make, "-n", "-B", "JOBS=1", "PYTHON=python3", "test", *arguments]
        return subprocess.check_output(command, cwd=ROOT, env=env, text=True)

    plain, other = commands("TORCH="), commands("TORCH=9.8.7")
    assert "9.8.7" not in plain
    for name in (".venv", "build/release", "build/test_logs"):
        assert re.search(rf"{re.escape(name)}(?![-\w])", plain)
        assert re.search(rf"{re.escape(name)}-torch-9.8.7\b", other)
        assert not re.search(rf"{re.escape(name)}(?![-\w])", other)
    assert f"-DLIGATURE_PACKAGE_DIR={ROOT}/build/release-torch-9.8.7/package/ligature" in other

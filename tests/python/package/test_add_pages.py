"""The pages that say which files something new touches name files that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

PAGES = ["add_a_kernel", "add_a_format", "add_a_recipe", "add_a_backend"]


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    files = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert files, f"docs/{page}.md has no table of files"
    for file in files:
        assert (ROOT / file).is_file(), f"docs/{page}.md names {file}"


def test_an_activation_is_a_row_and_its_formulas() -> None:
    def files(name: str) -> set[str]:
        return {
            path.relative_to(ROOT / "ligature").as_posix()
            for path in (ROOT / "ligature").rglob("*.[hc]*")
            if re.search(rf"\b{name}\b", path.read_text())
        }

    table, cuda = "kernels/activation_kind.h", "backend/cuda/device/activation.cuh"
    formulas = {"backend/cpu/activation_functors.h", "backend/aten/activation.cpp"}
    assert files("QGELU") == {table, cuda, *formulas}
    assert files("QGEGLU") == {table, cuda}


def test_folders_include_in_one_direction() -> None:
    done = subprocess.run(
        [sys.executable, "tools/check_includes.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_wrong_include_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_includes

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/norm.cpp").write_text('#include "ligature/ops/linear.h"\n')
    (tmp_path / "stray.h").write_text("")
    monkeypatch.setattr(check_includes, "LIBRARY", tmp_path)
    assert check_includes.problems() == [
        "ligature/kernels/norm.cpp:1: kernels may not include ops (ops/linear.h)",
        "ligature/stray.h is in no room of tools/check_includes.py",
    ]


def test_installed_headers_include_only_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_includes

    headers = check_includes.installed()
    assert "ligature.h" in headers
    assert "kernels/backend.h" in headers
    assert not [h for h in headers if h.startswith("backend/") or h.endswith("pch.h")]
    for header in headers:
        for other in check_includes.includes(ROOT / "ligature" / header):
            assert other in headers

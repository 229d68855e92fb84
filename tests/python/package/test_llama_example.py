"""The example that trains a Llama: all modes start alike and stay together."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from repository import EXAMPLES

pytest.importorskip("transformers", reason="the example needs transformers")


@pytest.fixture(params=["cpu"], autouse=True)
def device() -> Iterator[str]:
    """The example is told its device."""
    with torch.device("cpu"):
        yield "cpu"


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__("llama")


@pytest.mark.parametrize(("recipe", "most"), [("none", 1e-4), ("current", 2e-2)])
def test_modes_stay_together(
    llama: ModuleType, capsys: pytest.CaptureFixture[str], recipe: str, most: float
) -> None:
    given = ["--device", "cpu", "--steps", "20", "--length", "16", "--recipe", recipe]
    assert llama.main(given) == 0
    printed = capsys.readouterr().out
    assert "model.layers.*.mlp" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.split("\n\n")[1].splitlines()}
    assert list(rows) == ["mode", "original", "eager", "difference:"]
    first, last, difference, *_ = map(float, rows["eager"][:6])
    assert last < first
    assert 0 < difference < most
    assert float(rows["original"][2]) == 0


def test_a_mixture(llama: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device", "cpu", "--steps", "20", "--length", "16", "--experts", "4"]
    assert llama.main(given) == 0
    printed = capsys.readouterr().out
    assert "Mixtral, 2 of 4 experts" in printed
    assert "Dispatch, GroupedLinear, ScaledSwiGLU, GroupedLinear, Combine" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.split("\n\n")[1].splitlines()}
    assert list(rows) == ["mode", "original", "original-loop", "eager", "difference:"]
    first, last, difference, _, _, _, saved = map(float, rows["eager"][:7])
    assert last < first
    assert difference < 1e-4
    assert saved < 0.8 * float(rows["original"][6])


def test_a_mode_that_fails_is_told(
    llama: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(llama, "replace", fail)
    assert llama.main(["--device", "cpu", "--steps", "6", "--length", "8"]) == 1
    told = capsys.readouterr()
    assert "eager failed: RuntimeError: no such thing" in told.err
    assert "original " in told.out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--modes", "graphed"],
        ["--steps", "5"],
        ["--modes", "other"],
        ["--recipe", "other"],
        ["--modes", "original-loop"],
    ],
)
def test_wrong_arguments(llama: ModuleType, wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        llama.main(["--device", "cpu", *wrong])

"""The demo with mixtures of experts: the runs agree, and the report shows what each expert had."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from repository import EXAMPLES

#: tools/run_tests.py reads it: each part of this file would run the demo again.
IN_ONE_PROCESS = True
EXPERTS, BLOCKS, STEPS = 8, 2, 12


@pytest.fixture(autouse=True)
def device() -> str:
    """The demo chooses its device by itself."""
    return "cpu"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    __import__("demo")
    return sys.modules["mixture"]


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, after a line of code that may change it."""
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import demo; {before}"
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}; sys.exit(demo.main(['--model', 'moe', *sys.argv[1:]]))",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ElementTree.Element]:
    """What a short run printed, and its report."""
    path = tmp_path_factory.mktemp("demo") / "report.html"
    done = run("--steps", str(STEPS), "--report", str(path))
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout, ElementTree.fromstring(path.read_text(encoding="utf-8"))


def part(page: ElementTree.Element, name: str) -> ElementTree.Element:
    found = page.find(f".//section[@id='{name}']")
    assert found is not None
    return found


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def test_losses_agree_and_fall(told: tuple[str, ElementTree.Element]) -> None:
    assert "The losses of the two runs agree." in told[0]
    assert "2 of 8 experts" in told[0]
    rows = re.findall(
        r"^ +(\d+) +(\d\.\d{4}) +(\d\.\d{4}) +\d\.\de[-+]\d\d +(\d\.\d{4})$", told[0], re.M
    )
    assert int(rows[-1][0]) == STEPS
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.5
    assert any(row[3] != row[2] for row in rows)  # in FP8 it is another computation
    assert re.search(r"saved by one mixture +\S+ \S+ +\S+ \S+ +0\.\d\d ", told[0])
    for op in ("TopKRouter", "Dispatch", "GroupedLinear", "ScaledSwiGLU", "Combine"):
        assert op in text_of(part(told[1], "plan"))
    assert "quantized alone, in its linear layers" in text_of(part(told[1], "low"))


def test_shares_are_printed_and_drawn(told: tuple[str, ElementTree.Element]) -> None:
    printed = re.findall(r"^  (PyTorch|Ligature|FP8) +((?:\d+\.\d%\s*)+)$", told[0], re.M)
    assert [name for name, _ in printed] == ["PyTorch", "Ligature", "FP8"] * BLOCKS
    for _, cells in printed:
        shares = [float(cell.rstrip("%")) for cell in cells.split()]
        assert len(shares) == EXPERTS
        assert sum(shares) == pytest.approx(100, abs=0.5)
        assert max(shares) > min(shares)
    assert printed[0][1] == printed[1][1]
    section = part(told[1], "load")
    figures = list(section.iter("figure"))
    assert len(figures) == 2 * BLOCKS
    for place, figure in enumerate(figures):
        for svg in figure.iter("svg"):
            bars = [r for r in svg.iter("rect") if r.get("class", "").startswith("bar")]
            cells = [r for r in svg.iter("rect") if r.get("class") == "cell"]
            tips = [text_of(title) for title in svg.iter("title")]
            if place % 2 == 0:
                assert len(bars) == 3 * EXPERTS + 3
                cell = printed[3 * (place // 2)][1].split()[0]
                assert tips[0] == f"PyTorch, expert 0: {cell}"
            else:
                assert len(cells) == EXPERTS * STEPS
                assert max(float(c.get("opacity", "")) for c in cells) == 1
            _, _, width, height = map(float, svg.get("viewBox", "").split())
            for rect in svg.iter("rect"):
                right = float(rect.get("x", "")) + float(rect.get("width", ""))
                assert 0 <= float(rect.get("x", "")) <= right <= width
                low = float(rect.get("y", "")) + float(rect.get("height", ""))
                assert 0 <= float(rect.get("y", "")) <= low <= height


def test_disagreement_is_an_error() -> None:
    wrong = (
        "demo.continued = lambda *_: ''; pair = demo.make_pair; demo.make_pair = lambda *a: (m := "
        "pair(*a), m[1].blocks[0].mlp[4].weight3.data.mul_(1.5))[0]"
    )
    arguments = ["--steps", "6", "--quiet", "--no-report", "--recipe", "none"]
    done = run(*arguments, before=wrong)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("The losses of the two runs disagree.")


def test_bfloat16_and_another_recipe() -> None:
    done = run(
        *("--steps", "4", "--dtype", "bfloat16", "--recipe", "mxfp8", "--no-report", "--quiet"),
        before="demo.continued = lambda *_: ''",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "In MXFP8 (mxfp8) the loss of the last 4 steps is " in done.stdout


def test_both_compute_the_same(examples: ModuleType) -> None:
    """Also the gradient of the loss that balances the load."""
    transformer = sys.modules["transformer"]
    pair = transformer.make_pair(20, 16, 32, 2, 1, "none", "moe")
    tokens = torch.randint(20, (4, 16), device=next(pair[0].parameters()).device)
    for model in pair:
        (model(tokens).square().mean() + 10 * model.balance).backward()
    a, b = pair
    assert a.balance > 0.9 * examples.BALANCE
    torch.testing.assert_close(a.balance, b.balance)
    assert torch.equal(a.counts[0], b.counts[0])
    gradients = [
        [g for p in m.parameters() for g in (p.grad.unbind(0) if p.dim() == 3 else [p.grad])]
        for m in pair
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

"""The demo that `make run` starts: the runs agree, and the report tells it all by itself."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from repository import EXAMPLES

#: tools/run_tests.py reads it: each part of this file would run the demo again.
IN_ONE_PROCESS = True
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def device() -> str:
    """The demo chooses its device by itself."""
    return "cpu"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__("demo")


@pytest.fixture
def report(demo: ModuleType) -> ModuleType:
    return sys.modules["report"]


@pytest.fixture
def charts(demo: ModuleType) -> ModuleType:
    return sys.modules["charts"]


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, after a line of code that may change it."""
    code = f"import sys, demo, torch; {before}; sys.exit(demo.main(sys.argv[1:]))"
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {code}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# -- one short run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a short run printed, and its report."""
    path = tmp_path_factory.mktemp("demo") / "a new folder" / "report.html"
    done = run("--steps", "12", "--report", str(path))
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith(f"Report: {path}")
    return done.stdout, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(told: tuple[str, str]) -> ElementTree.Element:
    return ElementTree.fromstring(told[1])


def part(page: ElementTree.Element, name: str) -> ElementTree.Element:
    found = page.find(f".//section[@id='{name}']")
    assert found is not None
    return found


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def curves(page: ElementTree.Element, name: str, kind: str) -> list[list[tuple[float, float]]]:
    """The points of each curve of that kind in a section; the legend's strokes are left out."""
    paths = [
        node.get("d", "") for node in part(page, name).iter("path") if node.get("class") == kind
    ]
    out = []
    for d in paths:
        if "h30" not in d:
            places = (place.split() for place in d.removeprefix("M").split("L"))
            out.append([(float(x), float(y)) for x, y in places])
    return out


def test_losses_are_printed_side_by_side(told: tuple[str, str]) -> None:
    loss = r" +(\d\.\d{4})"
    rows = re.findall(rf"^ +(\d+){loss}{loss} +(\d\.\de[-+]\d\d){loss}$", told[0], re.M)
    assert [int(row[0]) for row in rows] == [1, 2, 4, 6, 8, 10, 12]
    for _, plain, fused, difference, low in rows:
        assert abs(float(plain) - float(fused)) <= float(difference) + 1.01e-4
        assert float(difference) < 1e-4
        assert abs(float(low) - float(fused)) < 0.05
    assert any(row[4] != row[2] for row in rows)  # it is another computation
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.5  # it learns
    assert "The losses of the two runs agree. They differ by at most " in told[0]
    assert "In FP8 (current) the loss of the last 12 steps is " in told[0]
    assert "expert" not in told[0]


def test_progress_without_a_terminal_is_lines(told: tuple[str, str]) -> None:
    lines = [line for line in told[0].splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["10/12", "12/12"]
    assert all(
        re.fullmatch(r".*  \d+:\d\d left  loss .* \| .* \| .*  ms/step .*", x) for x in lines
    )
    assert "\r" not in told[0]


def test_report_is_told_the_same_as_the_terminal(
    told: tuple[str, str], page: ElementTree.Element
) -> None:
    printed = {" ".join(line.split()) for line in told[0].splitlines()}
    rows = [" ".join(text_of(cell) for cell in row) for row in part(page, "figures").iter("tr")]
    assert rows[0].split() == ["PyTorch", "Ligature", "ratio", "FP8", "ratio"]
    assert [row.split()[0] for row in rows[1:]] == ["loss,", "step", "step", "saved", "saved"]
    assert set(rows[1:]) <= printed
    for row in part(page, "environment").iter("tr"):
        assert " ".join(text_of(cell) for cell in row) in printed
    verdicts = page.findall(".//p[@class='verdict good']")
    assert len(verdicts) == 2
    assert all(text_of(verdict) in told[0].splitlines() for verdict in verdicts)


def test_report_has_the_curves(page: ElementTree.Element) -> None:
    for name in ("losses", "speed"):
        for kind in ("below", "above", "low"):
            found = curves(page, name, f"line {kind}")
            # For a wide and for a narrow page; the differences have one in low precision too.
            pages = 4 if kind == "low" and name == "losses" else 2
            assert [len(curve) for curve in found] == [12] * pages
    differences = curves(page, "losses", "line only")
    assert [len(curve) for curve in differences] == [12, 12]
    losses = curves(page, "losses", "line below")[0]
    assert losses[-1][1] > losses[0][1] + 50  # down the page is down
    assert losses == curves(page, "losses", "line above")[0]
    for svg in page.iter("svg"):
        _, _, width, height = map(float, svg.get("viewBox", "").split())
        for node in svg.iter("text"):
            assert 0 <= float(node.get("x", "nan")) <= width
            assert 10 <= float(node.get("y", "nan")) <= height


def test_report_has_the_plan(told: tuple[str, str], page: ElementTree.Element) -> None:
    low = part(page, "low")
    (text,) = low.iter("pre")
    assert "recipe Float8CurrentScaling" in text_of(text)
    assert "float32, float32, fp8 e4m3, fp8 e4m3, float32" in text_of(low)
    assert "float32, float32, fp8 e4m3, fp8 e4m3, float32" in told[0]
    plan = part(page, "plan")
    (text,) = plan.iter("pre")
    assert text_of(text).rstrip() in told[0]
    picture = text_of(next(plan.iter(f"{SVG}svg")))
    considered = text_of(part(page, "considered"))
    for fusion in ("ForwardLinearBiasAdd", "BackwardActivationBias", "BackwardAddLayerNorm"):
        assert fusion in picture
        assert f"{fusion} (" in considered
    assert "DenseMLP with residual (joint forward-backward)" in considered
    assert "recompute is not 'cheap'" in considered
    fired = re.search(r"fusions that fired: (.*)", told[0])
    assert fired is not None
    assert f"Fusions that fired: {fired[1]}." in text_of(plan)


def test_report_has_the_samples(page: ElementTree.Element) -> None:
    samples = [text_of(node) for node in part(page, "samples").iter("pre")]
    assert len(samples) == 3
    assert all(sample.startswith("The printer ") and len(sample) > 300 for sample in samples)
    assert samples[0][:80] == samples[1][:80]


def test_report_needs_nothing_else(told: tuple[str, str], page: ElementTree.Element) -> None:
    for node in page.iter():
        assert node.tag.removeprefix(SVG) not in ("script", "link", "img", "iframe", "image")
        for name, value in node.attrib.items():
            assert not name.endswith(("src", "href", "data"))
            assert "url(" not in value or "url(#" in value
    for sheet in [*page.iter("style"), *page.iter(f"{SVG}style")]:
        assert not re.search(r"@import|url\(|https?:", text_of(sheet))
    assert "prefers-color-scheme: dark" in told[1]
    assert "http" not in told[1].replace("http://www.w3.org/2000/svg", "")


# -- other runs


def test_disagreement_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    wrong = (
        "pair = demo.make_pair; demo.make_pair = lambda *a: (m := pair(*a), "
        "m[1].blocks[0].mlp[2].weight.data.mul_(1.5))[0]"
    )
    done = run("--steps", "3", "--quiet", "--report", str(path), before=wrong)
    assert done.returncode == 1, done.stderr
    first, low, last = done.stdout.splitlines()
    assert first.startswith("The losses of the two runs disagree. They differ by at most ")
    assert low.startswith("In FP8 (current) the loss of the last 3 steps is ")
    assert last == f"Report: {path}"
    assert f'<p class="verdict bad">{first}</p>' in path.read_text(encoding="utf-8")


def test_a_low_precision_run_that_goes_astray_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    wrong = (
        "step = demo.Trainer.step; demo.Trainer.step = lambda self, tokens: (step(self, tokens), "
        "self.run.losses.append(self.run.losses.pop() + 0.2 * (self.run.name == 'FP8'))); "
        "demo.continued = lambda *_: ''"
    )
    done = run("--steps", "3", "--quiet", "--report", str(path), before=wrong)
    assert done.returncode == 1, done.stderr
    first, low, _ = done.stdout.splitlines()
    assert first.startswith("The losses of the two runs agree.")
    assert re.search(r"is \+0\.\d+ from that without \(allowed 0\.1\)", low)
    text = path.read_text(encoding="utf-8")
    assert f'<p class="verdict good">{first}</p>' in text
    assert f'<p class="verdict bad">{low}</p>' in text


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8", "nvfp4"])
def test_every_recipe(recipe: str) -> None:
    arguments = ["--steps", "3", "--quiet", "--no-report", "--recipe", recipe]
    done = run(*arguments, before="demo.continued = lambda *_: ''")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^In \S.* \({recipe}\) the loss of the last 3 steps is ", done.stdout, re.M)


def test_recompute_in_bfloat16() -> None:
    done = run(
        *("--steps", "4", "--dtype", "bfloat16", "--recompute", "cheap", "--no-report"),
        *("--recipe", "none"),
    )
    assert done.returncode == 0, done.stderr
    assert "fusions that fired: DenseMLP\n" in done.stdout
    assert "bfloat16 under torch.autocast" in done.stdout
    assert "Report:" not in done.stdout
    assert "FP8" not in done.stdout
    saved = re.search(r"saved by one MLP +(\S+) (\S+) +(\S+) (\S+) +(\S+)", done.stdout)
    assert saved is not None
    assert float(saved[5]) < 0.6


@pytest.mark.parametrize(
    ("early", "late", "agree"),
    [
        (0.01, 0.2, True),
        (0.02, 0.2, False),
        (0.01, 0.4, False),
        (math.nan, 0.0, False),
        (0.0, math.inf, False),
    ],
)
def test_early_losses_must_be_closer(
    report: ModuleType, early: float, late: float, agree: bool
) -> None:
    losses = [1.0] * 49 + [1.0 + early, 1.0 + late] + [1.0] * 9
    runs = report.Run("PyTorch", [1.0] * 60), report.Run("Ligature", losses)
    result = report.Result(runs, (0.015, 0.3), [], None, "", {})
    assert result.agree is agree
    assert ("disagree" in result.verdict) is not agree
    if agree:
        assert "1.0e-02 in the first 50 steps (allowed 0.015) and 2.0e-01 later" in result.verdict


def test_saved_bytes_are_those_of_the_plan(demo: ModuleType) -> None:
    mlp = sys.modules["transformer"].ligature_mlp(32, "none")
    x = torch.randn(5, 32, device=next(mlp.parameters()).device, requires_grad=True)
    measured = demo.saved_bytes(lambda: mlp(x), [x, *mlp.parameters()])
    assert measured == mlp.explain().saved_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: wanted a whole number from 1 to 1000000, got '0'"),
        (
            ["--steps", "many"],
            "argument --steps: wanted a whole number from 1 to 1000000, got 'many'",
        ),
        (["--device", "tpu"], "argument --device: wanted cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "meta"], "argument --device: wanted cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "CUDA devices here, got 'cuda:99'"),
        (["--dtype", "float64"], "argument --dtype: invalid choice: 'float64'"),
        (["--device", "cpu", "--dtype", "float16"], "argument --dtype: float16 is for GPUs"),
        (["--recompute", "all"], "argument --recompute: invalid choice: 'all'"),
        (
            ["--recipe", "MXFP8BlockScaling"],
            "argument --recipe: invalid choice: 'MXFP8BlockScaling' (choose from",
        ),
        (["--seed", "x"], "argument --seed: wanted a whole number from 0 to 4294967295, got 'x'"),
        (["--seed", "-1"], "argument --seed: wanted a whole number from 0 to 4294967295, got '-1'"),
        (["--report", "/dev/null/report.html"], "argument --report: cannot write"),
        (["--report", str(EXAMPLES)], "argument --report: cannot write"),
    ],
)
def test_wrong_options(
    demo: ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# -- charts and progress


def test_points_stand_for_equally_many_steps(charts: ModuleType) -> None:
    points = charts.in_bins([float(i) for i in range(1, 601)], max)
    assert points[:2] == [(2.5, 4.0), (6.5, 8.0)]
    assert len(points) == 150
    assert charts.in_bins([3.0, 4.0], max) == [(1.0, 3.0), (2.0, 4.0)]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0.0, 60.0, [0, 20, 40, 60]), (1.9, 4.4, [1.5, 2, 2.5, 3, 3.5, 4, 4.5]), (2, 2, [2, 2.5])],
)
def test_ticks(charts: ModuleType, low: float, high: float, wanted: list[float]) -> None:
    assert charts.ticks(low, high, 5) == pytest.approx(wanted)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[0.0], [1.0], [0.0, 1e-6, math.nan, 3.0], [math.nan] * 2])
def test_a_chart_of_anything(charts: ModuleType, log: bool, values: list[float]) -> None:
    points = [(float(i + 1), value) for i, value in enumerate(values)]
    line = charts.Line("a < b", "only", points)
    for svg in charts.draw([line], (380, 260), "m & s", log, False), charts.chart([line], "<&>"):
        ElementTree.fromstring(svg)
        assert "nan" not in svg
        assert "inf" not in svg


def test_everything_is_escaped(report: ModuleType) -> None:
    evil = "</pre><script>x</script>&"
    entry = {"fusion": evil, "pass": evil, "ops": [evil], "taken": False, "reason": evil}

    class Explanation(SimpleNamespace):
        def __str__(self) -> str:
            return evil

    explanation: Any = Explanation(
        fusions=[evil], svg=lambda: "<svg/>", to_dict=lambda: {"parts": [{"considered": [entry]}]}
    )
    *runs, third = (report.Run(evil, [1.0], [0.1], evil) for _ in range(3))
    low = report.LowPrecision(third, evil, 0.1, evil, explanation)
    figures = [(evil,) * 6]
    result = report.Result(tuple(runs), (0.1, 0.1), figures, explanation, evil, {evil: evil}, low)
    text = report.html_report(result)
    assert "<script" not in text
    assert text_of(ElementTree.fromstring(text)).count(evil) > 20


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_stays_on_one_line(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, encoding in ((80, "utf-8"), (30, "utf-8"), (200, "ascii")):
        terminal = Terminal()
        terminal.encoding = encoding
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        progress = demo.Progress(40, quiet=False)
        for step in (10, 20, 40):
            progress.show(step, [2.5, 2.5], [14.0, 13.0])
        progress.close()
        monkeypatch.undo()
        *shown, end = terminal.getvalue().split("\x1b[K")
        assert end == "\n"
        assert len(shown) == 3
        assert all(line[0] == "\r" and 1 < len(line) <= columns for line in shown)
        assert " 20/40  0:00 left" in shown[1]
        if columns == 200:
            assert shown[1] == (
                "\r" + 15 * "#" + 15 * "." + " 20/40  0:00 left"
                "  loss 2.5000 | 2.5000  ms/step 14.0 | 13.0"
            )

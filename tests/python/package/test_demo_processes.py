"""The demo over two processes: it agrees with one, the report shows who waited, and all end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from repository import EXAMPLES

#: tools/run_tests.py reads it: each part of this file would run the demo again.
IN_ONE_PROCESS = True
RANKS, STEPS = 2, 12
PATH = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); "


@pytest.fixture(autouse=True)
def device() -> str:
    """The demo chooses its device by itself."""
    return "cpu"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its launcher; the other modules can be imported too."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__("processes")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PATH + code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def launching(code: str, seconds: float) -> str:
    """Code that runs other code on two ranks."""
    command = f"[sys.executable, '-c', {PATH + code!r}]"
    return f"import processes; sys.exit(processes.start({RANKS}, {command}, {seconds}))"


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


# -- one short run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ElementTree.Element]:
    """What a short run printed, and its report."""
    path = tmp_path_factory.mktemp("demo") / "report.html"
    arguments = ["--processes", str(RANKS), "--steps", str(STEPS), "--report", str(path)]
    done = python("import demo; sys.exit(demo.main())", *arguments)
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    return done.stdout, ElementTree.fromstring(path.read_text(encoding="utf-8"))


def test_it_agrees_with_one_process(told: tuple[str, ElementTree.Element]) -> None:
    output = told[0]
    found = re.search(r"Values of one batch are (\S+) from .* gradients (\S+) \(allowed", output)
    assert found is not None
    assert 0 < float(found[1]) < 1e-5
    assert 0 < float(found[2]) < 1e-5
    assert "What every rank has ends with the same bits on each." in output
    assert "The losses of the two runs agree." in output
    assert "In FP8 (current) the loss of the last 12 steps is " in output
    rows = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d\.\d{4}) +\S+ +(\d\.\d{4})$", output, re.M)
    assert int(rows[-1][0]) == STEPS
    assert float(rows[-1][2]) < float(rows[0][2]) - 0.5
    assert re.search(r"saved by one MLP +\S+ \S+ +\S+ \S+ +0\.5\d ", output)
    assert "all_gather [gloo]" in output
    sent = re.search(r"the MLPs send (0\.\d\d) of the bytes", output)
    assert sent is not None
    assert 0.3 < float(sent[1]) < 0.8


def test_the_report_shows_each_rank(told: tuple[str, ElementTree.Element]) -> None:
    section = told[1].find(".//section[@id='ranks']")
    assert section is not None
    figures = list(section.iter("figure"))
    assert len(figures) == 2  # in high and in low precision
    for figure in figures:
        for svg in figure.iter("svg"):
            bars = [(rect.get("class"), rect) for rect in svg.iter("rect")]
            tips = [text_of(title) for title in svg.iter("title")]
            for rank in range(RANKS):
                assert f"rank {rank} computes, but where it waits" in tips
                for what in ("all_gather of Linear", "reduce_scatter of BasicLinear"):
                    assert any(tip.startswith(f"rank {rank}: {what}, ") for tip in tips)
                assert any(re.match(rf"rank {rank} waits \d+\.\d\d ms in", tip) for tip in tips)
            assert {kind for kind, _ in bars} == {"computes", "waits", "travels"}
            _, _, width, height = map(float, svg.get("viewBox", "").split())
            for _, rect in bars:
                right = float(rect.get("x", "")) + float(rect.get("width", ""))
                assert 0 <= float(rect.get("x", "")) <= right <= width
                low = float(rect.get("y", "")) + float(rect.get("height", ""))
                assert 0 <= float(rect.get("y", "")) <= low <= height
    printed = re.findall(r"^  rank (\d)((?: +\d+\.\d\d ms){4}) +\d+%$", told[0], re.M)
    assert [rank for rank, _ in printed] == ["0", "1"] * 2
    assert all(float(times.split()[0]) > 0 for _, times in printed)
    heading = told[1].find(".//h1")
    assert heading is not None
    assert text_of(heading) == "One model, trained three times"
    assert "in one process and over 2, and again in FP8" in text_of(told[1])


def test_disagreement_is_an_error() -> None:
    wrong = (
        "import os, torch, demo_rank as d; make = d.spread_model; "
        "d.spread_model = lambda *a: (m := make(*a), "
        "torch.distributed.get_rank() and m.blocks[0].mlp[2].weight.data.mul_(1.5))[0]; "
        "code = d.main(['--processes', '2', '--steps', '3', '--no-report', '--recipe', 'none']); "
        "sys.stdout.flush(); os._exit(code)"
    )
    done = python(launching(wrong, 200))
    assert done.returncode == 1, done.stderr
    assert re.search(r"Values of one batch are \d\.\de-0[12] from", done.stdout)
    assert "The losses of the two runs disagree." in done.stdout


# -- processes


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().split(")")[1][:3]
    except FileNotFoundError:
        return False


def wait_for_end(ids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(map(alive, ids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, ids))


NOTE = "import os, time; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); "


def noted(folder: Path) -> list[int]:
    return [int((folder / str(rank)).read_text()) for rank in range(RANKS)]


def started(
    examples: ModuleType, folder: Path, code: str, seconds: float = 60
) -> tuple[int, float]:
    """The exit status, and how long it took."""
    begin = time.monotonic()
    command = [sys.executable, "-c", PATH + NOTE + code, f"{folder}/"]
    return examples.start(RANKS, command, seconds), time.monotonic() - begin


def test_all_end_when_one_fails(examples: ModuleType, tmp_path: Path) -> None:
    code = "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    status, seconds = started(examples, tmp_path, code)
    assert status == 3
    assert seconds < 30
    wait_for_end(noted(tmp_path))


def test_all_end_when_the_time_is_over(
    examples: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, seconds = started(examples, tmp_path, "time.sleep(60)", seconds=4)
    assert status == 1
    assert seconds < 30
    assert "The 2 processes did not end within 4 s." in capsys.readouterr().err
    wait_for_end(noted(tmp_path))


def test_all_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    code = NOTE.replace("sys.argv[1]", repr(f"{tmp_path}/")) + (
        "import processes; processes.join(); import torch; x = torch.ones(1); "
        "torch.distributed.all_reduce(x); open("
        f"{str(tmp_path)!r} + '/ready' + os.environ['RANK'], 'w').close(); time.sleep(120)"
    )
    parent = subprocess.Popen([sys.executable, "-c", PATH + launching(code, 100)])
    try:
        end = time.monotonic() + 90
        while len(list(tmp_path.glob("ready*"))) < RANKS and time.monotonic() < end:
            time.sleep(0.1)
        ids = noted(tmp_path)
        assert all(map(alive, ids))
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_for_end(ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "3"], "argument --processes: invalid choice: 3"),
        (["--processes", "2", "--model", "moe"], "argument --processes: takes --model dense"),
    ],
)
def test_wrong_options(
    examples: ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        __import__("demo").options(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


# -- the timeline


def test_who_waited_for_whom(examples: ModuleType) -> None:
    timeline = __import__("timeline")

    def entry(begin: float, wait: float, end: float) -> object:
        noted = {"name": "all_gather", "op": "Linear", "bytes": 8, "begin": begin, "end": end}
        return timeline.Entry.of({**noted, "wait_begin": wait, "wait_end": end}, began=100.0)

    # Rank 1 comes to the first collective at 3, rank 0 to the second at 8.
    first = [entry(1, 2, 4), entry(8, 8.5, 9)], [timeline.Step(100, 105, 109, 110)]
    second = [entry(3, 3, 4), entry(6, 6, 9)], [timeline.Step(100.5, 105, 109, 110)]
    ranks = timeline.courses([first, second])
    waits = [[(w.whom, w.until - w.begin) for w in course.waits] for course in ranks]
    assert waits == [[(1, 1), (0, 0)], [(1, 0), (0, 2)]]
    assert ranks[0].waited == pytest.approx(2.5)
    assert ranks[1].waited_for_others == pytest.approx(2)
    assert [row[1] for row in timeline.table(ranks)] == ["7500.00 ms", "5500.00 ms"]
    svg = ElementTree.fromstring(timeline.draw(ranks, 760))
    assert len([p for p in svg.iter("path") if p.get("class") == "because"]) == 2
    assert [course.in_flight for course in ranks] == pytest.approx([4, 4])

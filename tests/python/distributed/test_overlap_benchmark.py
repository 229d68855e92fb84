"""benchmarks/overlap.py: its model, a run on loopback, and that nothing is left of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

IN_ONE_PROCESS = True
BENCHMARKS = ROOT / "benchmarks"
SMALL = (
    *("--tokens", "64", "--hidden", "32", "--inner", "32", "--rounds", "2"),
    *("--step-tokens", "64", "--step-hidden", "32", "--most-inner", "64", "--shares", "0.5"),
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overlap_model

    return overlap_model


def start(*args: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "overlap.py"), *SMALL, *args]
    path = os.pathsep.join(p for p in sys.path if p)
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


# Of two ranks, in ms: the collective alone, the GEMM alone, and with 1, 2, 4 and 8 pieces.
@pytest.mark.parametrize(
    ("transfer", "gemm", "wanted"),
    [
        (110, 97, (158, 134, 122, 116)),
        (111, 98, (160, 136, 123, 117)),
        (111, 74, (148, 130, 120, 116)),
        (219, 96, (267, 243, 231, 225)),
        (54, 89, (99, 89, 89, 89)),
    ],
)
def test_a_gather_beside_a_gemm(
    model: Any, transfer: float, gemm: float, wanted: tuple[float, ...]
) -> None:
    times = [model.gather_gemm(transfer, gemm, 2, pieces) for pieces in (1, 2, 4, 8)]
    assert times == pytest.approx(wanted, abs=0.75)


def test_pieces_cost(model: Any) -> None:
    assert model.gather_gemm(110, 96, 2, 4, cost=2) == 110 + 12 + 6
    assert model.gather_gemm(110, 96, 4, 1) == 110 + 72
    free = [model.best_pieces(lambda p: model.gather_gemm(110, 96, 2, p), r) for r in (512, 300, 8)]
    assert free == [8, 4, 1]  # 64 rows or more in each
    assert model.best_pieces(lambda p: model.gather_gemm(110, 96, 2, p, 5), 512) == 4
    assert model.best_pieces(lambda p: model.gather_gemm(110, 96, 2, p, 99), 512) == 1


def test_a_gemm_beside_a_scatter(model: Any) -> None:
    assert model.gemm_scatter(100, 80) == 180
    assert model.gemm_scatter(100, 80, 4) == 100 + 20
    assert model.gemm_scatter(80, 100, 4, cost=1) == 100 + 20 + 3


def test_a_step(model: Any) -> None:
    assert model.backward(90, 180, 110) == 270
    assert model.backward(90, 90, 110) == 200
    # Six GEMMs of 100, three gathers of 50, two scatters of 100; each rank has too few rows to cut.
    assert model.mlp_step(50, 100, 600, 2, 64) == (50 + 50) + 200 + (50 + 50) + 100 + 200
    assert model.mlp_step(50, 100, 600, 2, 64, cut=False) == 150 + 200 + 250 + 100 + 100
    cut = model.mlp_step(50, 100, 600, 2, 512)
    assert cut == pytest.approx(100 + 112.5 + 100 + 100 + 200)
    assert cut < model.mlp_step(50, 100, 600, 2, 512, cost=1) < 800
    # Bound by the link: 8 pieces of a gather that is faster in pieces.
    step = model.mlp_step(200, 100, 60, 2, 512, gather_in_pieces=150)
    assert step == pytest.approx(2 * (150 + 10 / 16) + (100 + 10 / 8) + 200 + 100)


def test_a_run_on_loopback(tmp_path: Path) -> None:
    written = tmp_path / "overlap.json"
    run = start("--pieces", "2", "--json", str(written), PATH=str(tmp_path))  # without `ip`
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "no shaped link: there is no `ip` (Debian: iproute2); on loopback instead\n" in out
    result = json.loads(written.read_text())
    assert result["link"] == "Loopback"
    cases = [(row["case"], row["pieces"]) for row in result["rows"]]
    assert cases == [(c, p) for c in ("gather_gemm", "gemm_scatter", "mlp") for p in (None, 2)]
    for row in result["rows"]:
        assert all(len(s) == 2 and min(s) > 0 for s in row["samples"].values())
        assert row["predicted"] > 0
        assert row["ratio"] > 0
    for title in ("gather + GEMM", "GEMM + scatter", "MLP"):
        assert title in out


def children(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux' /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process(number: signal.Signals) -> None:
    run = start("--loopback", "--rounds", "100000")
    try:
        end = time.monotonic() + 60
        while len(ranks := children(run.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(3)  # while they import
    finally:
        run.send_signal(number)
        run.communicate(timeout=60)
    assert len(ranks) == 2
    while any(map(alive, ranks)) and time.monotonic() < end + 60:
        time.sleep(0.05)
    assert not any(map(alive, ranks))

"""What each rank of overlap.py runs: a case's lanes, each timed alone after a barrier.

A lane makes fresh inputs and gives what is timed. Plans with and without overlap have groups of
their own, so that neither's setting changes between samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from linked_ranks import SIZE, serve
from torch import Tensor, distributed

import ligature as te

Run = Callable[[], object]
Lane = Callable[[], Run]
PIECES = 4  # of the lanes that measure what a piece costs

# Before torch 2.13 they had other names.
_all_gather: Any = getattr(distributed, "all_gather_single", None)
_all_gather = _all_gather or distributed.all_gather_into_tensor
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None)
_reduce_scatter = _reduce_scatter or distributed.reduce_scatter_tensor

_groups: dict[tuple[bool, int | None], Any] = {}
_lanes: dict[str, Lane] = {}


def group(overlap: bool, pieces: int | None = None) -> Any:
    if (overlap, pieces) not in _groups:
        made = distributed.new_group(list(range(SIZE)))
        te.distributed.configure(made, overlap=overlap, pieces=pieces)
        _groups[overlap, pieces] = made
    return _groups[overlap, pieces]


def parallel(mode: str, overlap: bool, pieces: int | None = None) -> dict[str, Any]:
    return {
        "bias": False,
        "tensor_parallel_mode": mode,
        "tensor_parallel_group": group(overlap, pieces),
        "sequence_parallel": True,
    }


def gather_lane(rows: int, columns: int, pieces: int = 1) -> Lane:
    """``rows`` of each rank."""

    def lane() -> Run:
        x = torch.randn(rows, columns)
        parts = [(part, part.new_empty(SIZE * len(part), columns)) for part in x.chunk(pieces)]
        return lambda: _wait([_all_gather(y, part, async_op=True) for part, y in parts])

    return lane


def scatter_lane(rows: int, columns: int, pieces: int = 1) -> Lane:
    """``rows`` that each rank gets."""

    def lane() -> Run:
        x = torch.randn(SIZE * rows, columns)
        parts = [(part, part.new_empty(len(part) // SIZE, columns)) for part in x.chunk(pieces)]
        return lambda: _wait([_reduce_scatter(y, part, async_op=True) for part, y in parts])

    return lane


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def forward_lane(model: Any, rows: int, columns: int, parts: tuple[int, ...] = ()) -> Lane:
    """``parts``: the rows of each GEMM, where they are computed one by one."""

    @torch.no_grad()
    def run(xs: tuple[Tensor, ...]) -> None:
        for x in xs:
            model(x)

    def lane() -> Run:
        x = torch.randn(rows, columns)
        xs = x.split(parts) if parts else (x,)
        return lambda: run(xs)

    return lane


def step_lane(*models: tuple[Any, int, int]) -> Lane:
    """Forward and backward of each (model, rows, columns)."""

    def step(model: Any, x: Tensor, dy: Tensor) -> None:
        model(x).backward(dy)

    def lane() -> Run:
        data = []
        for model, rows, columns in models:
            model.zero_grad(set_to_none=True)
            x = torch.randn(rows, columns, requires_grad=True)
            data.append((model, x, torch.randn(rows, columns)))
        return lambda: [step(*each) for each in data]

    return lane


def gather_gemm(tokens: int, hidden: int, inner: int, pieces: list[int | None]) -> dict[str, Lane]:
    """Column + sequence-parallel, forward: tokens x hidden is gathered; inner columns per rank."""
    rows = tokens // SIZE
    parts = (rows, *(len(p) for p in torch.empty((SIZE - 1) * rows).chunk(PIECES)))
    local = te.ops.BasicLinear(hidden, inner)

    def linear(overlap: bool, pieces: int | None = None) -> Lane:
        options = parallel("column", overlap, pieces)
        del options["bias"]
        return forward_lane(te.ops.BasicLinear(hidden, SIZE * inner, **options), rows, hidden)

    return {
        "communication": gather_lane(rows, hidden),
        "communication in pieces": gather_lane(rows, hidden, PIECES),
        "computation": forward_lane(local, tokens, hidden),
        "computation in pieces": forward_lane(local, tokens, hidden, parts),
        "sequential": linear(False),
        **{f"overlap {p}": linear(True, p) for p in pieces},
    }


def gemm_scatter(tokens: int, hidden: int, inner: int, pieces: list[int | None]) -> dict[str, Lane]:
    """Row + sequence-parallel, forward: tokens x hidden is scattered; inner columns per rank."""
    rows = tokens // SIZE
    parts = tuple(len(p) for p in torch.empty(tokens).chunk(PIECES))
    local = te.ops.BasicLinear(inner, hidden)

    def linear(overlap: bool, pieces: int | None = None) -> Lane:
        model = te.ops.Linear(SIZE * inner, hidden, **parallel("row", overlap, pieces))
        return forward_lane(model, tokens, inner)

    return {
        "communication": scatter_lane(rows, hidden),
        "communication in pieces": scatter_lane(rows, hidden, PIECES),
        "computation": forward_lane(local, tokens, inner),
        "computation in pieces": forward_lane(local, tokens, inner, parts),
        "sequential": linear(False),
        **{f"overlap {p}": linear(True, p) for p in pieces},
    }


def mlp(tokens: int, hidden: int, inner: int, pieces: list[int | None]) -> dict[str, Lane]:
    """Norm, column, GELU, row; forward and backward. ``inner`` columns per rank."""
    rows = tokens // SIZE

    def spread(overlap: bool, pieces: int | None = None) -> Lane:
        model = te.ops.Sequential(
            te.ops.LayerNorm(hidden),
            te.ops.Linear(hidden, SIZE * inner, **parallel("column", overlap, pieces)),
            te.ops.GELU(),
            te.ops.Linear(SIZE * inner, hidden, **parallel("row", overlap, pieces)),
        )
        return step_lane((model, rows, hidden))

    norm = te.ops.Sequential(te.ops.LayerNorm(hidden))
    local = te.ops.Sequential(
        te.ops.Linear(hidden, inner, bias=False),
        te.ops.GELU(),
        te.ops.Linear(inner, hidden, bias=False),
    )
    return {
        "gather": gather_lane(rows, hidden),
        "gather in pieces": gather_lane(rows, hidden, PIECES),
        "scatter": scatter_lane(rows, hidden),
        "computation": step_lane((norm, rows, hidden), (local, tokens, hidden)),
        "sequential": spread(False),
        **{f"overlap {p}": spread(True, p) for p in pieces},
    }


def prepare(case: str, *args: Any) -> list[str]:
    """The names of the case's lanes, which replace those of the last one."""
    torch.manual_seed(distributed.get_rank())
    _lanes.clear()
    _lanes.update(
        {"gather_gemm": gather_gemm, "gemm_scatter": gemm_scatter, "mlp": mlp}[case](*args)
    )
    return list(_lanes)


def sample(lane: str) -> tuple[float, float]:
    """Seconds, and those of them in which Ligature awaited a collective."""
    run = _lanes[lane]()
    te.distributed.record_timeline(True)
    distributed.barrier()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    waited = sum(t["wait_end"] - t["wait_begin"] for t in te.distributed.timeline())
    te.distributed.record_timeline(False)
    return seconds, waited


if __name__ == "__main__":
    serve({"ready": lambda: None, "prepare": prepare, "sample": sample})

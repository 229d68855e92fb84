"""Bandwidth of the casts to and from low precision on a GPU, beside a copy of the same bytes.

    python benchmarks/cuda_casts.py [--rows 16384] [--columns 4096] [--wide 28672]

A row's bytes are what its kernels cannot avoid: every input read and every output written once.
(With one factor from the tensor itself the values are read twice, which is counted.) The copy moves
as many bytes in all, half of them read and half written, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import kernel_events

import ligature as te
from ligature import _C

BF16 = torch.bfloat16
FORMATS = {
    "e4m3 delayed": {"scaling": "delayed", "element": "e4m3"},
    "e5m2 delayed": {"scaling": "delayed", "element": "e5m2"},
    "e4m3 current": {"scaling": "current", "element": "e4m3"},
    "e4m3 1x128": {"scaling": "block", "element": "e4m3", "power_of_2_scales": True},
    "e4m3 128x128": {
        "scaling": "block",
        "element": "e4m3",
        "power_of_2_scales": True,
        "block_2d": True,
    },
    "mxfp8": {"scaling": "mx", "element": "e4m3"},
    "nvfp4": {"scaling": "nv", "element": "e2m1"},
}


@dataclass
class Case:
    name: str
    run: Callable[[], object]
    bytes: int


def quantizer(fields: dict[str, str | bool], rowwise: bool, columnwise: bool) -> _C.Quantizer:
    delayed: list[torch.Tensor | None] = [None, None]
    if fields["scaling"] == "delayed":
        delayed = [torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")]
    return _C.Quantizer(fields, rowwise, columnwise, *delayed)


def bytes_of(*values: object) -> int:
    tensors: list[torch.Tensor] = []
    for value in values:
        tensors += [value] if isinstance(value, torch.Tensor) else value.tensors
    return sum(t.numel() * t.element_size() for t in tensors)


def casts(rows: int, columns: int) -> list[Case]:
    x = torch.randn(rows, columns, dtype=BF16, device="cuda")
    cases = []
    for name, fields in FORMATS.items():
        twice = 2 if fields["scaling"] in ("current", "nv") else 1
        for what, row, column in (("rows", True, False), ("both", True, True)):
            q = quantizer(fields, row, column)
            made = q.quantize(x)
            cases.append(
                Case(
                    f"{name}, {what}",
                    lambda q=q: q.quantize(x),
                    twice * bytes_of(x) + bytes_of(made),
                )
            )
        made = quantizer(fields, True, False).quantize(x)
        cases.append(
            Case(
                f"{name}, dequantize",
                lambda made=made: made.dequantize(BF16),
                bytes_of(x) + bytes_of(made),
            )
        )
    return cases


def fused(rows: int, columns: int, wide: int) -> list[tuple[str, float, int]]:
    """(name, seconds, bytes) of the kernels that quantize their own result, as a profile of a
    block's step has them. Written are both orientations."""
    block = te.ops.Sequential(
        te.ops.LayerNorm(columns, dtype=BF16),
        te.ops.Linear(columns, wide, dtype=BF16),
        te.ops.SwiGLU(),
        te.ops.Linear(wide // 2, columns, dtype=BF16),
    )
    x = torch.randn(rows, columns, dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn(rows, columns, dtype=BF16, device="cuda")
    narrow, half, full = rows * columns, rows * wide // 2, rows * wide
    sources = {
        "NormTiles": ("layer norm", 2 * narrow + 2 * narrow),
        "ForwardTiles": ("SwiGLU", 2 * full + 2 * half),
        "BackwardTiles": ("SwiGLU backward, bias", 2 * half + 2 * full + 2 * full),
    }
    recipes = {
        "e4m3 delayed": te.recipe.DelayedScaling(),
        "e4m3 1x128": te.recipe.Float8BlockScaling(),
        "mxfp8": te.recipe.MXFP8BlockScaling(),
    }
    found = []
    for name, recipe in recipes.items():

        def step(recipe: te.recipe.Recipe = recipe) -> None:
            with te.autocast(recipe=recipe):
                y = block(x)
            y.backward(dy)

        events = kernel_events(step, 5)
        for kernel, (what, count) in sources.items():
            times = [us / 1e6 for event, _, us in events if kernel in event and us > 0]
            if times:
                found.append((f"{what}, {name}", statistics.median(times), count))
    return found


def timed_cases(cases: list[Case], repeats: int) -> list[tuple[Case, float, float]]:
    """(case, seconds, seconds of a copy of as many bytes), medians; taken in turns."""

    def timed(run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # until the host has queued what follows
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    results = []
    for case in cases:
        source = torch.empty(case.bytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> object:
            return target.copy_(source)

        times: list[list[float]] = [[], []]
        for i in range(repeats + 3):
            for run, kept in zip((case.run, copy), times, strict=True):
                # Whatever is in the cache from the run before is pushed out.
                flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
                flush.zero_()
                seconds = timed(run)
                if i >= 3:
                    kept.append(seconds)
        results.append((case, statistics.median(times[0]), statistics.median(times[1])))
    return results


def measure(rows: int, columns: int, wide: int, repeats: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    title = f"bfloat16 [{rows}, {columns}]"
    print(f"{title:<34} {'us':>9} {'TB/s':>7} {'copy us':>8} {'of copy':>8}")

    def show(name: str, count: int, seconds: float, copy: float) -> None:
        row = {
            "cast": name,
            "us": seconds * 1e6,
            "tb_s": count / seconds / 1e12,
            "copy_us": copy * 1e6,
            "of_copy": copy / seconds,
        }
        found.append(row)
        rates = f"{row['us']:9.1f} {row['tb_s']:7.2f} {row['copy_us']:8.1f} {row['of_copy']:8.0%}"
        print(f"{name:<34} {rates}")

    cases = casts(rows, columns)
    for case, seconds, copy in timed_cases(cases, repeats):
        show(case.name, case.bytes, seconds, copy)
    del cases
    for name, seconds, count in fused(rows, columns, wide):
        ((_, _, copy),) = timed_cases([Case(name, lambda: None, count)], repeats)
        show(name, count, seconds, copy)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--wide", type=int, default=28672)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    print(torch.cuda.get_device_name())
    measure(options.rows, options.columns, options.wide, options.repeats)


if __name__ == "__main__":
    main()

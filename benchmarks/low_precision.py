"""Times low precision on the CPU: casts against a copy, and the block in each recipe against BF16.

A cast is compared with a copy that moves as many bytes, read and written: 1.00 is as fast as the
copy. Casts give new memory, so the copy that counts does too (a clone); one into memory that is
there already stands beside it. The block's steps come twice: with weights that have changed, as
after an optimizer's step, and with weights that were quantized before, as in the later microbatches
of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from block import RECIPES, Step, ligature_block
from timing import interleaved

import ligature as te

BF16 = torch.bfloat16
SIDE = 4096
SHAPES = [(64, 256, 512), (512, 512, 2816)]
E4M3, E2M1 = te.DType.kFloat8E4M3, te.DType.kFloat4E2M1
Row = dict[str, Any]


def quantizers() -> dict[str, te.Quantizer]:
    return {
        "fp8 delayed": te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),
        "fp8 current": te.Float8CurrentScalingQuantizer(E4M3),
        "fp8 1x128": te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
        "fp8 128x128": te.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
        "mxfp8": te.MXFP8Quantizer(E4M3),
        "nvfp4": te.NVFP4Quantizer(E2M1),
        "nvfp4 16x16": te.NVFP4Quantizer(E2M1, with_2d_quantization=True),
        "nvfp4 stochastic": te.NVFP4Quantizer(E2M1, stochastic_rounding=True),
        "nvfp4 hadamard": te.NVFP4Quantizer(E2M1, with_rht=True),
    }


def time_cast(cast: Callable[[], object], moved: int, seconds: float) -> Row:
    source = torch.zeros(moved // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    runs = [cast, source.clone, lambda: target.copy_(source)]
    cast_s, clone_s, copy_s = interleaved(runs, "cpu", seconds)
    return {
        "us": 1e6 * cast_s,
        "clone_us": 1e6 * clone_s,
        "copy_us": 1e6 * copy_s,
        "of_clone": clone_s / cast_s,
        "of_copy": copy_s / cast_s,
    }


def casts(side: int, seconds: float, tell: Callable[[str], None]) -> list[Row]:
    x = torch.randn(side, side).bfloat16()
    rows: list[Row] = []
    tell(f"\n{side}x{side} bfloat16, as a fraction of a copy of the same bytes (goal 0.60)")
    tell(f"{'format':<20}{'cast':<22}{'µs':>10}{'clone µs':>10}{'clone':>8}{'copy_':>8}")
    for name, quantizer in quantizers().items():
        for what in ("quantize", "quantize+transpose", "dequantize"):
            both = what == "quantize+transpose"
            quantizer.set_usage(rowwise=True, columnwise=both)
            q = quantizer(x)
            moved = x.nbytes + q.nbytes
            if what == "dequantize":
                row = time_cast(lambda q=q: q.dequantize(torch.bfloat16), moved, seconds)
            else:
                row = time_cast(lambda quantizer=quantizer: quantizer(x), moved, seconds)
            rows.append({"format": name, "cast": what, **row})
            tell(
                f"{name:<20}{what:<22}{row['us']:>10.0f}{row['clone_us']:>10.0f}"
                f"{row['of_clone']:>8.2f}{row['of_copy']:>8.2f}"
            )
    return rows


def blocks(seconds: float, tell: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    tell("\nforward+backward of the block in bfloat16, as a ratio to no recipe (goal 1.50)")
    tell(f"{'block':<20}{'recipe':<22}{'BF16 µs':>10}{'µs':>10}{'ratio':>8}{'cached':>8}")
    for t, h, f in SHAPES:
        made = {type(recipe).__name__: recipe for recipe in (make() for make in RECIPES.values())}
        x = torch.randn(t, h, dtype=BF16, requires_grad=True)
        dy = torch.randn(t, h, dtype=BF16)
        ways = [(None, True), (None, False)]
        ways += [(recipe, new) for recipe in made.values() for new in (True, False)]
        runs = [
            Step(ligature_block("LayerNorm", h, f, True, BF16), x, dy, recipe, new)
            for recipe, new in ways
        ]
        (plain, plain_cached), *pairs = zip(
            *[iter(interleaved(runs, "cpu", seconds))] * 2, strict=True
        )
        for name, (new, cached) in zip(made, pairs, strict=True):
            row = {
                "block": f"T{t} h{h} f{f}",
                "recipe": name,
                "bf16_us": 1e6 * plain,
                "us": 1e6 * new,
                "cached_us": 1e6 * cached,
                "ratio": new / plain,
                "ratio_cached": cached / plain_cached,
            }
            rows.append(row)
            tell(
                f"{row['block']:<20}{name:<22}{row['bf16_us']:>10.0f}{row['us']:>10.0f}"
                f"{row['ratio']:>8.2f}{row['ratio_cached']:>8.2f}"
            )
    return rows


def measure(seconds: float, tell: Callable[[str], None], side: int = SIDE) -> Row:
    """``seconds`` per cast, and four times as many per block."""
    return {"casts": casts(side, seconds, tell), "blocks": blocks(4 * seconds, tell)}

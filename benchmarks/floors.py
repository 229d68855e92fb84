"""The block's six matrix products alone, on operands that are ready: the floors of its time."""

from __future__ import annotations

from collections.abc import Callable

import torch

import ligature as te

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
Run = Callable[[], object]

# In the order of a step: forward, then input and weight gradient from the last linear to the first.
ORDER = ["fc1 y", "fc2 y", "fc2 dx", "fc2 dw", "fc1 dx", "fc1 dw"]
FLOORS = ["floor bf16", "floor fp8", "floor fp8 block"]
FLOOR_OF = {
    "fp8 delayed": "floor fp8",
    "fp8 current": "floor fp8",
    "fp8 block": "floor fp8 block",
}


def block_scale(rows: int, k: int, square: bool) -> torch.Tensor:
    if square:
        return torch.rand((rows + 127) // 128, (k + 127) // 128, device="cuda")
    return torch.rand((k + 127) // 128, rows, device="cuda").t()


def product(which: str, t: int, k: int, n: int, kind: str) -> Run:
    """y, dx or dw of Linear(k, n) through torch.mm or torch._scaled_mm."""
    m, inner, columns = {"y": (t, k, n), "dx": (t, n, k), "dw": (n, t, k)}[which]
    a = torch.randn(m, inner, device="cuda", dtype=BF16)
    b = torch.randn(columns, inner, device="cuda", dtype=BF16)
    if kind == "floor bf16":
        if which == "dx":
            b = b.t().contiguous().t()
        if which == "dw":
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        return lambda: torch.mm(a, b.t())
    gradient = E5M2 if kind == "floor fp8" and which != "y" else E4M3
    a8, b8 = a.to(gradient), b.to(E4M3)
    if kind == "floor fp8":
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(
            a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=which == "y"
        )
    sa = block_scale(m, inner, False)
    sb = block_scale(columns, inner, which != "dw")
    return lambda: torch._scaled_mm(a8, b8.t(), sa, sb.t(), out_dtype=BF16)


def floor(t: int, h: int, f: int, kind: str) -> Run | None:
    """All six, in the order of a step; None where this torch or this GPU cannot run them."""
    sizes = {"fc1": (h, f), "fc2": (f // 2, h)}
    runs: list[Run] = []
    for name in ORDER:
        layer, which = name.split()
        runs.append(product(which, t, *sizes[layer], kind))

    def run() -> None:
        for each in runs:
            each()

    try:
        run()
    except (RuntimeError, ValueError) as error:
        print(f"  {kind}: {str(error).splitlines()[0][:150]}")
        return None
    return run


def own_floor(t: int, h: int, f: int) -> Run:
    """The six in bfloat16 as Ligature runs them: with LIGATURE_GEMM_SEARCH=1 by the algorithms that
    it finds the fastest."""
    parts = []
    for k, n in ((h, f), (f // 2, h)):
        linear = te.ops.BasicLinear(k, n, device="cuda", dtype=BF16)
        x = torch.randn(t, k, device="cuda", dtype=BF16, requires_grad=True)
        parts.append((linear, x, torch.randn(t, n, device="cuda", dtype=BF16)))

    def run() -> None:
        outputs = []
        for linear, x, _ in parts:
            x.grad = linear.weight.grad = None
            outputs.append(linear(x))
        for y, (_, _, dy) in zip(reversed(outputs), reversed(parts), strict=True):
            y.backward(dy)

    return run

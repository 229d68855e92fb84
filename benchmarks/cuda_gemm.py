"""The six matrix products of the block, ours and torch's, on one GPU in one run: the floors.

The block is norm, Linear(h, f), SwiGLU, Linear(f/2, h), so the products are forward, input gradient
and weight gradient of both linears. Times are those of the products' own kernels, as torch's
profiler reads them: what quantizes the operands beside them is not counted, what lays out factors
for a product is. The host's time of one small call follows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ligature.common.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import ligature as te

Tensor = torch.Tensor
Run = Callable[[], object]

SHAPES = [(16384, 4096, 28672), (8192, 4096, 28672), (4096, 2048, 11264), (2048, 1024, 5632)]
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|splitK|s16816")
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def product_times(runs: list[Run], repeat: int) -> list[float]:
    """Median microseconds that the products in each run take on the device; runs take turns."""
    for run in runs:
        for _ in range(3):
            run()
    sums: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat):
        for run, result in zip(runs, sums, strict=True):
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as measured:
                run()
                torch.cuda.synchronize()
            result.append(
                sum(
                    event.device_time_total
                    for event in measured.events()
                    if event.device_type == DeviceType.CUDA and PRODUCT.search(event.name)
                )
            )
    return [statistics.median(result) for result in sums]


def ours(product: str, x: Tensor, dy: Tensor, k: int, n: int, recipe: Recipe | None) -> Run:
    """A step of a linear in which just this product runs."""
    linear = te.ops.BasicLinear(k, n, device="cuda", dtype=BF16)
    linear.weight.requires_grad_(product == "dw")
    leaf = x.detach().requires_grad_(product == "dx")
    context: Callable[[], Any] = (
        contextlib.nullcontext if recipe is None else lambda: te.autocast(recipe=recipe)
    )

    def forward() -> None:
        with torch.no_grad(), context():
            linear(leaf)

    if product == "y":
        return forward
    with context():
        y = linear(leaf)

    def backward() -> None:
        leaf.grad = linear.weight.grad = None
        y.backward(dy, retain_graph=True)

    return backward


def block_scale(rows: int, k: int, square: bool) -> Tensor:
    if square:
        return torch.rand((rows + 127) // 128, (k + 127) // 128, device="cuda")
    return torch.rand((k + 127) // 128, rows, device="cuda").t()


def torchs(product: str, t: int, k: int, n: int, recipe: str) -> Run:
    """The same product through torch.mm or torch._scaled_mm, on operands that are ready."""
    m, inner, columns = {"y": (t, k, n), "dx": (t, n, k), "dw": (n, t, k)}[product]
    a = torch.randn(m, inner, device="cuda", dtype=BF16)
    b = torch.randn(columns, inner, device="cuda", dtype=BF16)
    if recipe == "bf16":
        if product == "dx":
            b = b.t().contiguous().t()
        if product == "dw":
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        return lambda: torch.mm(a, b.t())
    gradient = E5M2 if recipe == "fp8" and product != "y" else E4M3
    a8, b8 = a.to(gradient), b.to(E4M3)
    if recipe == "fp8":
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(
            a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=product == "y"
        )
    sa = block_scale(m, inner, False)
    sb = block_scale(columns, inner, product != "dw")
    return lambda: torch._scaled_mm(a8, b8.t(), sa, sb.t(), out_dtype=BF16)


def try_times(runs: list[Run | None], repeat: int) -> list[float | None]:
    """None for what cannot run here; the rest takes turns."""
    alive: list[int] = []
    for i, run in enumerate(runs):
        if run is None:
            continue
        try:
            run()
            torch.cuda.synchronize()
            alive.append(i)
        except (RuntimeError, ValueError) as error:
            print(f"  cannot run: {str(error).splitlines()[0][:140]}")
    times = product_times([r for i in alive if (r := runs[i]) is not None], repeat)
    found = dict(zip(alive, times, strict=True))
    return [found.get(i) for i in range(len(runs))]


def shape_rows(t: int, h: int, f: int, repeat: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    recipes: dict[str, Recipe | None] = {
        "bf16": None,
        "fp8": Float8CurrentScaling(),
        "fp8 block": Float8BlockScaling(),
    }
    for name, recipe in recipes.items():
        for layer, k, n in (("fc1", h, f), ("fc2", f // 2, h)):
            x = torch.randn(t, k, device="cuda", dtype=BF16)
            dy = torch.randn(t, n, device="cuda", dtype=BF16)
            for product in ("y", "dx", "dw"):
                runs: list[Run | None] = [
                    ours(product, x, dy, k, n, recipe),
                    torchs(product, t, k, n, name),
                ]
                mine, theirs = try_times(runs, repeat)
                rows.append(
                    {
                        "shape": f"T{t} h{h} f{f}",
                        "recipe": name,
                        "product": f"{layer} {product}",
                        "ours_us": mine,
                        "torch_us": theirs,
                        "tflops": 2e-6 * t * k * n / mine if mine else None,
                    }
                )
                del runs
                torch.cuda.empty_cache()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    print(f"\n{rows[0]['shape']}\n{'':<22}{'ours µs':>10}{'TFLOP/s':>10}{'torch µs':>10}")
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        some = [row for row in rows if row["recipe"] == recipe]
        for row in some:
            label = f"{recipe:<10} {row['product']}"
            print(
                f"{label:<22}{text(row['ours_us']):>10}{text(row['tflops']):>10}"
                f"{text(row['torch_us']):>10}"
            )
        for key, who in (("ours_us", "ours"), ("torch_us", "torch")):
            if all(row[key] is not None for row in some):
                print(f"{recipe} floor, {who}: {sum(row[key] for row in some) / 1000:.3f} ms")


def host_time(run: Run, calls: int = 2000) -> float:
    """Microseconds per call, the least of several rounds; the device keeps up."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return best * 1e6


def host_rows() -> dict[str, float]:
    x = torch.randn(64, 256, device="cuda", dtype=BF16)
    linear = te.ops.BasicLinear(256, 256, device="cuda", dtype=BF16)
    weight = linear.weight.detach()
    with torch.no_grad():
        return {
            "one BasicLinear": host_time(lambda: linear(x)),
            "F.linear": host_time(lambda: F.linear(x, weight)),
            "torch.mm": host_time(lambda: torch.mm(x, weight.t())),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    for i in options.shapes:
        found = shape_rows(*SHAPES[i], options.repeat)
        show(found)
        rows += found
    host = host_rows()
    print("\nhost, T64 h256 forward under no_grad")
    for name, value in host.items():
        print(f"{name:<22}{value:>10.1f} µs")
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"products": rows, "host_us": host}, out, indent=1)


if __name__ == "__main__":
    main()

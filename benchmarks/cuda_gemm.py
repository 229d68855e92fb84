"""The six matrix products of the block, ours and torch's, on one GPU in one run: the floors.

The block is norm, Linear(h, f), SwiGLU, Linear(f/2, h), so the products are forward, input gradient
and weight gradient of both linears. Times are those of the products' own kernels, as torch's
profiler reads them: what quantizes the operands beside them is not counted, what lays out factors
for a product is. The host's time of one small call follows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from block import low_precision
from floors import product as torchs_product
from timing import PRODUCT, Run, kernel_seconds

import ligature as te
from ligature.common.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe

Tensor = torch.Tensor
SHAPES = [(16384, 4096, 28672), (8192, 4096, 28672), (4096, 2048, 11264), (2048, 1024, 5632)]
BF16 = torch.bfloat16


def product_times(runs: list[Run], repeat: int) -> list[float]:
    """Median microseconds that the products in each run take on the device; runs take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat):
        for run, result in zip(runs, times, strict=True):
            result.append(1e6 * kernel_seconds(run, 5, PRODUCT.search))
    return [statistics.median(result) for result in times]


def ours(product: str, x: Tensor, dy: Tensor, k: int, n: int, recipe: Recipe | None) -> Run:
    """A step of a linear in which just this product runs."""
    linear = te.ops.BasicLinear(k, n, device="cuda", dtype=BF16)
    linear.weight.requires_grad_(product == "dw")
    leaf = x.detach().requires_grad_(product == "dx")

    def forward() -> None:
        with torch.no_grad(), low_precision(recipe):
            linear(leaf)

    if product == "y":
        return forward
    with low_precision(recipe):
        y = linear(leaf)

    def backward() -> None:
        leaf.grad = linear.weight.grad = None
        y.backward(dy, retain_graph=True)

    return backward


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
                    torchs_product(product, t, k, n, f"floor {name}"),
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
    parser.add_argument("--repeat", type=int, default=5)
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

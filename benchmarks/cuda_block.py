"""The block, forward and backward, on a GPU: eager, torch.compile and Ligature in every recipe.

The block is norm, Linear(h, f), SwiGLU, Linear(f/2, h) in bfloat16, with all gradients. A floor is
the block's six matrix products alone, as torch calls cuBLASLt, on operands that are ready. All in
one run and in turns. Memory is the peak above parameters and input; the host's time of a small
block, until the call returns, comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from timing import forward_backward, gpu_seconds, host_seconds
from torch import nn

import ligature as te

SHAPES = [
    ("LayerNorm", 16384, 4096, 28672),
    ("RMSNorm", 8192, 4096, 28672),
    ("LayerNorm", 4096, 2048, 11264),
    ("RMSNorm", 2048, 1024, 5632),
]
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
RECIPES: dict[str, Callable[[], te.recipe.Recipe]] = {
    "fp8 delayed": te.recipe.DelayedScaling,
    "fp8 current": te.recipe.Float8CurrentScaling,
    "fp8 block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}
FLOOR_OF = {
    "fp8 delayed": "floor fp8",
    "fp8 current": "floor fp8",
    "fp8 block": "floor fp8 block",
}


class TorchBlock(nn.Module):
    def __init__(self, norm: str, h: int, f: int) -> None:
        super().__init__()
        self.norm = getattr(nn, norm)(h)
        self.fc1 = nn.Linear(h, f, bias=False)
        self.fc2 = nn.Linear(f // 2, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(a) * b)


def ligature_block(norm: str, h: int, f: int, recompute: str = "none") -> te.ops.Sequential:
    return te.ops.Sequential(
        getattr(te.ops, norm)(h, dtype=BF16),
        te.ops.Linear(h, f, bias=False, dtype=BF16),
        te.ops.SwiGLU(),
        te.ops.Linear(f // 2, h, bias=False, dtype=BF16),
        recompute=recompute,
    )


def step_of(
    model: nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: te.recipe.Recipe | None = None
) -> Callable[[], None]:
    def step() -> None:
        # An optimizer's step would have changed the weights.
        for parameter in model.parameters():
            torch.autograd.graph.increment_version(parameter)
        context = contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)
        with context:
            forward_backward(model, x, dy)

    return step


def products(t: int, h: int, f: int, kind: str) -> Callable[[], None] | None:
    """The six products: forward, input gradient and weight gradient of both linears."""
    runs: list[Callable[[], object]] = []
    for k, n in ((h, f), (f // 2, h)):
        for name, rows, inner, columns in (("y", t, k, n), ("dx", t, n, k), ("dw", n, t, k)):
            a = torch.randn(rows, inner, dtype=BF16)
            b = torch.randn(columns, inner, dtype=BF16)
            if kind == "floor bf16":
                if name == "dx":
                    b = b.t().contiguous().t()
                elif name == "dw":
                    a, b = a.t().contiguous().t(), b.t().contiguous().t()
                runs.append(lambda a=a, b=b: torch.mm(a, b.t()))
                continue
            a8 = a.to(E5M2 if name != "y" and kind == "floor fp8" else E4M3)
            b8 = b.to(E4M3)
            if kind == "floor fp8":
                one = torch.ones(())
                runs.append(
                    lambda a8=a8, b8=b8, one=one, fast=name == "y": torch._scaled_mm(
                        a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=fast
                    )
                )
                continue
            sa = torch.rand(inner // 128, rows).t()
            square = name != "dw"
            sb = torch.rand(columns // 128, inner // 128) if square else None
            if sb is None:
                sb = torch.rand(inner // 128, columns).t()
            runs.append(
                lambda a8=a8, b8=b8, sa=sa, sb=sb: torch._scaled_mm(
                    a8, b8.t(), sa, sb.t(), out_dtype=BF16
                )
            )

    def run() -> None:
        for each in runs:
            each()

    try:
        run()
    except (RuntimeError, ValueError) as error:
        print(f"  {kind}: {str(error).splitlines()[0][:150]}")
        return None
    return run


def peak_bytes(step: Callable[[], None]) -> int:
    step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_shape(
    norm: str, t: int, h: int, f: int, seconds: float, compile_too: bool
) -> list[dict[str, Any]]:
    x = torch.randn(t, h, dtype=BF16, requires_grad=True)
    dy = torch.randn(t, h, dtype=BF16)
    eager = TorchBlock(norm, h, f).to(BF16)
    runs: dict[str, Callable[[], None]] = {"eager": step_of(eager, x, dy)}
    if compile_too:
        runs["torch.compile"] = step_of(torch.compile(eager), x, dy)
    runs["ligature"] = step_of(ligature_block(norm, h, f), x, dy)
    runs["ligature recompute"] = step_of(ligature_block(norm, h, f, "cheap"), x, dy)
    for name, make in RECIPES.items():
        runs[name] = step_of(ligature_block(norm, h, f), x, dy, make())
    memory = {name: peak_bytes(run) for name, run in runs.items()}
    for kind in ("floor bf16", "floor fp8", "floor fp8 block"):
        run = products(t, h, f, kind)
        if run is not None:
            runs[kind] = run
    times = dict(zip(runs, gpu_seconds(list(runs.values()), seconds), strict=True))
    print(f"\n{norm} T{t} h{h} f{f}")
    print(f"{'':<22}{'ms':>9}{'of eager':>10}{'of floor':>10}{'peak GiB':>10}")
    rows = []
    for name, s in times.items():
        floor = times.get(FLOOR_OF.get(name, "floor bf16"))
        row = {
            "shape": f"{norm} T{t} h{h} f{f}",
            "what": name,
            "ms": 1e3 * s,
            "of_eager": s / times["eager"],
            "of_floor": s / floor if floor else None,
            "peak_gib": memory[name] / 2**30 if name in memory else None,
        }
        rows.append(row)
        of_floor = f"{row['of_floor']:10.3f}" if floor else f"{'-':>10}"
        peak = f"{row['peak_gib']:10.2f}" if name in memory else ""
        print(f"{name:<22}{row['ms']:9.3f}{row['of_eager']:10.2f}{of_floor}{peak}")
    return rows


def measure_host() -> list[dict[str, Any]]:
    t, h, f = 64, 256, 512
    x = torch.randn(t, h, dtype=BF16, requires_grad=True)
    dy = torch.randn(t, h, dtype=BF16)
    ways: list[tuple[str, nn.Module, te.recipe.Recipe | None]] = [
        ("eager", TorchBlock("LayerNorm", h, f).to(BF16), None),
        ("ligature", ligature_block("LayerNorm", h, f), None),
    ]
    ways += [(name, ligature_block("LayerNorm", h, f), make()) for name, make in RECIPES.items()]
    print(f"\nhost, T{t} h{h} f{f}, µs until the call returns")
    print(f"{'':<22}{'forward':>10}{'fwd+bwd':>10}")
    rows = []
    for name, model, recipe in ways:

        def forward(model: nn.Module = model, recipe: te.recipe.Recipe | None = recipe) -> None:
            context = contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)
            with torch.no_grad(), context:
                model(x)

        def both(model: nn.Module = model, recipe: te.recipe.Recipe | None = recipe) -> None:
            context = contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)
            with context:
                forward_backward(model, x, dy)

        row = {
            "what": name,
            "forward_us": 1e6 * host_seconds(forward),
            "both_us": 1e6 * host_seconds(both),
        }
        rows.append(row)
        print(f"{name:<22}{row['forward_us']:10.1f}{row['both_us']:10.1f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, nargs="*", default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--json", help="write the rows here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_block.py needs a GPU")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Ligature {te.__version__}")
    result: dict[str, Any] = {"machine": torch.cuda.get_device_name(), "blocks": []}
    for i in args.shapes:
        result["blocks"] += measure_shape(*SHAPES[i], args.seconds, args.compile)
        gc.collect()
        torch.cuda.empty_cache()
    result["host"] = measure_host()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()

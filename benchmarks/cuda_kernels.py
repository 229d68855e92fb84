"""Bandwidth of the memory-bound CUDA kernels against a copy of the same bytes in the same run.

Times are those of the kernels alone, as torch's profiler reads them. The bytes are what must be
read and written once; the copy moves as many. Large shapes exceed the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import dataclass
from typing import Any

import torch
from timing import Run, kernel_seconds

import ligature as te

SHAPES = [(16384, 4096, 28672), (64, 256, 512)]
REPEATS = 20


@dataclass
class Case:
    name: str
    shape: str
    bytes: int
    run: Run


def time_copy(size: int, repeats: int) -> float:
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return kernel_seconds(lambda: target.copy_(source), repeats)


def forward_of(model: torch.nn.Module, *inputs: torch.Tensor) -> Run:
    def run() -> object:
        with torch.no_grad():
            return model(*inputs)

    return run


def backward_of(model: torch.nn.Module, x: torch.Tensor) -> Run:
    """Each backward gets fresh gradients of the outputs' shape; the graph is kept."""
    x = x.detach().requires_grad_()
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(y) for y in outputs]
    leaves = [x, *model.parameters()]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)


def cases(t: int, h: int, f: int, dtype: torch.dtype) -> list[Case]:
    ops = te.ops
    size = torch.finfo(dtype).bits // 8
    x = torch.randn(t, h, dtype=dtype, device="cuda")
    wide = torch.randn(t, f, dtype=dtype, device="cuda")
    made: list[Case] = []

    def add(
        name: str, model: torch.nn.Module, data: torch.Tensor, forward: float, backward: float
    ) -> None:
        shape = f"{data.shape[0]}x{data.shape[1]}"
        count = data.numel() * size
        if forward:
            made.append(Case(f"{name} fwd", shape, int(count * forward), forward_of(model, data)))
        if backward:
            made.append(Case(f"{name} bwd", shape, int(count * backward), backward_of(model, data)))

    add("LayerNorm", ops.LayerNorm(h, dtype=dtype, device="cuda"), x, 2, 3)
    add("RMSNorm", ops.RMSNorm(h, dtype=dtype, device="cuda"), x, 2, 3)
    branch = ops.Sequential(ops.MakeExtraOutput(), ops.LayerNorm(h, dtype=dtype, device="cuda"))
    add("add+LayerNorm", branch, x, 0, 4)
    add("L2Normalization", ops.L2Normalization(), x, 2, 3)
    add("Bias", ops.Bias(h, dtype=dtype, device="cuda"), x, 2, 1)
    add("Dropout", ops.Dropout(0.1), x, 2 + 1 / size, 2 + 1 / size)
    for kind in ("GELU", "SiLU", "ReLU"):
        add(kind, getattr(ops, kind)(), x, 2, 3)
    for kind in ("SwiGLU", "GEGLU", "ClampedSwiGLU", "SiTUGLU"):
        if hasattr(ops, kind):
            add(kind, getattr(ops, kind)(), wide, 1.5, 2.5)
    return made


def measure(shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> list[dict[str, Any]]:
    rows = []
    print(f"{'kernel':<22}{'shape':>14}{'us':>9}{'TB/s':>7}{'copy us':>9}{'of copy':>9}")
    for t, h, f in shapes:
        copies: dict[int, float] = {}
        time_copy(1 << 30, 20 * REPEATS)  # until its clocks are up
        for case in cases(t, h, f, dtype):
            seconds = kernel_seconds(case.run, REPEATS)
            if case.bytes not in copies:
                copies[case.bytes] = time_copy(case.bytes, REPEATS)
            copy = copies[case.bytes]
            row = {
                "kernel": case.name,
                "shape": case.shape,
                "us": seconds * 1e6,
                "tb_s": case.bytes / seconds / 1e12,
                "copy_us": copy * 1e6,
                "of_copy": copy / seconds,
            }
            rows.append(row)
            print(
                f"{case.name:<22}{case.shape:>14}{row['us']:9.1f}{row['tb_s']:7.2f}"
                f"{row['copy_us']:9.1f}{row['of_copy']:9.0%}"
            )
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "H", "F"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", help="write the rows here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_kernels.py needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}")
    rows = measure(args.shape or SHAPES, getattr(torch, args.dtype))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

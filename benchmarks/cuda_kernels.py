"""Bandwidth of the memory-bound CUDA kernels against a copy of the same bytes in the same run.

Each kernel is captured many times into a CUDA graph, so that the host's time is left out. The bytes
are what must be read and written once; the copy moves as many. Large shapes exceed the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

import ligature as te

Run = Callable[[], object]


@dataclass
class Case:
    name: str
    shape: str
    bytes: int
    run: Run


def time_graphed(run: Run, repeats: int, rounds: int) -> float:
    """Median seconds of one run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats / 1e3)
    return statistics.median(times)


def time_copy(size: int, repeats: int, rounds: int) -> float:
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return time_graphed(lambda: target.copy_(source), repeats, rounds)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "H", "F"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the rows here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_kernels.py needs a GPU")
    dtype = getattr(torch, args.dtype)
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}")
    print(f"{'kernel':<22}{'shape':>14}{'us':>9}{'TB/s':>7}{'copy us':>9}{'of copy':>9}")
    for t, h, f in args.shape or [(16384, 4096, 28672), (64, 256, 512)]:
        repeats = 10 if t * h >= 1 << 22 else 100
        copies: dict[int, float] = {}
        for case in cases(t, h, f, dtype):
            seconds = time_graphed(case.run, repeats, args.rounds)
            if case.bytes not in copies:
                copies[case.bytes] = time_copy(case.bytes, repeats, args.rounds)
            copy = copies[case.bytes]
            rows.append(
                {"kernel": case.name, "shape": case.shape, "us": seconds * 1e6, "copy": copy * 1e6}
            )
            print(
                f"{case.name:<22}{case.shape:>14}{seconds * 1e6:9.1f}"
                f"{case.bytes / seconds / 1e12:7.2f}{copy * 1e6:9.1f}{copy / seconds:9.0%}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

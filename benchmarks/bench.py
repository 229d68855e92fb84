"""Times Ligature against plain PyTorch in the same run: interleaved, medians, ratios.

Below 1.00 Ligature is faster. The block is LayerNorm, Linear(h, f), SwiGLU, Linear(f/2, h).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ligature as te

SHAPES = {"cpu": [(64, 256, 512), (512, 512, 2816)], "cuda": [(64, 256, 512), (2048, 1024, 5632)]}


class TorchBlock(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h)
        self.fc1 = nn.Linear(h, f)
        self.fc2 = nn.Linear(f // 2, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(a) * b)


def make_blocks(h: int, f: int, dtype: torch.dtype, recompute: str) -> tuple[nn.Module, nn.Module]:
    plain = TorchBlock(h, f).to(dtype)
    fused = te.ops.Sequential(
        te.ops.LayerNorm(h, dtype=dtype),
        te.ops.Linear(h, f, dtype=dtype),
        te.ops.SwiGLU(),
        te.ops.Linear(f // 2, h, dtype=dtype),
        recompute=recompute,
    )
    with torch.no_grad():
        for to, source in zip(fused.parameters(), plain.parameters(), strict=True):
            to.copy_(source)
    return plain, fused


def forward(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def forward_backward(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    model(x).backward(dy)


def interleaved(runs: list[Callable[[], None]], device: str, seconds: float) -> list[float]:
    """Median seconds of each, measured in turns."""

    def timed(run: Callable[[], None]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for run in runs:
        for _ in range(5):
            run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for run, result in zip(runs, times, strict=True):
            result.append(timed(run))
    return [statistics.median(result) for result in times]


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="per line of the table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device(args.device)

    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    threads = torch.get_num_threads()
    if not args.json:
        print(f"{where}, {threads} threads, torch {torch.__version__}, Ligature {te.__version__}")
        print(f"{'block':<28}{'pass':<10}{'PyTorch µs':>12}{'Ligature µs':>12}{'ratio':>8}")
    rows: list[dict[str, Any]] = []
    for t, h, f in SHAPES[args.device]:
        for dtype in (torch.float32, torch.bfloat16):
            for recompute in ("none", "cheap"):
                plain, fused = make_blocks(h, f, dtype, recompute)
                x = torch.randn(t, h, dtype=dtype, requires_grad=True)
                dy = torch.randn(t, h, dtype=dtype)
                passes = {"fwd": forward, "fwd+bwd": forward_backward}
                if recompute == "cheap":
                    del passes["fwd"]
                for name, run in passes.items():
                    runs = [lambda m=m, run=run, x=x, dy=dy: run(m, x, dy) for m in (plain, fused)]
                    torch_s, ligature_s = interleaved(runs, args.device, args.seconds)
                    block = f"T{t} h{h} f{f} {str(dtype)[6:]}"
                    title = name + (" rc" if recompute == "cheap" else "")
                    row = {
                        "block": block,
                        "pass": name,
                        "recompute": recompute,
                        "torch_us": 1e6 * torch_s,
                        "ligature_us": 1e6 * ligature_s,
                        "ratio": ligature_s / torch_s,
                    }
                    rows.append(row)
                    if not args.json:
                        print(
                            f"{block:<28}{title:<10}{row['torch_us']:>12.1f}"
                            f"{row['ligature_us']:>12.1f}{row['ratio']:>8.2f}"
                        )
    if args.json:
        print(json.dumps({"machine": where, "threads": threads, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

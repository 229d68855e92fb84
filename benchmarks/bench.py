"""Times Ligature against plain PyTorch in the same run: interleaved, medians, ratios.

Below 1.00 Ligature is faster. The block is LayerNorm, Linear(h, f), SwiGLU, Linear(f/2, h). On the
CPU low precision follows: see low_precision.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import low_precision
import torch
from timing import cpu_name, forward_backward, interleaved
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


def blocks(device: str, seconds: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tell(f"{'block':<28}{'pass':<10}{'PyTorch µs':>12}{'Ligature µs':>12}{'ratio':>8}")
    for t, h, f in SHAPES[device]:
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
                    torch_s, ligature_s = interleaved(runs, device, seconds)
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
                    tell(
                        f"{block:<28}{title:<10}{row['torch_us']:>12.1f}"
                        f"{row['ligature_us']:>12.1f}{row['ratio']:>8.2f}"
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="per line of the table")
    parser.add_argument("--part", choices=["all", "blocks", "low"], default="all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device(args.device)

    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    threads = torch.get_num_threads()
    tell: Callable[[str], None] = (lambda text: None) if args.json else print
    tell(f"{where}, {threads} threads, torch {torch.__version__}, Ligature {te.__version__}")
    result: dict[str, Any] = {"machine": where, "threads": threads}
    if args.part != "low":
        result["rows"] = blocks(args.device, args.seconds, tell)
    if args.part != "blocks" and args.device == "cpu":
        result["low_precision"] = low_precision.measure(args.seconds / 2, tell)
    if args.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

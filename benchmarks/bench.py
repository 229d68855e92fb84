"""Times Ligature against plain PyTorch in the same run: interleaved, medians, ratios.

On the CPU: below 1.00 Ligature is faster; the block is LayerNorm, Linear(h, f), SwiGLU,
Linear(f/2, h); low precision follows (low_precision.py), and the memory-bound kernels alone
(cpu_kernels.py). On a GPU: the block in every recipe beside eager, torch.compile and the floors,
peak memory and the host's time (cuda_block.py), and the bandwidth of the kernels (cuda_kernels.py,
cuda_casts.py). plot.py draws what --json has written.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import cpu_kernels
import low_precision
import torch
from block import Step, TorchBlock, forward_only, ligature_block
from timing import cpu_name, interleaved
from torch import nn

import ligature as te

SHAPES = [(64, 256, 512), (512, 512, 2816)]


def make_blocks(h: int, f: int, dtype: torch.dtype, recompute: str) -> tuple[nn.Module, nn.Module]:
    plain = TorchBlock("LayerNorm", h, f, True, dtype)
    fused = ligature_block("LayerNorm", h, f, True, dtype, recompute)
    with torch.no_grad():
        for to, source in zip(fused.parameters(), plain.parameters(), strict=True):
            to.copy_(source)
    return plain, fused


def blocks(seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"{'block':<28}{'pass':<10}{'PyTorch µs':>12}{'Ligature µs':>12}{'ratio':>8}")
    for t, h, f in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for recompute in ("none", "cheap"):
                plain, fused = make_blocks(h, f, dtype, recompute)
                x = torch.randn(t, h, dtype=dtype, requires_grad=True)
                dy = torch.randn(t, h, dtype=dtype)
                passes = {
                    "fwd": [forward_only(m, x) for m in (plain, fused)],
                    "fwd+bwd": [Step(m, x, dy) for m in (plain, fused)],
                }
                if recompute == "cheap":
                    del passes["fwd"]
                for name, runs in passes.items():
                    torch_s, ligature_s = interleaved(runs, "cpu", seconds)
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
                    print(
                        f"{block:<28}{title:<10}{row['torch_us']:>12.1f}"
                        f"{row['ligature_us']:>12.1f}{row['ratio']:>8.2f}"
                    )
    return rows


def measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "blocks" in args.parts:
        result["rows"] = blocks(args.seconds)
    if "low" in args.parts:
        result["low_precision"] = low_precision.measure(args.seconds / 2, print)
    if "kernels" in args.parts:
        print("\nkernels alone, beside eager, torch.compile and a copy of the same bytes")
        result["kernels"] = cpu_kernels.measure(seconds=args.seconds / 30)
    return result


def measure_gpu(args: argparse.Namespace) -> dict[str, Any]:
    import cuda_block
    import cuda_casts
    import cuda_kernels

    result: dict[str, Any] = {}
    if "blocks" in args.parts:
        result |= cuda_block.measure(args.shapes, cuda_block.NAMES, [], args.rounds, args.compile)
    if "kernels" in args.parts:
        print("\nkernels alone, beside a copy of the same bytes")
        result["kernels"] = cuda_kernels.measure(cuda_kernels.SHAPES, torch.bfloat16)
        print("\ncasts, beside a copy of the same bytes")
        result["casts"] = cuda_casts.measure(16384, 4096, 28672, 20)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["blocks", "low", "kernels"],
        default=["blocks", "low", "kernels"],
    )
    parser.add_argument("--json", help="write everything here too")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--seconds", type=float, default=3.0, help="per line of the table")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--shapes", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4))
    gpu.add_argument("--rounds", type=int, default=3, help="turns of each")
    gpu.add_argument("--compile", type=float, default=60, help="seconds for torch.compile in all")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device(args.device)

    on_gpu = args.device == "cuda"
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ligature": te.__version__,
    }
    print("{machine}, {threads} threads, torch {torch}, Ligature {ligature}".format(**result))
    result |= measure_gpu(args) if on_gpu else measure_cpu(args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()

"""Times Ligature against plain PyTorch in the same run: interleaved, medians, ratios.

On the CPU: the block beside eager, torch.compile and its products, and what it holds in memory
(block.py), a block of experts (moe.py), low precision (low_precision.py), and the memory-bound
kernels alone (cpu_kernels.py). grouped_gemm.py times the GEMMs of experts alone.
On a GPU: the block in every recipe beside eager, torch.compile and the floors, peak memory and the
host's time (cuda_block.py), and the bandwidth of the kernels (cuda_kernels.py, cuda_casts.py).
plot.py draws what --json has written.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import block
import cpu_kernels
import low_precision
import moe
import torch
from timing import cpu_name

import ligature as te


def measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "blocks" in args.parts:
        result["blocks"] = block.measure(2 * args.seconds, True, print)
    if "moe" in args.parts:
        result["moe"] = moe.measure(args.seconds, print)
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
        choices=["blocks", "moe", "low", "kernels"],
        default=["blocks", "moe", "low", "kernels"],
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

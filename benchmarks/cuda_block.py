"""The block, forward and backward, on a GPU: eager, torch.compile and Ligature in every recipe.

    python benchmarks/cuda_block.py [--shapes 0 1] [--only ligature "floor bf16"]
        [--profile ligature "fp8 delayed" "floor bf16"]

The block is norm, Linear(h, f), SwiGLU, Linear(f/2, h) in bfloat16, with all gradients. A floor is
the block's six matrix products alone, as torch calls cuBLASLt, on operands that are ready. All in
one run and in turns. Memory is the peak above parameters and input; the host's time of a small
block, until the call returns, comes last.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch
from block import RECIPES, Step, TorchBlock, captured, forward_only, ligature_block
from cuda_profile import profile_step
from floors import FLOOR_OF, FLOORS, floor, own_floor
from timing import Run, gpu_seconds, host_seconds
from torch import nn

import ligature as te

SHAPES = [
    ("LayerNorm", 16384, 4096, 28672),
    ("RMSNorm", 8192, 4096, 28672),
    ("LayerNorm", 4096, 2048, 11264),
    ("RMSNorm", 2048, 1024, 5632),
]
BF16 = torch.bfloat16
BLOCKS = ["eager", "torch.compile", "ligature", "ligature recompute", *RECIPES]
# Where the host is slower than the GPU, and only there: the step as a CUDA graph.
GRAPHS = [f"{name} graph" for name in ("ligature", "fp8 delayed", "fp8 current", "fp8 block")]
GRAPH_SHAPES = (2, 3)
COMPILED = [f"{name} compiled" for name in ("ligature", "fp8 delayed", "fp8 current")]
NAMES = [*BLOCKS, *COMPILED, *GRAPHS, "products ligature", *FLOORS]


def block_step(name: str, norm: str, t: int, h: int, f: int) -> Step:
    x = torch.randn(t, h, dtype=BF16, requires_grad=True)
    dy = torch.randn(t, h, dtype=BF16)
    compiled = name == "torch.compile" or name in COMPILED
    name = name.removesuffix(" compiled")
    recipe = RECIPES[name]() if name in RECIPES else None
    model: nn.Module
    if name in ("eager", "torch.compile"):
        model = TorchBlock(norm, h, f, False, BF16)
    else:
        recompute = "cheap" if name == "ligature recompute" else "none"
        model = ligature_block(norm, h, f, False, BF16, recompute)
    if compiled:
        torch.compiler.reset()
        model = torch.compile(model, fullgraph=name != "torch.compile")
    return Step(model, x, dy, recipe, new_weights=True)


class CompileTime:
    """torch.compile takes a while for each shape: so many seconds, and no more."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def first_steps(self, name: str, run: Run) -> bool:
        if self.left <= 0:
            print(f"  {name}: left out, its time is up")
            return False
        start = time.perf_counter()
        try:
            run()
            run()
        except Exception as error:
            print(f"  {name}: {repr(error)[:150]}")
            return False
        self.left -= time.perf_counter() - start
        return True


def make_runs(
    names: list[str], norm: str, t: int, h: int, f: int, compile_time: CompileTime
) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for name in names:
        if name in BLOCKS or name in COMPILED:
            step = block_step(name, norm, t, h, f)
            is_compiled = name == "torch.compile" or name in COMPILED
            if not is_compiled or compile_time.first_steps(name, step):
                runs[name] = step
        elif name in GRAPHS:
            try:
                runs[name] = captured(block_step(name.removesuffix(" graph"), norm, t, h, f))
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0][:150]}")
        elif name == "products ligature":
            runs[name] = own_floor(t, h, f)
        elif (run := floor(t, h, f, name)) is not None:
            runs[name] = run
    return runs


def peak_bytes(step: Step) -> int:
    """Above parameters, input and the gradient that comes in; gradients that are made count."""
    step()
    step()
    step.clear()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_shape(title: str, runs: dict[str, Run], rounds: int) -> list[dict[str, Any]]:
    memory = {name: peak_bytes(run) for name, run in runs.items() if isinstance(run, Step)}
    # A default device is a mode that every call from Python goes through: not while this is timed.
    torch.set_default_device(None)
    times = dict(zip(runs, gpu_seconds(list(runs.values()), rounds), strict=True))
    torch.set_default_device("cuda")
    print(f"\n{title}")
    print(f"{'':<22}{'ms':>9}{'of eager':>10}{'of floor':>10}{'peak GiB':>10}")
    rows = []
    for name, seconds in times.items():
        plain = name.removesuffix(" graph").removesuffix(" compiled")
        base = times.get(FLOOR_OF.get(plain, "floor bf16"))
        row = {
            "shape": title,
            "what": name,
            "ms": 1e3 * seconds,
            "of_eager": seconds / times["eager"] if "eager" in times else None,
            "of_floor": seconds / base if base else None,
            "peak_gib": memory[name] / 2**30 if name in memory else None,
        }
        rows.append(row)

        def text(key: str, digits: int, row: dict[str, Any] = row) -> str:
            return f"{'-':>10}" if row[key] is None else f"{row[key]:10.{digits}f}"

        ratios = text("of_eager", 2) + text("of_floor", 3) + text("peak_gib", 2)
        print(f"{name:<22}{row['ms']:9.3f}{ratios}")
    return rows


def measure_host(names: list[str]) -> list[dict[str, Any]]:
    t, h, f = 64, 256, 512
    torch.set_default_device(None)  # as above
    x = torch.randn(t, h, dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn(t, h, dtype=BF16, device="cuda")
    print(f"\nhost, T{t} h{h} f{f}, µs until the call returns")
    print(f"{'':<22}{'forward':>10}{'fwd+bwd':>10}")
    rows = []
    for name in names:
        if name not in BLOCKS or name == "torch.compile":
            continue
        recipe = RECIPES[name]() if name in RECIPES else None
        model: nn.Module
        with torch.device("cuda"):
            if name == "eager":
                model = TorchBlock("LayerNorm", h, f, False, BF16)
            else:
                recompute = "cheap" if name == "ligature recompute" else "none"
                model = ligature_block("LayerNorm", h, f, False, BF16, recompute)
        row = {
            "what": name,
            "forward_us": 1e6 * host_seconds(forward_only(model, x, recipe)),
            "both_us": 1e6 * host_seconds(Step(model, x, dy, recipe)),
        }
        rows.append(row)
        print(f"{name:<22}{row['forward_us']:10.1f}{row['both_us']:10.1f}")
    torch.set_default_device("cuda")
    return rows


def measure(
    shapes: list[int], names: list[str], profiled: list[str], rounds: int, compile_seconds: float
) -> dict[str, Any]:
    result: dict[str, Any] = {"blocks": [], "profiles": []}
    compile_time = CompileTime(compile_seconds)
    for i in shapes:
        norm, t, h, f = SHAPES[i]
        title = f"{norm} T{t} h{h} f{f}"
        wanted = [name for name in NAMES if name in {*names, *profiled}]
        if i not in GRAPH_SHAPES:
            wanted = [name for name in wanted if name not in {*GRAPHS, *COMPILED}]
        runs = make_runs(wanted, norm, t, h, f, compile_time)
        if rounds:
            result["blocks"] += measure_shape(title, runs, rounds)
        for name in profiled:
            if name in runs:
                in_order = name not in ("eager", "torch.compile")
                found = profile_step(f"{title}, {name}", runs[name], in_order)
                result["profiles"] += [found] if found else []
        del runs
        gc.collect()
        torch.cuda.empty_cache()
    if rounds:
        result["host"] = measure_host(names)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, nargs="*", default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; 0 times nothing")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, help="what to time")
    parser.add_argument("--profile", nargs="+", default=[], choices=NAMES, help="show the kernels")
    parser.add_argument(
        "--compile-seconds", type=float, default=60, help="for torch.compile in all"
    )
    parser.add_argument("--json", help="write everything here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_block.py needs a GPU")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, Ligature {te.__version__}")
    result = measure(args.shapes, args.only, args.profile, args.rounds, args.compile_seconds)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": name, **result}, file, indent=1)


if __name__ == "__main__":
    main()

"""The block that the benchmarks time, in plain PyTorch and in Ligature, and one step of it.

By itself, on the CPU: forward and backward beside eager, torch.compile and the block's six matrix
products alone, in turns and as medians, and what a step holds in memory. Run it with the settings
of ``make bench`` for malloc; else new pages are what is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
from timing import interleaved
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import ligature as te

CPU_SHAPES = [(64, 256, 512), (512, 512, 2816)]

RECIPES: dict[str, Callable[[], te.recipe.Recipe]] = {
    "fp8 delayed": te.recipe.DelayedScaling,
    "fp8 current": te.recipe.Float8CurrentScaling,
    "fp8 block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}


class TorchBlock(nn.Module):
    def __init__(self, norm: str, h: int, f: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = getattr(nn, norm)(h, dtype=dtype)
        self.fc1 = nn.Linear(h, f, bias=bias, dtype=dtype)
        self.fc2 = nn.Linear(f // 2, h, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(a) * b)


def ligature_block(
    norm: str, h: int, f: int, bias: bool, dtype: torch.dtype, recompute: str = "none"
) -> te.ops.Sequential:
    return te.ops.Sequential(
        getattr(te.ops, norm)(h, dtype=dtype),
        te.ops.Linear(h, f, bias=bias, dtype=dtype),
        te.ops.SwiGLU(),
        te.ops.Linear(f // 2, h, bias=bias, dtype=dtype),
        recompute=recompute,
    )


def forward_only(
    model: nn.Module, x: torch.Tensor, recipe: te.recipe.Recipe | None = None
) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad(), low_precision(recipe):
            model(x)

    return run


class Step:
    """Forward and backward with all gradients.

    With ``new_weights`` the weights count as changed, as by an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        dy: torch.Tensor,
        recipe: te.recipe.Recipe | None = None,
        new_weights: bool = False,
    ) -> None:
        self.model, self.x, self.dy, self.recipe = model, x, dy, recipe
        self.parameters = list(model.parameters())
        self.new_weights = new_weights

    def clear(self) -> None:
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self) -> None:
        self.clear()
        if self.new_weights:
            for parameter in self.parameters:
                torch.autograd.graph.increment_version(parameter)
        with low_precision(self.recipe):
            y = self.model(self.x)
        y.backward(self.dy)


def captured(step: Step) -> Callable[[], None]:
    """The step as one CUDA graph, which works on the step's own tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def run(held: Step = step) -> None:
        graph.replay()

    return run


def low_precision(recipe: te.recipe.Recipe | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)


def products(t: int, h: int, f: int, dtype: torch.dtype) -> Callable[[], None]:
    """The six matrix products of a step, as PyTorch makes them: of each linear y, dx and dw."""

    def one(k: int, n: int) -> Callable[[], None]:
        x, w, dy = (torch.randn(*s, dtype=dtype) for s in ((t, k), (n, k), (t, n)))

        def run() -> None:
            nn.functional.linear(x, w)
            torch.mm(dy, w)
            torch.mm(dy.t(), x)

        return run

    both = [one(h, f), one(f // 2, h)]

    def run() -> None:
        with torch.no_grad():
            for linear in both:
                linear()

    return run


def saved_bytes(step: Step) -> int:
    """What forward keeps for backward, besides parameters and input."""
    ours = {t.untyped_storage().data_ptr() for t in (step.x, *step.parameters)}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step.model(step.x)
    del y
    return sum(held.values())


def peak_bytes(step: Step) -> int:
    """The most that a step holds in tensors it makes, its result and gradients among them."""
    step.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        step()
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


RATIOS = (
    ("of_eager", "eager", 8),
    ("of_compile", "torch.compile", 9),
    ("of_floor", "products", 10),
)


def measure(seconds: float, compiled: bool, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """``seconds`` for each shape and dtype."""
    rows: list[dict[str, Any]] = []
    tell(
        f"{'forward and backward':<26}{'µs':>10}{'eager':>8}{'compile':>9}{'products':>10}"
        f"{'saved KiB':>11}{'peak KiB':>10}"
    )
    for t, h, f in CPU_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            plain = TorchBlock("LayerNorm", h, f, True, dtype)
            x = torch.randn(t, h, dtype=dtype, requires_grad=True)
            dy = torch.randn(t, h, dtype=dtype)
            steps: dict[str, Step] = {"eager": Step(plain, x, dy)}
            if compiled:
                torch.compiler.reset()
                steps["torch.compile"] = Step(torch.compile(plain), x, dy)
            for name, recompute in (("ligature", "none"), ("ligature recompute", "cheap")):
                model = ligature_block("LayerNorm", h, f, True, dtype, recompute)
                model.load_state_dict(
                    dict(zip(model.state_dict(), plain.parameters(), strict=True))
                )
                steps[name] = Step(model, x, dy)
            runs = [*steps.values(), products(t, h, f, dtype)]
            taken = dict(zip([*steps, "products"], interleaved(runs, "cpu", seconds), strict=True))
            block = f"T{t} h{h} f{f} {str(dtype)[6:]}"
            tell(block)
            for name, time in taken.items():
                row: dict[str, Any] = {"shape": block, "what": name, "ms": 1e3 * time}
                line = f"  {name:<24}{1e6 * time:>10.0f}"
                for key, other, width in RATIOS:
                    ratio = row[key] = time / taken[other] if other in taken else None
                    line += f"{'' if ratio is None else format(ratio, '.2f'):>{width}}"
                if name in steps and name != "torch.compile":
                    saved, peak = saved_bytes(steps[name]), peak_bytes(steps[name])
                    row["saved_gib"], row["peak_gib"] = saved / 2**30, peak / 2**30
                    line += f"{saved / 1024:>11.0f}{peak / 1024:>10.0f}"
                rows.append(row)
                tell(line)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="per shape and dtype")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", help="write everything here too")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, Ligature {te.__version__}"
    )
    rows = measure(args.seconds, not args.no_compile, print)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

"""Times a block of experts, forward and backward with the routing given, and counts what it saves.

Beside Ligature: the dense GEMMs of equal FLOPs (the floor), a block over
``torch.nn.functional.grouped_mm``, and a loop over the experts. Times are multiples of the floor,
saved bytes multiples of x + z: the input and what the first layer gives. Everything is measured in
turns; recipes are multiples of Ligature's bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import cpu_name, interleaved
from torch import Tensor
from torch.nn import functional

import ligature as te

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Size:
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T{self.tokens} H{self.hidden} I{self.inner} E{self.experts} K{self.top_k}"


SIZES = [
    Size(512, 256, 128, 32, 8),
    Size(512, 512, 1024, 8, 2),
    Size(2048, 512, 256, 64, 4),
    Size(64, 256, 256, 8, 2),
]
RECIPES: dict[str, Callable[[], Any]] = {
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "current": te.recipe.Float8CurrentScaling,
    "delayed": te.recipe.DelayedScaling,
    "block": te.recipe.Float8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}

Forward = Callable[[], Tensor]


class Block:
    """Inputs and weights of one size, and the ways to compute with them."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.size = size
        rows = size.tokens * size.top_k
        self.x = torch.randn(size.tokens, size.hidden, dtype=dtype, requires_grad=True)
        scores = torch.randn(size.tokens, size.experts).softmax(-1)
        probs, self.chosen = scores.topk(size.top_k)
        self.probs = probs.to(dtype).requires_grad_()
        self.grad = torch.randn(size.tokens, size.hidden, dtype=dtype)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, dtype=dtype) / shape[-1] ** 0.5).requires_grad_()

        self.w1 = weight(size.experts, 2 * size.inner, size.hidden)
        self.w2 = weight(size.experts, size.hidden, size.inner)
        self.rows1 = torch.randn(rows, size.hidden, dtype=dtype, requires_grad=True)
        self.rows2 = torch.randn(rows, size.inner, dtype=dtype, requires_grad=True)
        self.grad1 = torch.randn(rows, 2 * size.inner, dtype=dtype)
        self.grad2 = torch.randn(rows, size.hidden, dtype=dtype)
        self.experts = self._ligature()

    def leaves(self) -> list[Tensor]:
        return [self.x, self.probs, self.w1, self.w2]

    def run(self, forward: Forward) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), self.leaves(), self.grad)

    def floor(self) -> object:
        """The same FLOPs as six dense GEMMs."""
        w1, w2 = self.w1[0].detach().requires_grad_(), self.w2[0].detach().requires_grad_()
        y1 = functional.linear(self.rows1, w1)
        y2 = functional.linear(self.rows2, w2)
        return torch.autograd.grad(
            [y1, y2], [self.rows1, w1, self.rows2, w2], [self.grad1, self.grad2]
        )

    def _ligature(self) -> te.ops.Sequential:
        size = self.size
        kwargs: dict[str, Any] = {
            "bias": False,
            "single_grouped_weight": True,
            "dtype": self.x.dtype,
            "device": "cpu",
        }
        dispatch, combine = te.ops.Dispatch(size.experts), te.ops.Combine()
        first = te.ops.GroupedLinear(size.experts, size.hidden, 2 * size.inner, **kwargs)
        act = te.ops.ScaledSwiGLU()
        second = te.ops.GroupedLinear(size.experts, size.inner, size.hidden, **kwargs)
        for slot, channel in enumerate(("splits", "rows", "map")):
            dispatch.set_extra_output_channel(slot, channel, output_to_caller=False)
        first.set_extra_input_channel(0, "splits")
        act.set_extra_input_channel(0, "rows")
        second.set_extra_input_channel(0, "splits")
        combine.set_extra_input_channel(0, "map")
        first.weight = torch.nn.Parameter(self.w1.detach())
        second.weight = torch.nn.Parameter(self.w2.detach())
        self.w1, self.w2 = first.weight, second.weight
        return te.ops.Sequential(dispatch, first, act, second, combine)

    def ligature(self) -> Tensor:
        y: Tensor = self.experts(self.x, self.chosen, self.probs)
        return y

    def grouped_mm(self) -> Tensor:
        size = self.size
        flat = self.chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // size.top_k
        ends = flat.bincount(minlength=size.experts).cumsum(0).to(torch.int32)
        z = functional.grouped_mm(self.x[token], self.w1.transpose(1, 2), offs=ends)
        gate, up = z.chunk(2, dim=-1)
        a = functional.silu(gate) * up
        y = functional.grouped_mm(a, self.w2.transpose(1, 2), offs=ends)
        y = y * self.probs.flatten()[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return y[inverse].view(size.tokens, size.top_k, -1).sum(1)

    def loop(self) -> Tensor:
        out = torch.zeros_like(self.x)
        for expert in range(self.size.experts):
            token, slot = (self.chosen == expert).nonzero(as_tuple=True)
            z = functional.linear(self.x[token], self.w1[expert])
            gate, up = z.chunk(2, dim=-1)
            y = functional.linear(functional.silu(gate) * up, self.w2[expert])
            out = out.index_add(0, token, y * self.probs[token, slot, None])
        return out

    def saved(self, forward: Forward) -> float:
        """Bytes held for backward, parameters apart, as a multiple of x + z."""
        held: dict[int, int] = {}
        parameters = {t.untyped_storage().data_ptr() for t in (self.w1, self.w2)}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in parameters:
                held[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = forward()
        bytes_ = sum(held.values())
        del y
        size = self.size
        wide = size.hidden + 2 * size.inner * size.top_k
        return bytes_ / (size.tokens * wide * self.x.element_size())


def under(recipe: Any, forward: Forward) -> Forward:
    def run() -> Tensor:
        with te.autocast(recipe=recipe):
            return forward()

    return run


def measure(seconds: float, say: Callable[[str], object]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    say("\na block of experts, as a multiple of dense GEMMs of equal FLOPs; saved / (x + z)")
    say(f"{'':28} {'floor us':>9} {'ligature':>9} {'grouped_mm':>11} {'loop':>7} {'saved':>22}")
    for size in SIZES:
        for name, dtype in DTYPES.items():
            block = Block(size, dtype)
            ways = [block.ligature, block.grouped_mm, block.loop]
            wanted = block.loop()
            for way in ways[:2]:
                torch.testing.assert_close(way(), wanted, rtol=5e-2, atol=5e-2)
            runs = [block.floor, *map(block.run, ways)]
            floor, *times = interleaved(runs, "cpu", seconds)
            ratios = [t / floor for t in times]
            saved = [block.saved(way) for way in ways]
            say(
                f"{size!s:23} {name:4} {floor * 1e6:>9.0f} {ratios[0]:>9.2f} {ratios[1]:>11.2f} "
                f"{ratios[2]:>7.2f} " + "".join(f"{s:>8.2f}" for s in saved)
            )
            result.append(
                {
                    "size": str(size),
                    "dtype": name,
                    "floor": floor,
                    "ratios": ratios,
                    "saved": saved,
                }
            )
    say("\nrecipes, as a multiple of bfloat16")
    say(f"{'':28} " + " ".join(f"{name:>8}" for name in RECIPES))
    for size in SIZES:
        block = Block(size, torch.bfloat16)
        forwards = [under(make(), block.ligature) for make in RECIPES.values()]
        own, *times = interleaved(
            [block.run(block.ligature), *map(block.run, forwards)], "cpu", seconds
        )
        say(f"{size!s:28} " + " ".join(f"{t / own:>8.2f}" for t in times))
        result.append({"size": str(size), "recipes": [t / own for t in times]})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="per line")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{cpu_name()}, torch {torch.__version__}, {args.threads} threads")
    measure(args.seconds, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()

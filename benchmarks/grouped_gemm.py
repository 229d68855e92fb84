"""Times the grouped GEMMs of the CPU against torch's grouped_mm and one dense GEMM of equal FLOPs.

The first table has one grouped linear layer at a time, with all groups of the same size: forward
under no_grad, each of the two gradients alone, and forward with both. The second has the GEMMs of
whole blocks of experts, two layers with a gated activation between them that is not timed, whose
groups come from random routing. Ratios are to grouped_mm and to the dense GEMM; below 1.00 Ligature
is faster. Everything is measured in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from timing import Run, cpu_name, interleaved
from torch import Tensor
from torch.nn import functional

import ligature as te

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = [(256, 512), (512, 1024), (512, 256)]
SPLITS = [(8, 64), (16, 64), (32, 32), (64, 16), (128, 8)]
# tokens, hidden, inner, experts, top_k
BLOCKS = [(512, 256, 128, 32, 8), (512, 512, 1024, 8, 2), (2048, 512, 256, 64, 4)]

Linear = Callable[[Tensor], Tensor]


class Layer:
    """The GEMMs of one layer: ``forward`` of x, and gradients of what it gave."""

    def __init__(self, forward: Linear, x: Tensor, weight: Tensor) -> None:
        self.forward, self.x, self.weight = forward, x, weight
        self.y = forward(x)
        self.dy = torch.randn_like(self.y)

    def forward_only(self) -> object:
        with torch.no_grad():
            return self.forward(self.x)

    def grad(self, *of: Tensor) -> object:
        return torch.autograd.grad(self.y, of, self.dy, retain_graph=True)

    def all(self) -> object:
        return torch.autograd.grad(self.forward(self.x), (self.x, self.weight), self.dy)

    def kinds(self) -> dict[str, Run]:
        return {
            "forward": self.forward_only,
            "dx": lambda: self.grad(self.x),
            "dw": lambda: self.grad(self.weight),
            "all": self.all,
        }


def layers(sizes: Tensor, inputs: int, outputs: int, dtype: torch.dtype) -> list[Layer]:
    """Ligature's, grouped_mm, and the dense one."""
    groups, rows = len(sizes), int(sizes.sum())
    made = []
    ends = sizes.cumsum(0).to(torch.int32)
    x = torch.randn(rows, inputs, dtype=dtype, requires_grad=True)
    op: Any = te.ops.GroupedLinear(
        groups,
        inputs,
        outputs,
        bias=False,
        device="cpu",
        dtype=dtype,
        single_grouped_weight=True,
    )
    made.append(Layer(lambda x: op(x, sizes), x, op.weight))
    weight = op.weight.detach().clone().requires_grad_()
    made.append(
        Layer(
            lambda x: functional.grouped_mm(x, weight.transpose(1, 2), offs=ends),
            x.detach().clone().requires_grad_(),
            weight,
        )
    )
    dense = weight[0].detach().clone().requires_grad_()
    made.append(
        Layer(lambda x: functional.linear(x, dense), x.detach().clone().requires_grad_(), dense)
    )
    return made


def layer_table(seconds: float, quick: bool) -> None:
    print(f"{'':5} {'groups':>9} {'in x out':>10}", end="")
    for kind in ("forward", "dx", "dw", "all"):
        print(f" | {kind:>8} us  /grouped  /dense", end="")
    print()
    for name, dtype in DTYPES.items():
        for groups, size in SPLITS[:: 4 if quick else 1]:
            for inputs, outputs in LAYERS[: 1 if quick else None]:
                kinds = [
                    layer.kinds()
                    for layer in layers(torch.full((groups,), size), inputs, outputs, dtype)
                ]
                print(f"{name:5} {groups:>4} x {size:<3} {inputs:>4} x {outputs:<4}", end="")
                for kind in kinds[0]:
                    own, peer, dense = interleaved([k[kind] for k in kinds], "cpu", seconds)
                    print(f" | {own * 1e6:>11.0f} {own / peer:>9.2f} {own / dense:>7.2f}", end="")
                print(flush=True)


def block_table(seconds: float) -> None:
    print(f"\n{'':5} {'block':28} {'us':>8} /grouped  /dense")
    for name, dtype in DTYPES.items():
        for tokens, hidden, inner, experts, top_k in BLOCKS:
            torch.manual_seed(0)
            chosen = torch.randn(tokens, experts).topk(top_k).indices
            sizes = chosen.flatten().bincount(minlength=experts)
            first = layers(sizes, hidden, 2 * inner, dtype)
            second = layers(sizes, inner, hidden, dtype)

            def both(a: Layer, b: Layer) -> Run:
                return lambda: (a.all(), b.all())

            runs = [both(a, b) for a, b in zip(first, second, strict=True)]
            own, peer, dense = interleaved(runs, "cpu", seconds)
            block = f"T{tokens} H{hidden} I{inner} E{experts} K{top_k}"
            print(
                f"{name:5} {block:28} {own * 1e6:>8.0f} {own / peer:>8.2f} {own / dense:>7.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few sizes of the first table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{cpu_name()}, torch {torch.__version__}, {args.threads} threads")
    layer_table(args.seconds, args.quick)
    block_table(4 * args.seconds)


if __name__ == "__main__":
    main()

"""An MLP over the processes of torchrun, with its tokens spread too, against one process.

    torchrun --nproc-per-node 2 examples/python/tensor_parallel.py

Each rank has some of the tokens, half of the first linear's outputs and half of the second's
inputs. The first gathers the tokens of all ranks, the second adds up what the ranks have and gives
each its own tokens back.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import ligature as te

WIDTH, INNER, TOKENS, STEPS = 64, 256, 128, 10


def main() -> int:
    if "RANK" in os.environ:  # else this process is a group by itself
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)  # the same on every rank
    whole = te.ops.Sequential(
        te.ops.LayerNorm(WIDTH),
        te.ops.Linear(WIDTH, INNER),
        te.ops.GELU(),
        te.ops.Linear(INNER, WIDTH),
    )
    spread = te.ops.Sequential(
        te.ops.LayerNorm(WIDTH),
        # Sizes are those of the whole layer.
        te.ops.Linear(WIDTH, INNER, tensor_parallel_mode="column", sequence_parallel=True),
        te.ops.GELU(),
        te.ops.BasicLinear(INNER, WIDTH, tensor_parallel_mode="row", sequence_parallel=True),
        te.ops.Bias(WIDTH),  # one, added after the sum over the ranks
    )
    with torch.no_grad():
        for mine, all_of_it in zip(spread.parameters(), whole.parameters(), strict=True):
            mine.copy_(part(all_of_it, mine.shape, rank))

    models = whole, spread
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    furthest = 0.0
    for step in range(STEPS):
        x, target = torch.randn(2, TOKENS, WIDTH)
        loss = torch.nn.functional.mse_loss(whole(x), target)
        loss.backward()

        own = torch.nn.functional.mse_loss(spread(x.chunk(ranks)[rank]), target.chunk(ranks)[rank])
        (own / ranks).backward()  # the loss is the mean over all tokens
        # The norm and the last bias saw this rank's tokens alone.
        te.distributed.reduce_partial_grads(spread)

        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = own.detach() / ranks
        if ranks > 1:
            dist.all_reduce(total)
        furthest = max(furthest, abs(total - loss.detach()).item())
        if rank == 0:
            print(f"step {step + 1:2}  one process {loss:.6f}  {ranks} ranks {total:.6f}")

    for mine, all_of_it in zip(spread.parameters(), whole.parameters(), strict=True):
        difference = mine - part(all_of_it, mine.shape, rank)
        furthest = max(furthest, difference.abs().max().item())
    names = [item.name for item in te.distributed.partial_parameters(spread)]
    if rank == 0:
        print(f"\n{spread.explain()}")
        print(f"partial gradients: {', '.join(names) or 'none'}")
        print(f"furthest from one process: {furthest:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if furthest < 1e-5 else 1


def part(whole: torch.Tensor, sizes: torch.Size, rank: int) -> torch.Tensor:
    """The one of these sizes that a rank has: cut along the only dimension that differs."""
    for dim, size in enumerate(sizes):
        if size != whole.shape[dim]:
            return whole.narrow(dim, rank * size, size)
    return whole


if __name__ == "__main__":
    sys.exit(main())

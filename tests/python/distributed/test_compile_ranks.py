"""torch.compile, tracing and odd tensors with operations over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import ranks
from test_collectives import RECIPES
from test_tensor_parallel import data, mine, spread_mlp, whole_mlp

import ligature as te

IN_ONE_PROCESS = True


def compiled(recipe: str, sequence: bool) -> list[list[torch.Tensor]]:
    results = []
    for mode in ("eager", "compiled"):
        torch._dynamo.reset()
        mlp = spread_mlp(whole_mlp(torch.float32), sequence)
        run = torch.compile(mlp, fullgraph=True) if mode == "compiled" else mlp
        out: list[torch.Tensor] = []
        for step in range(3):
            mlp.zero_grad()
            x, dy = data(torch.float32, step)
            if sequence:
                x, dy = mine(x), mine(dy)
            x.requires_grad_()
            with te.autocast(enabled=bool(recipe), recipe=RECIPES[recipe]() if recipe else None):
                y = run(x)
            y.backward(dy)
            out += [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())]
        results.append(out)
    return results


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", ["", "current", "mxfp8"])
def test_compiled_steps_have_the_bits_of_eager_ones(recipe: str, sequence: bool) -> None:
    for eager, graph in ranks(2).run(compiled, recipe, sequence):
        assert len(eager) == len(graph) > 0
        for a, b in zip(eager, graph, strict=True):
            assert torch.equal(a, b)


def two_pipelines() -> list[torch.Tensor]:
    """Two that do not depend on each other: every rank runs them in one order."""
    torch._dynamo.reset()
    first, second = te.ops.Sequential(te.ops.AllReduce()), te.ops.Sequential(te.ops.AllGather())
    rank = torch.distributed.get_rank()

    @torch.compile(fullgraph=True)
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = first(x * 2)
        b = second(x + 1)
        return a, b, first(b)

    return [*both(torch.full((3, 2), float(rank)))]


def test_two_pipelines_in_one_graph() -> None:
    for a, b, c in ranks(2).run(two_pipelines):
        assert torch.equal(a, torch.full((3, 2), 2.0))
        assert torch.equal(b, torch.tensor([1.0, 2.0]).repeat_interleave(3)[:, None].expand(6, 2))
        assert torch.equal(c, 2 * b)


def exported() -> list[torch.Tensor]:
    model = te.ops.Sequential(te.ops.Identity(), te.ops.AllReduce())
    x = torch.ones(4, 3)
    program = torch.export.export(model, (x,))
    return [program.module()(x)]


def test_export() -> None:
    for (y,) in ranks(2).run(exported):
        assert torch.equal(y, torch.full((4, 3), 2.0))


def distributed_tensors() -> list[str]:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    messages = []
    ops: list[Any] = [
        te.ops.LayerNorm(8),
        te.ops.GELU(),
        te.ops.AllReduce(),
        te.ops.AllGather(),
        te.ops.Linear(8, 8, tensor_parallel_mode="column", sequence_parallel=True),
    ]
    for op in ops:
        try:
            op(x)
        except (TypeError, ValueError, RuntimeError) as error:
            messages.append(str(error))
        else:
            messages.append("nothing was raised")
    return messages


def test_distributed_tensors_are_refused() -> None:
    for messages in ranks(2).run(distributed_tensors):
        for message in messages:
            assert "DTensor" in message
            assert "to_local" in message


def counted() -> list[int]:
    from torch.utils.flop_counter import FlopCounterMode

    mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
    x = mine(data(torch.float32)[0])
    with FlopCounterMode(display=False) as counter:
        mlp(x).sum().backward()
    return [counter.get_total_flops()]


def test_flops_are_counted() -> None:
    """Each rank does half of every GEMM. The norm in front needs the gradient of its output."""
    for (flops,) in ranks(2).run(counted):
        assert flops == 2 * 64 * 64 * 128 * 2 * 3 // 2

"""Communication beside computation: the same bits, in the plan, and demanded by strict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import ranks
from test_collectives import RECIPES
from test_tensor_parallel import data, mine, spread_mlp, whole_mlp

import ligature as te

IN_ONE_PROCESS = True


def one_step(recipe: str, dtype: torch.dtype, calls: int = 1, **options: Any) -> list[Any]:
    te.distributed.configure(**options)
    try:
        mlp = spread_mlp(whole_mlp(dtype), sequence=True)
        out: list[Any] = []
        for step in range(calls):
            mlp.zero_grad()
            x, dy = (mine(t) for t in data(dtype, step))
            x.requires_grad_()
            with te.autocast(enabled=bool(recipe), recipe=RECIPES[recipe]() if recipe else None):
                y = mlp(x)
            y.backward(dy)
            out += [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())]
        return out
    finally:
        te.distributed.configure()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_pieces_change_no_bit(size: int, dtype: torch.dtype) -> None:
    """With four ranks sums are made in rank order, or else how they are cut decides their order."""
    options = {"reduction": "ordered"} if size > 2 else {}
    wanted = ranks(size).run(run_with, "", dtype, 1, {"overlap": False, **options})
    for pieces in (1, 2, 3, 8):
        got = ranks(size).run(run_with, "", dtype, 1, {"pieces": pieces, **options})
        for a, b in zip(wanted, got, strict=True):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert torch.equal(x, y), (pieces, i)


def run_with(recipe: str, dtype: torch.dtype, calls: int, options: dict[str, Any]) -> list[Any]:
    return one_step(recipe, dtype, calls, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_change_no_bit_in_low_precision(recipe: str) -> None:
    wanted = ranks(2).run(run_with, recipe, torch.float32, 2, {"overlap": False})
    for pieces in (2, 4):
        got = ranks(2).run(run_with, recipe, torch.float32, 2, {"pieces": pieces})
        for a, b in zip(wanted, got, strict=True):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert torch.equal(x, y), (pieces, i)


def test_the_model_learns_and_changes_no_bit() -> None:
    wanted = ranks(2).run(run_with, "", torch.float32, 5, {"overlap": False})
    got = ranks(2).run(run_with, "", torch.float32, 5, {})
    for a, b in zip(wanted, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def plan() -> tuple[str, Any, list[str]]:
    mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
    for step in range(4):
        x, dy = (mine(t) for t in data(torch.float32, step))
        mlp(x.requires_grad_()).backward(dy)
    explained = mlp.explain()
    return str(explained), explained.to_dict(), list(explained.fusions)


def test_the_plan_shows_it() -> None:
    text, data_, fusions = ranks(2).run(plan)[0]
    assert {"OverlapForwardLinear", "OverlapWeightGrads"} <= set(fusions)
    part = data_["parts"][0]
    transfers = part["communication"]
    told = [(t["direction"], t["collective"], t["format"]) for t in transfers]
    assert told.count(("forward", "all_gather", "float32")) == 1
    assert told.count(("forward", "reduce_scatter", "float32")) == 1
    assert told.count(("backward", "reduce_scatter", "float32")) == 1
    assert told.count(("backward", "all_gather", "float32")) == 2
    assert all(t["ranks"] == 2 and t["bytes"] > 0 and t["measured"] > 0 for t in transfers)
    assert all(0.0 <= t["hidden"] <= 1.0 for t in transfers)
    assert "communication" in text
    assert "predicted" in text
    assert "see one rank's tokens" in text


def order_of_kernels() -> list[str]:
    mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
    part = mlp.explain(mine(data(torch.float32)[0]).requires_grad_()).parts[0]
    step = next(s for s in part["backward"] if s["op"] == "OverlapWeightGrads")
    return [kernel["name"] for kernel in step["kernels"]]


def test_weight_gradients_of_both_linears_fill_the_wait() -> None:
    kernels = ranks(2).run(order_of_kernels)[0]
    began = kernels.index("reduce_scatter")
    awaited = kernels.index("await reduce_scatter")
    assert kernels[began:awaited].count("linear_weight_grad") == 2
    assert "linear_weight_grad" not in kernels[:began]
    assert kernels[0] == "all_gather"  # of the first linear's input, before anything else


def strictly(names: list[str], sequence: bool) -> str:
    mlp = spread_mlp(whole_mlp(torch.float32), sequence)
    x = data(torch.float32)[0]
    x = (mine(x) if sequence else x).requires_grad_()
    try:
        with te.strict(*names):
            mlp(x)
    except RuntimeError as error:
        return str(error)
    return ""


def test_strict_demands_it() -> None:
    names = ["OverlapForwardLinear", "OverlapBackwardLinear", "OverlapWeightGrads"]
    assert ranks(2).run(strictly, names, True) == ["", ""]
    for message in ranks(2).run(strictly, ["OverlapForwardLinear"], False):
        assert "OverlapForwardLinear" in message


def userbuffers() -> list[Any]:
    linear = te.ops.BasicLinear(
        64,
        32,
        tensor_parallel_mode="column",
        sequence_parallel=True,
        userbuffers_options={"comm_name": "fc1"},
    )
    bias = te.ops.Bias(32, tensor_parallel=True)
    model = te.ops.Sequential(linear, bias)
    x = mine(data(torch.float32)[0])
    y = model(x)
    wanted = torch.cat(list(data(torch.float32)[0].chunk(2))) @ linear.weight.T + bias.bias
    torch.testing.assert_close(y, wanted)
    (op, indices), *rest = model._module_groups[0]._forward_ops
    assert isinstance(op, te.ops.fused.UserbuffersForwardLinear)
    return [type(op).__name__, list(indices), len(rest)]


def test_userbuffers_options_ask_for_it() -> None:
    assert ranks(2).run(userbuffers) == [["OverlapForwardLinear", [0, 1], 0]] * 2


def test_no_ranks_no_overlap() -> None:
    text = str(te.ops.Sequential(te.ops.Linear(8, 8), te.ops.Linear(8, 8)).explain((4, 8)))
    assert "Overlap" not in text
    assert "communication" not in text


def row_linear(pieces: int | None) -> list[torch.Tensor]:
    te.distributed.configure(pieces=pieces, overlap=pieces is not None)
    try:
        torch.manual_seed(torch.distributed.get_rank())
        linear = te.ops.BasicLinear(64, 48, tensor_parallel_mode="row", sequence_parallel=True)
        model = te.ops.Sequential(linear, te.ops.Bias(48))
        x = torch.randn(128, 32, requires_grad=True)
        y = model(x)
        y.backward(torch.ones_like(y))
        assert "OverlapForwardLinear" in model.explain().fusions
        return [y.detach(), x.grad, linear.weight.grad]
    finally:
        te.distributed.configure()


def test_a_row_layer_scatters_in_pieces() -> None:
    wanted = ranks(2).run(row_linear, None)
    for pieces in (1, 2, 4):
        for a, b in zip(wanted, ranks(2).run(row_linear, pieces), strict=True):
            for x, y in zip(a, b, strict=True):
                assert torch.equal(x, y)


def ragged(recipe: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    weight, x, dy = torch.randn(64, 64), torch.randn(80, 64), torch.randn(80, 64)
    linear = te.ops.BasicLinear(64, 64, tensor_parallel_mode="column", sequence_parallel=True)
    with torch.no_grad():
        linear.weight.copy_(mine(weight))
    with te.autocast(recipe=RAGGED[recipe]()):
        y = linear(mine(x))
    y.backward(mine(dy, 1))
    return y.detach(), linear.weight.grad


RAGGED = {
    "mxfp8": lambda: te.recipe.MXFP8BlockScaling(),
    "nvfp4": lambda: te.recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True
    ),
}


@pytest.mark.parametrize("recipe", RAGGED)
def test_tokens_that_fill_no_blocks(recipe: str) -> None:
    """Column-wise blocks reach over ranks: they have the bits of one process all the same."""
    torch.manual_seed(0)
    weight, x, dy = torch.randn(64, 64), torch.randn(80, 64), torch.randn(80, 64)
    for rank, (y, dw) in enumerate(ranks(2).run(ragged, recipe, torch.float32)):
        half = te.ops.BasicLinear(64, 32)
        with torch.no_grad():
            half.weight.copy_(weight.chunk(2)[rank])
        with te.autocast(recipe=RAGGED[recipe]()):
            wanted = half(x)
        wanted.backward(dy.chunk(2, 1)[rank].contiguous())
        assert torch.equal(y, wanted)
        assert torch.equal(dw, half.weight.grad)

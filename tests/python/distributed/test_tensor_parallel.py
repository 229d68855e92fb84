"""Linear layers spread over ranks, against the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import ranks
from test_collectives import RECIPES

import ligature as te

IN_ONE_PROCESS = True
TOKENS, WIDE, HIDDEN = 64, 64, 128


def whole_mlp(dtype: torch.dtype, last_bias: bool = True) -> te.ops.Sequential:
    torch.manual_seed(3)
    mlp = te.ops.Sequential(
        te.ops.LayerNorm(WIDE),
        te.ops.Linear(WIDE, HIDDEN),
        te.ops.GELU(),
        te.ops.Linear(HIDDEN, WIDE, bias=last_bias),
    )
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return mlp.to(dtype)


def data(dtype: torch.dtype, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11 + step)
    x = torch.randn(TOKENS, WIDE, generator=generator)
    dy = torch.randn(TOKENS, WIDE, generator=generator)
    return x.to(dtype), dy.to(dtype)


def mine(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return t.chunk(size, dim)[rank].contiguous()


def spread_mlp(whole: te.ops.Sequential, sequence: bool, **options: Any) -> te.ops.Sequential:
    """The same over the ranks, with the parts of its parameters."""
    dtype = whole[1].weight.dtype
    common = {"sequence_parallel": sequence, "dtype": dtype, **options}
    mlp = te.ops.Sequential(
        te.ops.LayerNorm(WIDE, dtype=dtype),
        te.ops.Linear(WIDE, HIDDEN, tensor_parallel_mode="column", **common),
        te.ops.GELU(),
        te.ops.Linear(
            HIDDEN, WIDE, bias=whole[3].bias is not None, tensor_parallel_mode="row", **common
        ),
    )
    first = torch.distributed.get_rank() == 0
    with torch.no_grad():
        mlp[0].weight.copy_(whole[0].weight)
        mlp[0].bias.copy_(whole[0].bias)
        mlp[1].weight.copy_(mine(whole[1].weight))
        mlp[1].bias.copy_(mine(whole[1].bias))
        mlp[3].weight.copy_(mine(whole[3].weight, 1))
        if whole[3].bias is not None:
            mlp[3].bias.copy_(whole[3].bias if first else torch.zeros_like(whole[3].bias))
    return mlp


def run_spread(dtype: torch.dtype, sequence: bool, recipe: str, steps: int) -> Any:
    mlp = spread_mlp(whole_mlp(dtype), sequence)
    out = []
    for step in range(steps):
        x, dy = data(dtype, step)
        if sequence:
            x, dy = mine(x), mine(dy)
        x.requires_grad_()
        mlp.zero_grad()
        with te.autocast(enabled=bool(recipe), recipe=RECIPES[recipe]() if recipe else None):
            y = mlp(x)
        y.backward(dy)
        te.distributed.reduce_partial_grads(mlp)
        names = {name: p.grad.clone() for name, p in mlp.named_parameters()}
        out.append({"y": y.detach(), "dx": x.grad, **names})
    return out


def run_whole(dtype: torch.dtype, recipe: str, steps: int) -> Any:
    mlp = whole_mlp(dtype)
    out = []
    for step in range(steps):
        x, dy = data(dtype, step)
        x.requires_grad_()
        mlp.zero_grad()
        with te.autocast(enabled=bool(recipe), recipe=RECIPES[recipe]() if recipe else None):
            y = mlp(x)
        y.backward(dy)
        names = {name: p.grad.clone() for name, p in mlp.named_parameters()}
        out.append({"y": y.detach(), "dx": x.grad, **names})
    return out


def part_of(whole: dict[str, torch.Tensor], name: str, rank: int, size: int, sequence: bool) -> Any:
    value = whole[name]
    if name in ("y", "dx"):
        return value.chunk(size)[rank] if sequence else value
    if name in ("1.weight", "1.bias"):
        return value.chunk(size)[rank]
    return value.chunk(size, 1)[rank] if name == "3.weight" else value


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


LIMIT = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens spread"])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_an_mlp_in_high_precision(size: int, sequence: bool, dtype: torch.dtype) -> None:
    reference = run_whole(torch.float64, "", 2)
    for rank, steps in enumerate(ranks(size).run(run_spread, dtype, sequence, "", 2)):
        for got, whole in zip(steps, reference, strict=True):
            for name, value in got.items():
                wanted = part_of(whole, name, rank, size, sequence)
                assert value.shape == wanted.shape, name
                assert distance(value, wanted) < LIMIT[dtype], (rank, name)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens spread"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_in_low_precision(size: int, sequence: bool, recipe: str) -> None:
    """As near to float64 as one process is in the same recipe."""
    exact, one = run_whole(torch.float64, "", 3), run_whole(torch.float32, recipe, 3)
    for rank, steps in enumerate(ranks(size).run(run_spread, torch.float32, sequence, recipe, 3)):
        for step, (got, whole, single) in enumerate(zip(steps, exact, one, strict=True)):
            for name, value in got.items():
                wanted = part_of(whole, name, rank, size, sequence)
                limit = 1.3 * distance(part_of(single, name, rank, size, sequence), wanted) + 1e-3
                assert distance(value, wanted) < limit, (rank, step, name)


def column_forward(recipe: str, sequence: bool) -> torch.Tensor:
    whole = whole_mlp(torch.float32)
    mlp = spread_mlp(whole, sequence)
    x, _ = data(torch.float32)
    enabled = bool(recipe)
    with te.autocast(enabled=enabled, recipe=RECIPES[recipe]() if recipe else None):
        return te.ops.Sequential(mlp[0], mlp[1])(mine(x) if sequence else x).detach()


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens whole", "tokens spread"])
@pytest.mark.parametrize("recipe", ["", "delayed", "block", "mxfp8"])
def test_a_column_layer_has_the_bits_of_a_slice(recipe: str, sequence: bool) -> None:
    """Where no scale is of the whole weight. The norm before it quantizes its own tokens."""
    whole = whole_mlp(torch.float32)
    x, _ = data(torch.float32)
    with te.autocast(enabled=bool(recipe), recipe=RECIPES[recipe]() if recipe else None):
        wanted = te.ops.Sequential(whole[0], whole[1])(x).detach()
    for rank, got in enumerate(ranks(2).run(column_forward, recipe, sequence)):
        assert torch.equal(got, wanted.chunk(2, 1)[rank])


def shared_amax() -> tuple[float, torch.Tensor]:
    """An eager producer shares amax in the first step too."""
    mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
    x, _ = data(torch.float32)
    x = mine(x) * (1 + 5 * torch.distributed.get_rank())
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        y = te.ops.Sequential(te.ops.GELU(), mlp[1])(x)
    return float(x.detach().abs().max()), y.detach()


def test_an_eager_producer_shares_amax_in_the_first_step() -> None:
    whole = whole_mlp(torch.float32)
    x, _ = data(torch.float32)
    x = torch.cat([part * (1 + 5 * r) for r, part in enumerate(x.chunk(2))])
    weight = whole[1].weight.detach()
    wanted = te.ops.GELU()(x).double() @ weight.double().T + whole[1].bias.detach().double()
    for rank, (_, y) in enumerate(ranks(2).run(shared_amax)):
        assert distance(y, wanted.chunk(2, 1)[rank]) < 0.06


# -- attributes and errors


def message_of(make: Callable[[], Any]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def attributes() -> list[Any]:
    column = te.ops.BasicLinear(6, 8, tensor_parallel_mode="column", sequence_parallel=True)
    row = te.ops.Linear(8, 6, tensor_parallel_mode="row", sequence_parallel=True)
    summed = te.ops.Linear(8, 6, tensor_parallel_mode="row", bias=False)
    bias = te.ops.Bias(8, tensor_parallel=True)
    out: list[Any] = []
    for op in (column, row):
        out.append((op.tensor_parallel_mode, op.tensor_parallel_size, op.sequence_parallel))
        out.append((op.in_features, op.out_features, op.local_in_features, op.local_out_features))
    out.append([type(op).__name__ for op in row.basic_ops])
    out.append([type(op).__name__ for op in summed.basic_ops])
    out.append((tuple(bias.bias.shape), bias.size, bias.local_size))
    copied = copy.deepcopy(row)
    out.append((copied.tensor_parallel_mode, tuple(copied.weight.shape)))
    messages = []
    for make in (
        lambda: te.ops.Linear(6, 7, tensor_parallel_mode="column"),
        lambda: te.ops.BasicLinear(7, 6, tensor_parallel_mode="row"),
        lambda: te.ops.Linear(6, 6, tensor_parallel_mode="diagonal"),
        lambda: te.ops.Bias(7, tensor_parallel=True),
    ):
        messages.append(message_of(make))
    return [*out, messages]


def test_attributes_and_errors() -> None:
    for got in ranks(2).run(attributes):
        assert got[:8] == [
            ("column", 2, True),
            (6, 8, 6, 4),
            ("row", 2, True),
            (8, 6, 4, 6),
            ["BasicLinear", "Bias", "ReduceScatter"],
            ["BasicLinear", "AllReduce"],
            ((4,), 8, 4),
            ("row", (6, 4)),
        ]
        column, row, mode, bias = got[8]
        assert "[Linear] tensor_parallel_mode='column'" in column
        assert "out_features" in column and "got 7" in column  # noqa: PT018
        assert "[BasicLinear] tensor_parallel_mode='row'" in row
        assert "None, 'column' or 'row', got 'diagonal'" in mode
        assert "[Bias] size" in bias


def test_a_group_of_one_splits_nothing() -> None:
    linear = te.ops.Linear(4, 4, tensor_parallel_mode="column", sequence_parallel=True)
    assert linear.tensor_parallel_mode is None
    assert linear.tensor_parallel_group is None
    assert not linear.sequence_parallel
    assert linear.tensor_parallel_size == 1


def basic_row(sequence: bool) -> Any:
    """BasicLinear, the sum, Bias: Megatron's order, with one bias."""
    torch.manual_seed(0)
    weight, bias = torch.randn(8, 16), torch.randn(8)
    x, dy = torch.randn(4, 16), torch.randn(4, 8)
    size = torch.distributed.get_world_size()
    linear = te.ops.BasicLinear(16 // size, 8)
    collective = te.ops.ReduceScatter() if sequence else te.ops.AllReduce()
    whole = te.ops.BasicLinear(16, 8, tensor_parallel_mode="row", sequence_parallel=sequence)
    last = te.ops.Bias(8)
    with torch.no_grad():
        linear.weight.copy_(mine(weight, 1))
        whole.weight.copy_(mine(weight, 1))
        last.bias.copy_(bias)
    results = []
    for model in (
        te.ops.Sequential(linear, collective, last),
        te.ops.Sequential(whole, last),
    ):
        model.zero_grad()
        given = mine(x, 1).requires_grad_()
        y = model(given)
        y.backward(mine(dy) if sequence else dy)
        te.distributed.reduce_partial_grads(model)
        results.append([y.detach(), given.grad, model[0].weight.grad, last.bias.grad.clone()])
        marked = [p.name for p in te.distributed.partial_parameters(model)]
        assert marked == ([f"{len(model) - 1}.bias"] if sequence else [])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    return results[0]


@pytest.mark.parametrize("sequence", [False, True])
def test_a_row_layer_with_its_bias_after_the_sum(sequence: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(8, 16), torch.randn(8)
    x, dy = torch.randn(4, 16), torch.randn(4, 8)
    y = x @ weight.T + bias
    for rank, (got_y, dx, dw, db) in enumerate(ranks(2).run(basic_row, sequence)):
        torch.testing.assert_close(got_y, y.chunk(2)[rank] if sequence else y)
        torch.testing.assert_close(dx, (dy @ weight).chunk(2, 1)[rank])
        torch.testing.assert_close(dw, (dy.T @ x).chunk(2, 1)[rank])
        torch.testing.assert_close(db, dy.sum(0))


def partial(in_backward: bool) -> Any:
    te.distributed.configure(reduce_partial_grads=in_backward)
    try:
        mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
        x, dy = data(torch.float32)
        mlp(mine(x)).backward(mine(dy))
        names = [p.name for p in te.distributed.partial_parameters(mlp)]
        assert all(p.sequence_parallel for p in mlp[0].parameters())
        assert not getattr(mlp[1].weight, "sequence_parallel", False)
        if not in_backward:
            te.distributed.reduce_partial_grads(mlp)
        return names, mlp[0].weight.grad, mlp[0].bias.grad
    finally:
        te.distributed.configure()


def test_partial_gradients_are_known_and_added_up() -> None:
    whole = run_whole(torch.float64, "", 1)[0]
    by_hand, in_backward = ranks(2).run(partial, False), ranks(2).run(partial, True)
    for results in (by_hand, in_backward):
        for names, weight, bias in results:
            assert names == ["0.weight", "0.bias"]
            assert distance(weight, whole["0.weight"]) < 3e-6
            assert distance(bias, whole["0.bias"]) < 3e-6


def autograd_modes() -> None:
    mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
    x, dy = data(torch.float32)
    x, dy = mine(x).requires_grad_(), mine(dy)
    wanted = mlp(x)
    wanted.backward(dy, retain_graph=True)
    first = [p.grad.clone() for p in mlp.parameters()]
    wanted.backward(dy)
    for p, once in zip(mlp.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad, 2 * once)
    with torch.no_grad():
        assert torch.equal(mlp(x), wanted)
    with torch.inference_mode():
        assert torch.equal(mlp(x), wanted)
    for frozen in ("0.weight", "1.weight", "3.weight", "1.bias"):
        mlp.zero_grad()
        mlp.requires_grad_(True)
        dict(mlp.named_parameters())[frozen].requires_grad_(False)
        mlp(x.detach()).backward(dy)
        for (name, p), once in zip(mlp.named_parameters(), first, strict=True):
            if name == frozen:
                assert p.grad is None
            else:
                torch.testing.assert_close(p.grad, once)
    mlp.requires_grad_(True)
    mlp.zero_grad()
    y = te.checkpoint(mlp, x, use_reentrant=False)
    y.backward(dy)
    for p, once in zip(mlp.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad, once)


def test_autograd() -> None:
    ranks(2).run(autograd_modes)


def main_grad() -> None:
    whole = whole_mlp(torch.bfloat16)
    mlp = spread_mlp(whole, sequence=True, accumulate_into_main_grad=True)
    for linear in (mlp[1], mlp[3]):
        linear.weight.main_grad = torch.ones_like(linear.weight, dtype=torch.float32)
    x, dy = data(torch.bfloat16)
    mlp(mine(x)).backward(mine(dy))
    plain = spread_mlp(whole, sequence=True)
    plain(mine(x)).backward(mine(dy))
    for i in (1, 3):
        assert mlp[i].weight.grad is None
        torch.testing.assert_close(
            mlp[i].weight.main_grad - 1, plain[i].weight.grad.float(), rtol=2e-2, atol=2e-2
        )


def test_main_grad() -> None:
    ranks(2).run(main_grad)


def forked_initial_values() -> Any:
    rank = torch.distributed.get_rank()
    tracker = te.distributed.RNGStatesTracker()
    tracker.add("model-parallel-rng", 100 + rank)
    torch.manual_seed(5)
    options = {"tensor_parallel_mode": "column", "rng_state_tracker_function": lambda: tracker}
    apart = te.ops.Linear(16, 64, **options).weight.detach()
    same = te.ops.Linear(16, 64, tensor_parallel_mode="column").weight.detach()
    row = te.ops.BasicLinear(4096, 32, tensor_parallel_mode="row").weight.detach()
    bias = te.ops.Linear(64, 8, tensor_parallel_mode="row").bias.detach()
    return apart, same, row.abs().max().item() * 4096**0.5, bias


def test_initial_values() -> None:
    (apart0, same0, spread0, bias0), (apart1, same1, spread1, bias1) = ranks(2).run(
        forked_initial_values
    )
    assert not torch.equal(apart0, apart1)
    assert torch.equal(same0, same1)
    # Those of the whole layer, whatever the ranks.
    assert 0.9 < spread0 <= 1.0
    assert 0.9 < spread1 <= 1.0
    assert bias0.abs().max() > 0
    assert bias1.abs().max() == 0


def test_the_tracker_of_random_states() -> None:
    tracker = te.distributed.CudaRNGStatesTracker()
    with pytest.raises(KeyError, match="no state named"), tracker.fork():
        pass
    tracker.add("one", 1)
    for name, seed in (("two", 1), ("one", 2)):
        with pytest.raises(RuntimeError, match="already"):
            tracker.add(name, seed)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with tracker.fork("one"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(3), wanted)
    with tracker.fork("one"):
        second = torch.rand(2)
    assert not torch.equal(first, second)
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    assert set(tracker.get_states()) == {"one"}

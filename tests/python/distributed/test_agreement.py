"""Ranks that differ, come late or fail; delayed scaling over ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ranks import GROUP_TIMEOUT, RankError, Ranks, ranks
from test_tensor_parallel import data, mine, spread_mlp, whole_mlp

import ligature as te

IN_ONE_PROCESS = True


def message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def another_size() -> str:
    rank = torch.distributed.get_rank()
    linear = te.ops.BasicLinear(8, 16 + 16 * rank, tensor_parallel_mode="column")
    return message(linear, torch.ones(4, 8))


def another_input() -> str:
    rank = torch.distributed.get_rank()
    return message(te.ops.AllGather(), torch.ones(4 + rank, 8))


def another_dtype() -> str:
    rank = torch.distributed.get_rank()
    dtype = torch.float32 if rank == 0 else torch.bfloat16
    return message(te.ops.AllReduce(), torch.ones(4, 8, dtype=dtype))


def another_recipe() -> str:
    rank = torch.distributed.get_rank()
    recipe = te.recipe.MXFP8BlockScaling() if rank else te.recipe.Float8BlockScaling()
    linear = te.ops.BasicLinear(64, 64, tensor_parallel_mode="column", sequence_parallel=True)
    with te.autocast(recipe=recipe):
        return message(linear, torch.ones(64, 64))


def another_need() -> str:
    linear = te.ops.BasicLinear(8, 16, tensor_parallel_mode="column")
    linear.weight.requires_grad_(torch.distributed.get_rank() == 0)
    return message(linear, torch.ones(4, 8))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (another_size, ["operation 0, BasicLinear", "out_features=16", "out_features=32"]),
        (another_input, ["an input of [4, 8]", "an input of [5, 8]"]),
        (another_dtype, ["in float32", "in bfloat16"]),
        (another_recipe, ["the recipe Float8BlockScaling", "MXFP8BlockScaling"]),
        (another_need, ["that needs a gradient", "that needs none"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_ranks_that_differ(function: Any, words: list[str]) -> None:
    """The same error on every rank, before anything travels: the group still works."""
    first, second = ranks(2).run(function)
    assert first == second
    for word in ["rank 0 has", "rank 1 has", "Nothing was computed", *words]:
        assert word in first, first
    assert ranks(2).run(still_works) == [2.0, 2.0]


def still_works() -> float:
    return te.ops.AllReduce()(torch.ones(1)).item()


def check_always() -> list[str]:
    te.distributed.configure(check="always")
    try:
        op = te.ops.AllGather()
        rank = torch.distributed.get_rank()
        return [message(op, torch.ones(4, 8)), message(op, torch.ones(4 + rank, 8))]
    finally:
        te.distributed.configure()


def test_check_always_compares_every_call() -> None:
    for first, second in ranks(2).run(check_always):
        assert first == "nothing was raised"
        assert "an input of [5, 8]" in second


def late() -> str:
    te.distributed.configure(handshake_timeout=1.0)
    try:
        if torch.distributed.get_rank() == 1:
            return "did not come"
        return message(te.ops.AllReduce(), torch.ones(3, 5))
    finally:
        te.distributed.configure()


def test_a_rank_that_does_not_come() -> None:
    own = Ranks(2)  # not used for anything else afterwards
    try:
        first, _ = own.run(late)
        assert "rank 1 said nothing within 1 s" in first
        assert "[AllReduce]" in first
    finally:
        own.stop()


def dies() -> str:
    import os

    op = te.ops.AllReduce()
    op(torch.ones(2, 3))
    if torch.distributed.get_rank() == 1:
        time.sleep(0.5)
        os._exit(3)
    return message(op, torch.ones(2, 3)) + message(op, torch.ones(2, 3))


def test_a_rank_that_dies() -> None:
    own = Ranks(2)
    began = time.monotonic()
    try:
        with pytest.raises(RankError):
            own.run(dies)
    finally:
        own.stop()
    assert time.monotonic() - began < GROUP_TIMEOUT + 60


def dies_and_tells(path: str) -> None:
    from pathlib import Path

    rank = torch.distributed.get_rank()
    if rank == 0:
        Path(path).write_text(dies())
    else:
        dies()


def test_what_a_dead_peer_looks_like(tmp_path: Any) -> None:
    own = Ranks(2)
    path = tmp_path / "told"
    try:
        with pytest.raises(RankError):
            own.run(dies_and_tells, str(path))
        deadline = time.monotonic() + GROUP_TIMEOUT + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        text = path.read_text()
    finally:
        own.stop()
    for word in ("[AllReduce] all_reduce of [2, 3] Float", "rank 0", "cannot be used any more"):
        assert word in text, text


# -- delayed scaling


def scales(model: te.ops.Sequential) -> list[float]:
    ops = [op for module in model for op in getattr(module, "basic_ops", [module])]
    return [
        op.get_quantizer(mode, i).scale.item()
        for op in ops
        if isinstance(op, te.ops.BasicLinear)
        for mode, count in (("forward", 2), ("backward", 1))
        for i in range(count)
    ]


def unused_branch(steps: int) -> list[list[float]]:
    """Rank 1 leaves out a model in every other step."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    first = te.ops.Sequential(te.ops.Linear(8, 8), te.ops.GELU(), te.ops.Linear(8, 8))
    second = te.ops.Sequential(te.ops.Linear(8, 8), te.ops.Linear(8, 8))
    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    out = []
    for step in range(steps):
        torch.manual_seed(step * 2 + rank)
        x = torch.randn(4, 8)
        with te.autocast(recipe=recipe):
            y = first(x)
            if rank == 0 or step % 2 == 0:
                y = second(y)
        y.sum().backward()
        out.append(scales(first))
        if step % 2 == 0:
            out.append(scales(second))
    return out


def test_an_unused_branch_neither_hangs_nor_parts_the_scales() -> None:
    first, second = ranks(2).run(unused_branch, 4)
    assert first == second
    assert any(scale != 1.0 for scale in first[-1])


def nothing_met() -> float:
    """One rank has nothing in low precision in a step."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = te.ops.Sequential(te.ops.Linear(8, 8))
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(4, 8))
    with torch.no_grad(), te.autocast(recipe=te.recipe.DelayedScaling()):
        if rank == 1:
            model(torch.ones(4, 8))  # evaluation on one rank alone
    return still_works()


def test_a_rank_that_met_nothing_takes_part() -> None:
    assert ranks(2).run(nothing_met) == [2.0, 2.0]


def failed_step() -> list[list[float]]:
    mlp = spread_mlp(whole_mlp(torch.float32), sequence=True)
    recipe = te.recipe.DelayedScaling(amax_history_len=2)
    out = []
    for step in range(4):
        x, dy = (mine(t) for t in data(torch.float32, step))
        try:
            with te.autocast(recipe=recipe):
                y = mlp(x)
                if step == 2:
                    raise KeyError("a step that fails")
            y.backward(dy)
        except KeyError:
            pass
        out.append(scales(mlp))
    return out


def test_a_failed_step_changes_no_scale() -> None:
    for got in ranks(2).run(failed_step):
        assert got[2] == got[1]
        assert got[3] != got[2]

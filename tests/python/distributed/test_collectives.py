"""AllGather, AllReduce and ReduceScatter against what one process computes with all the parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import RankError, ranks

import ligature as te

IN_ONE_PROCESS = True
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def part(rank: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed * 97 + rank))
    return values.to(dtype) / 4


def run_op(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    op = getattr(te.ops, name)()
    x = part(rank, 1, *shape, dtype=dtype).requires_grad_()
    before = x.detach().clone()
    y = op(x)
    assert torch.equal(x, before), "the input was written to"
    dy = part(rank, 2, *y.shape, dtype=dtype)
    given = dy.clone()
    y.backward(dy)
    assert torch.equal(dy, given), "the gradient was written to"
    assert op.process_group is None
    assert op.process_group_size == size
    return {"y": y.detach(), "dx": x.grad}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(size: int, dtype: torch.dtype) -> None:
    shape = (8, 3, 5)
    xs = [part(r, 1, *shape, dtype=dtype) for r in range(size)]
    total = torch.stack([x.double() for x in xs]).sum(0).to(dtype)  # exact: small quarters

    results = ranks(size).run(run_op, "AllGather", shape, dtype)
    dys = [part(r, 2, 8 * size, 3, 5, dtype=dtype) for r in range(size)]
    dy = torch.stack([d.double() for d in dys]).sum(0).to(dtype)
    for r, result in enumerate(results):
        assert torch.equal(result["y"], torch.cat(xs))
        assert torch.equal(result["dx"], dy.chunk(size)[r])

    results = ranks(size).run(run_op, "AllReduce", shape, dtype)
    for r, result in enumerate(results):
        assert torch.equal(result["y"], total)
        assert torch.equal(result["dx"], part(r, 2, *shape, dtype=dtype))

    results = ranks(size).run(run_op, "ReduceScatter", shape, dtype)
    dys = [part(r, 2, 8 // size, 3, 5, dtype=dtype) for r in range(size)]
    for r, result in enumerate(results):
        assert torch.equal(result["y"], total.chunk(size)[r])
        assert torch.equal(result["dx"], torch.cat(dys))


@pytest.mark.parametrize("name", ["AllGather", "AllReduce", "ReduceScatter"])
def test_one_process_by_itself(name: str) -> None:
    op = getattr(te.ops, name)()
    x = torch.randn(4, 3, requires_grad=True)
    y = op(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 3))
    assert op.process_group_size == 1


def refused(shape: tuple[int, ...]) -> str:
    try:
        te.ops.ReduceScatter()(torch.ones(shape))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_what_cannot_be_shared_is_refused() -> None:
    for message in ranks(2).run(refused, (3, 4)):
        assert "[ReduceScatter] input" in message
        assert "2 ranks" in message
        assert "[3, 4]" in message


def of_subgroups() -> list[float]:
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.full((2,), float(rank))
    by_mesh = te.ops.AllReduce(mesh["tp"])(x)
    by_group = te.ops.AllReduce(mesh.get_group("dp"))(x)
    with pytest.raises(ValueError, match="one dimension"):
        te.ops.AllReduce(mesh)
    copied = copy.deepcopy(te.ops.Sequential(te.ops.AllReduce(mesh["tp"])))
    assert torch.equal(copied(x), by_mesh)
    return [by_mesh[0].item(), by_group[0].item()]


def test_groups_by_name() -> None:
    assert ranks(4).run(of_subgroups) == [[1.0, 2.0], [1.0, 4.0], [5.0, 2.0], [5.0, 4.0]]


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match=r"\[AllReduce\] process_group must be"):
        te.ops.AllReduce("tp")


def ordered(name: str, dtype: torch.dtype) -> torch.Tensor:
    te.distributed.configure(reduction="ordered")
    try:
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(8, 5, generator=generator).to(dtype)
        return getattr(te.ops, name)()(x)
    finally:
        te.distributed.configure()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordered_sums(dtype: torch.dtype) -> None:
    """In rank order, in float32, rounded once."""
    xs = [torch.randn(8, 5, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = xs[0].to(wide)
    for x in xs[1:]:
        total = total + x.to(wide)
    total = total.to(dtype)
    for r, y in enumerate(ranks(4).run(ordered, "AllReduce", dtype)):
        assert torch.equal(y, total), r
    for r, y in enumerate(ranks(4).run(ordered, "ReduceScatter", dtype)):
        assert torch.equal(y, total.chunk(4)[r])


# -- low precision

RECIPES = {
    "current": lambda: te.recipe.Float8CurrentScaling(),
    "delayed": lambda: te.recipe.DelayedScaling(amax_history_len=4),
    "block": lambda: te.recipe.Float8BlockScaling(),
    "mxfp8": lambda: te.recipe.MXFP8BlockScaling(),
    "nvfp4": lambda: te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def gathered_for_linear(recipe: str, rows: int) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    linear = te.ops.Linear(64, 32, bias=False)
    model = te.ops.Sequential(te.ops.AllGather(), linear)
    x = torch.randn(2 * rows, 64).chunk(2)[rank] * (1 + 3 * rank)
    with te.autocast(recipe=RECIPES[recipe]()), torch.no_grad():
        y = model(x)
    text = str(model.explain())
    return {"y": y, "text": text}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [32, 5])
def test_a_gather_before_a_quantized_linear(recipe: str, rows: int) -> None:
    """It quantizes, then gathers: the bits of one process that has all rows."""
    torch.manual_seed(0)
    linear = te.ops.Linear(64, 32, bias=False)
    x = torch.randn(2 * rows, 64)
    x[rows:] *= 4
    with te.autocast(recipe=RECIPES[recipe]()), torch.no_grad():
        wanted = linear(x)
    for result in ranks(2).run(gathered_for_linear, recipe, rows):
        assert torch.equal(result["y"], wanted)


def gathered_tensor(format: str, shared: bool) -> Any:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    x = torch.randn(64, 32).chunk(2)[rank] * (1 + 3 * rank)
    if format == "mxfp8":
        quantizer: Any = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    elif format == "nvfp4":
        quantizer = te.NVFP4Quantizer(te.DType.kFloat4E2M1, True, True)
    else:
        quantizer = te.Float8CurrentScalingQuantizer(
            te.DType.kFloat8E4M3,
            torch.device("cpu"),
            with_amax_reduction=shared,
            amax_reduction_group=torch.distributed.group.WORLD if shared else None,
        )
    q = quantizer(x)
    y = te.ops.AllGather()(q)
    assert isinstance(y, te.QuantizedTensor)
    return y.dequantize(), q.dequantize()


@pytest.mark.parametrize("format", ["mxfp8", "float8"])
def test_quantized_tensors_travel_as_they_are(format: str) -> None:
    results = ranks(2).run(gathered_tensor, format, True)
    together = torch.cat([own for _, own in results])
    for whole, _ in results:
        assert torch.equal(whole, together)


def test_different_scales_are_refused() -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(gathered_tensor, "float8", False)
    assert all("quantized with different scales" in (e or "") for e in error.value.errors)

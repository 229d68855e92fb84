"""A write into a quantized tensor loses no more than its format's rounding, whoever writes."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_reference import factor_for, state_of
from quantized_support import E4M3, E5M2, same_bits

import ligature as te
from ligature.common import recipe as recipes

RECIPES: dict[str, Callable[[], Any]] = {
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
    "delayed e5m2": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.E5M2),
    "delayed margin": lambda: recipes.DelayedScaling(margin=2),
    "delayed negative margin": lambda: recipes.DelayedScaling(margin=-3),
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
EVERY = pytest.mark.parametrize("name", RECIPES)
DELAYED = pytest.mark.parametrize("name", [name for name in RECIPES if "delayed" in name])


def linear(name: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    with te.quantized_model_init(recipe=RECIPES[name](), **kwargs):
        return te.ops.BasicLinear(64, 32, dtype=dtype)


def assert_holds(name: str, weight: Any, wanted: torch.Tensor) -> None:
    """Half a step of the element type, at each value and at the smallest there is."""
    wanted = wanted.detach().double()
    amax = wanted.abs().max()
    relative, least = 2.0**-4, 2.0**-17
    if "e5m2" in name:
        relative, least = 2.0**-3, 2.0**-30
    if "margin" in name:
        least *= 4
    if name == "nvfp4":
        relative, least = 0.0, 0.26  # of the largest value of a block, which is at most amax
    bound = wanted.abs() * (relative + 2**-7) + amax * least
    error = (weight.detach().dequantize().double() - wanted).abs()
    assert (error <= bound).all(), (error / amax).max()
    if name != "nvfp4":  # what is largest comes out as it went in
        got = weight.detach().dequantize().double().abs().max()
        assert (got / amax - 1).abs() < 2**-4 + 2**-7


# -- functions that write: each does the same to a plain tensor

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy_": lambda w: w.copy_(torch.linspace(-7, 5, w.numel()).view_as(w)),
    "copy_ of another dtype": lambda w: w.copy_(torch.arange(w.numel()).view_as(w)),
    "fill_": lambda w: w.fill_(3.0),
    "mul_": lambda w: w.mul_(20),
    "div_": lambda w: w.div_(1000),
    "add_": lambda w: w.add_(1),
    "init.uniform_": lambda w: torch.nn.init.uniform_(w, -9, 9),
    "init.constant_": lambda w: torch.nn.init.constant_(w, -2.5),
    "init.eye_": torch.nn.init.eye_,
    "out=": lambda w: torch.add(torch.full_like(w, 4.0), 2.0, out=w),
    "foreach": lambda w: torch._foreach_mul_([w, w.new_ones(3)], 30.0),
    "lerp_": lambda w: w.lerp_(torch.full_like(w, 50.0), 0.5),
    "detach": lambda w: w.detach().mul_(25),
    "data": lambda w: w.data.mul_(25),
    "a row": lambda w: w[0].fill_(12.0),
    "an element": lambda w: w[3].__setitem__(5, -40.0),
    "transposed": lambda w: w.t().mul_(15),
    "a view of its format": lambda w: w.view(4, 8, 64).add_(5),
    "a flat view": lambda w: w.view(-1)[:100].copy_(torch.linspace(0, 30, 100)),
    "a mask": lambda w: w.masked_fill_(w > 0, 8.0),
    "an index": lambda w: w.__setitem__((slice(None), [0, 3]), 6.0),
    "zero_ and fill_": lambda w: w.zero_().fill_(0.25),
    "clamp_": lambda w: w.mul_(100).clamp_(-3, 3),
}


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WRITES)
def test_functions_that_write(name: str, way: str, dtype: torch.dtype) -> None:
    weight = linear(name, dtype).weight
    wanted = weight.detach().dequantize()
    with torch.no_grad():
        torch.manual_seed(3)
        WRITES[way](weight)
        torch.manual_seed(3)
        WRITES[way](wanted)
    assert_holds(name, weight, wanted)


@EVERY
def test_the_spread_of_an_initialization(name: str) -> None:
    weight = linear(name).weight
    torch.nn.init.normal_(weight, std=1)
    assert 0.9 < weight.detach().dequantize().std() < 1.1


@EVERY
def test_data_and_quantize_(name: str) -> None:
    weight = linear(name).weight
    values = torch.linspace(-6, 4, weight.numel()).view_as(weight)
    weight.quantize_(values)
    assert_holds(name, weight, values)
    weight.data = values * 7
    assert_holds(name, weight, values * 7)
    assert isinstance(weight, te.QuantizedTensor)
    torch.nn.utils.vector_to_parameters(values.flatten() * 50, [weight])
    assert_holds(name, weight, values * 50)


@EVERY
def test_a_checkpoint_in_high_precision(name: str) -> None:
    model = linear(name)
    values = torch.linspace(-6, 4, 64 * 32).view(32, 64)
    model.load_state_dict({"weight": values})
    assert_holds(name, model.weight, values)
    model.load_state_dict({"weight": values * 30})
    assert_holds(name, model.weight, values * 30)


@DELAYED
def test_a_checkpoint_with_recipe_state(name: str) -> None:
    """The history of another weight says nothing about the values that come with it."""
    recipe = RECIPES[name]()
    source = te.ops.BasicLinear(64, 32)
    with te.autocast(recipe=recipe):
        source(torch.randn(8, 64))
    values = torch.linspace(-6, 4, 64 * 32).view(32, 64)
    model = linear(name)
    model.load_state_dict({**source.state_dict(), "weight": values})
    assert_holds(name, model.weight, values)


@EVERY
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=1.0, foreach=False),
        lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
        lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
    ],
)
def test_an_optimizer_that_grows_weights(name: str, make: Any) -> None:
    """By as much in every step, from the first one on."""
    weight = linear(name).weight
    with torch.no_grad():
        weight.fill_(0.01)
    optimizer = make([weight])
    for _ in range(12):
        weight.grad = torch.full((32, 64), -0.5)
        before = weight.detach().dequantize()
        optimizer.step()
        assert_holds(name, weight, before + 0.5)
    assert abs(weight.detach().dequantize().mean() / 6.0 - 1) < 0.07


def test_weights_grow_in_training() -> None:
    """With steps in between, which move the history on."""
    recipe = recipes.DelayedScaling()
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.BasicLinear(32, 32)
    with torch.no_grad():
        model.weight.fill_(0.04)
    wanted = 0.04
    for _ in range(12):
        with te.autocast(recipe=recipe):
            model(torch.randn(4, 32)).sum().backward()
        with torch.no_grad():
            model.weight.add_(0.05)
        wanted += 0.05
        got = model.weight.detach().dequantize()
        assert (got - wanted).abs().max() <= wanted / 100  # all are the largest
        model.weight.grad = None


# -- what delayed scaling learns of it


@DELAYED
def test_the_history_learns_what_a_step_computed_with(name: str) -> None:
    recipe = RECIPES[name]()
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.BasicLinear(64, 32)
    largest = 57344.0 if "e5m2" in name else 448.0
    with te.autocast(recipe=recipe):
        quantizer = model.get_quantizer("forward", 1)
    scale, amax, history = state_of(model)[0][1]
    assert (scale.item(), amax.item(), history.abs().max().item()) == (1, 0, 0)
    seen = []
    for value in (3.0, 0.001, 70.0):
        before = quantizer.scale.item()
        with torch.no_grad():
            model.weight.fill_(value * 5)  # nobody computes with it
            model.weight.fill_(value)
        assert quantizer.scale.item() == before
        assert state_of(model)[0][1][1] == 0
        with te.autocast(recipe=recipe):
            y = model(torch.ones(4, 64))
        if recipe.margin >= 0:  # otherwise the input is cut off, as its margin has it
            torch.testing.assert_close(y, torch.full((4, 32), 64 * value), rtol=1e-5, atol=0)
        seen.insert(0, value)
        scale, amax, history = state_of(model)[0][1]
        assert amax == 0
        torch.testing.assert_close(history[: len(seen)], torch.tensor(seen))
        wanted = largest / max(seen) / 2.0**recipe.margin
        torch.testing.assert_close(scale, torch.tensor([wanted]))
        assert torch.equal(quantizer.scale, scale)


def test_an_initial_weight_enters_the_history_with_the_first_step() -> None:
    model = linear("delayed")
    amax = model.weight.detach().dequantize().abs().max()
    with te.autocast(recipe=recipes.DelayedScaling(amax_history_len=4)):
        model(torch.randn(4, 64))
    scale, _, history = state_of(model)[0][1]
    torch.testing.assert_close(history, torch.tensor([amax, 0, 0, 0]))
    torch.testing.assert_close(scale.item(), 448 / amax.item())


def test_a_step_that_is_run_again_notes_nothing() -> None:
    recipe = RECIPES["delayed"]()
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.BasicLinear(64, 32)
    x = torch.randn(4, 64, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = te.checkpoint(model, x)
    before = str(state_of(model)[0])
    y.sum().backward()
    assert str(state_of(model)[0]) == before


def test_calibrating_and_a_weight_of_zeros() -> None:
    recipe = RECIPES["delayed"]()
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.BasicLinear(64, 32)
    with torch.no_grad():
        model.weight.fill_(0.5)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        model(torch.randn(4, 64))
    assert state_of(model)[0][1][2].tolist() == [0.5, 0, 0, 0]
    with torch.no_grad():
        model.weight.zero_()
    with te.autocast(recipe=recipe):
        assert not model(torch.randn(4, 64)).any()
    assert state_of(model)[0][1][2].tolist() == [0, 0.5, 0, 0]
    assert state_of(model)[0][1][0] == 448 / 0.5
    assert not model.weight.detach().dequantize().any()


def test_another_format_of_delayed_scaling_than_that_of_the_weight() -> None:
    """The weight is converted with a scale that holds it, whatever the history says."""
    model = linear("delayed")
    with torch.no_grad():
        model.weight.fill_(1000.0)
    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.E5M2)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = model(torch.ones(4, 64))
        torch.testing.assert_close(y, torch.full((4, 32), 64000.0))
        with torch.no_grad():
            model.weight.mul_(1000)
            model.weight.div_(1000)


# -- what cannot be held


@pytest.mark.parametrize("name", ["delayed", "delayed e5m2", "delayed margin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers_do_not_cost_the_others_any_bits(name, dtype) -> None:
    weight = linear(name, dtype).weight
    values = torch.linspace(-600, 900, 64 * 32).view(32, 64).to(dtype)
    for special in (math.inf, -math.inf, math.nan):
        given = values.clone()
        given[3, 7] = special
        with torch.no_grad():
            weight.copy_(given)
        got = weight.detach().dequantize()
        if math.isnan(special):
            assert got[3, 7].isnan()
        else:  # the largest number there is
            largest = got.masked_fill(given.isinf(), 0).abs().max() * (4 if "margin" in name else 1)
            assert got[3, 7] == math.copysign(largest, special)
        given[3, 7], got[3, 7] = 0, 0
        assert_holds(name, wrapped(got), given)
    with torch.no_grad():
        weight.fill_(math.inf)
        assert weight.detach().dequantize().isfinite().all()
        weight.copy_(values)
    assert_holds(name, weight, values)


class wrapped:  # noqa: N801 - stands for a tensor
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def detach(self) -> wrapped:
        return self

    def dequantize(self) -> torch.Tensor:
        return self.values


@DELAYED
@pytest.mark.parametrize("value", [1e-39, 1e-30, 1e30, 3e38])
def test_very_small_and_very_large_values(name: str, value: float) -> None:
    weight = linear(name).weight
    with torch.no_grad():
        weight.fill_(value)
    got = weight.detach().dequantize().double()
    assert (got / torch.full_like(got, value, dtype=torch.float32) - 1).abs().max() <= 2**-3


def test_what_is_there_already_stays_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = linear("delayed", dtype).weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1)
            weight.copy_(weight.detach().dequantize())
            weight[0].add_(0)
        assert torch.equal(weight.detach().dequantize(), before.dequantize())


# -- quantizers of the user's


def test_a_scale_of_the_users_holds_for_what_the_quantizer_is_asked() -> None:
    scale, amax = torch.ones(1), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    q = quantizer(torch.full((16, 32), 1000.0))
    assert (q.dequantize() == 448).all()
    assert amax == 1000
    quantizer.update_quantized(torch.full((16, 32), 2000.0), q)
    assert (q.dequantize() == 448).all()
    assert amax == 2000
    q.copy_(torch.full((16, 32), 3000.0))  # a write
    torch.testing.assert_close(q.dequantize(), torch.full((16, 32), 3000.0))
    assert amax == 2000
    assert scale == 1


def test_the_recipes_quantizer_writes_without_loss() -> None:
    """Optimizers of Megatron's kind write their own weights that way."""
    model = linear("delayed")
    values = torch.linspace(-6, 4, 64 * 32).view(32, 64)
    quantizer = model.weight._quantizer
    quantizer.update_quantized(values, model.weight)
    assert_holds("delayed", model.weight, values)
    assert_holds("delayed", quantizer.quantize(values * 9, out=model.weight), values * 9)
    assert state_of(model)[0][1][0] == 1
    assert state_of(model)[0][1][1] == 0


def test_the_same_bits_as_a_quantizer_with_that_scale() -> None:
    for element, largest in ((E4M3, 448), (E5M2, 57344)):
        q = te.Float8Quantizer(torch.ones(1), torch.zeros(1), element)(torch.zeros(33, 65))
        values = torch.randn(33, 65) * 50
        q.copy_(values)
        scale = torch.tensor([factor_for(largest, values)])
        assert same_bits(q, te.Float8Quantizer(scale, torch.zeros(1), element)(values))


def test_copies_keep_their_scales() -> None:
    model = linear("delayed")
    with torch.no_grad():
        model.weight.mul_(40)
    for twin in (copy.deepcopy(model), copy.copy(model)):
        assert same_bits(twin.weight, model.weight)
    twin = linear("delayed")
    with torch.no_grad():
        twin.weight.copy_(model.weight)
    assert same_bits(twin.weight, model.weight)
    twin.load_state_dict(model.state_dict())
    assert same_bits(twin.weight, model.weight)
    with torch.no_grad():
        twin.weight.mul_(40)
    assert_holds("delayed", twin.weight, 40 * model.weight.detach().dequantize())


PROCESSES = """
    import sys, torch, ligature as te, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    recipe = te.recipe.DelayedScaling()
    wanted = torch.linspace(-9, 9, 64 * 64).view(64, 64)

    def build():
        with te.quantized_model_init(recipe=recipe):
            return te.ops.Linear(64, 64, device="cpu")

    model = build()
    with torch.no_grad():
        if rank == 0:
            model.weight.copy_(wanted)
    parallel = torch.nn.parallel.DistributedDataParallel(model)  # sends the weights of rank 0
    error = (model.weight.detach().dequantize() - wanted).abs()
    assert (error <= wanted.abs() / 14 + 1e-4).all(), error.max()
    with te.autocast(recipe=recipe):
        parallel(torch.randn(4, 64)).sum().backward()

    model = fully_shard(te.ops.Sequential(build()))
    with torch.no_grad():
        model[0].weight.to_local().fill_(7.0)
        model[0].bias.to_local().zero_()
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = model(torch.ones(4, 64))
        torch.testing.assert_close(y, torch.full((4, 64), 448.0))
    dist.destroy_process_group()
    print("good")
"""


def test_what_other_processes_send(tmp_path, device: str) -> None:
    """The first weights under DDP, and those that FSDP2 gathers for a step."""
    if device != "cpu":
        pytest.skip("gloo has the CPU's tensors")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESSES), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert out.strip() == "good", err[-3000:]

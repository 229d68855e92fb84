"""Steps of training under recipes: weights that change, gradients that add up, graphs that run
again, copies and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_reference import (
    RECIPES,
    SOME_RECIPES,
    LinearRecipe,
    assert_product,
    columnwise,
    distance,
    is_stochastic,
    next_seed,
    rowwise,
)

import ligature as te
from ligature.common.recipe import DelayedScaling, Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
ops = te.ops

EVERY = pytest.mark.parametrize("name", RECIPES)
SOME = pytest.mark.parametrize("name", SOME_RECIPES)


def call(model: Any, recipe: Recipe, *inputs: Tensor) -> Tensor:
    with te.autocast(recipe=recipe):
        return model(*inputs)


def mlp(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return ops.Sequential(
        ops.LayerNorm(32, dtype=dtype),
        ops.Linear(32, 96, dtype=dtype, **options),
        ops.SwiGLU(),
        ops.Linear(48, 32, dtype=dtype, **options),
    )


def gradients(model: Any, recipe: Recipe, x: Tensor, seed: int = 5) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = call(model, recipe, leaf)
    torch.manual_seed(seed)
    y.backward(torch.ones_like(y))
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"{k}: off by {distance(a, b):.2g}"


# -- main_grad


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_main_grad_adds_up(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES[name]()
    linear = ops.BasicLinear(40, 24, dtype=dtype, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.full_like(linear.weight, 0.25, dtype=torch.float32).detach()
    wanted = linear.weight.main_grad.double()
    state = LinearRecipe(recipe)
    for step in range(3):
        linear.weight.overwrite_main_grad = step == 2
        x, dy = torch.randn(21, 40).to(dtype), torch.randn(21, 24).to(dtype)
        y = call(linear, recipe, x)
        torch.manual_seed(step)
        y.backward(dy)
        w64 = linear.weight.detach().double().requires_grad_()
        y64 = state.product(x.double(), w64, dtype)
        state.update("input", "weight")
        torch.manual_seed(step)
        y64.backward(dy.double())
        state.update("grad_output")
        wanted = w64.grad if step == 2 else wanted + w64.grad
        assert linear.weight.grad is None
        assert_product(linear.weight.main_grad, wanted, torch.float32, f"step {step}", recipe)


@SOME
def test_main_grad_of_a_block(name: str) -> None:
    """The sum of what each microbatch gives by itself."""
    recipe = RECIPES[name]()
    model = mlp(accumulate_into_main_grad=True)
    other = mlp()
    other.load_state_dict(model.state_dict())
    linears = [1, 3]
    for k in linears:
        model[k].weight.main_grad = torch.zeros_like(model[k].weight).detach()
    wanted = {k: torch.zeros(model[k].weight.shape) for k in linears}
    for _ in range(2):
        x = torch.randn(17, 32)
        gradients(model, recipe, x)
        gradients(other, recipe, x)
        for k in linears:
            wanted[k] += other[k].weight.grad
    for k in linears:
        assert distance(model[k].weight.main_grad, wanted[k]) < 1e-6


# -- torch.autocast


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast(name: str, dtype: torch.dtype, device: str) -> None:
    """Operands are rounded to autocast's dtype, weights are quantized from what they are."""
    recipe = RECIPES[name]()
    linear = ops.Linear(48, 40, bias=False)
    state = LinearRecipe(recipe)
    for step in range(2):
        x = torch.randn(24, 48).requires_grad_()
        linear.zero_grad()
        with torch.autocast(device, dtype):
            y = call(linear, recipe, x)
        dy = torch.randn(24, 40).to(dtype)
        torch.manual_seed(step)
        y.backward(dy)
        x64 = x.detach().double().requires_grad_()
        w64 = linear.weight.detach().double().requires_grad_()
        y64 = state.product(x64, w64, dtype)
        state.update("input", "weight")
        torch.manual_seed(step)
        y64.backward(dy.double())
        state.update("grad_output")
        assert_product(y, y64, dtype, "y", recipe)
        for got, wanted in ((x.grad, x64.grad), (linear.weight.grad, w64.grad)):
            assert got is not None
            assert got.dtype == torch.float32
            assert_product(got.to(dtype), wanted, dtype, "gradient", recipe)


@SOME
def test_torch_autocast_and_a_block(name: str, device: str) -> None:
    """The same as a block in bfloat16, up to what its parameters were rounded by."""
    recipe = RECIPES[name]()
    model, x = mlp(), torch.randn(40, 32)
    twin = copy.deepcopy(model).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        got = gradients(model, recipe, x)
    wanted = gradients(twin, recipe, x.bfloat16())
    assert got[0].dtype == torch.bfloat16
    for a, b in zip(got, wanted, strict=True):
        assert distance(a, b) < 0.25


# -- weights that change


def replace_parameter(linear: Any) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 1.5)


def in_place(linear: Any) -> None:
    with torch.no_grad():
        linear.weight.mul_(1.5)


def through_data(linear: Any) -> None:
    linear.weight.data.mul_(1.5)


def one_value_through_data(linear: Any) -> None:
    linear.weight.data[7, 9] += 3.0


def other_data(linear: Any) -> None:
    linear.weight.data = linear.weight.data * 1.5


def foreign(linear: Any) -> Any:
    """The weight's memory as another library sees it; NumPy has none for a GPU's."""
    weight = linear.weight.detach()
    return weight.numpy() if weight.is_cpu else torch.from_dlpack(weight)


def through_numpy(linear: Any) -> None:
    foreign(linear)[3] *= 2.0


def one_value_through_numpy(linear: Any) -> None:
    foreign(linear)[5, 11] += 4.0


def load(linear: Any) -> None:
    state = linear.state_dict()
    linear.load_state_dict({**state, "weight": 1.5 * state["weight"]})


def vector(linear: Any) -> None:
    flat = torch.nn.utils.parameters_to_vector(linear.parameters())
    torch.nn.utils.vector_to_parameters(flat * 1.5, linear.parameters())


def old_memory(linear: Any) -> None:
    """Other values in the same memory, and a version that a new parameter has, too."""
    data = linear.weight.data
    data.mul_(1.5)
    linear.weight = torch.nn.Parameter(data)


def optimizer(kind: str, **options: Any) -> Callable[[Any], None]:
    def change(linear: Any) -> None:
        for parameter in linear.parameters():
            parameter.grad = torch.ones_like(parameter)
        getattr(torch.optim, kind)(linear.parameters(), lr=0.1, **options).step()

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "a new parameter": replace_parameter,
    "in place": in_place,
    "through .data": through_data,
    "one value through .data": one_value_through_data,
    "new .data": other_data,
    "through numpy": through_numpy,
    "one value through numpy": one_value_through_numpy,
    "load_state_dict": load,
    "vector_to_parameters": vector,
    "a new parameter in old memory": old_memory,
    "SGD": optimizer("SGD"),
    "SGD foreach": optimizer("SGD", foreach=True),
    "Adam": optimizer("Adam"),
    "AdamW fused": optimizer("AdamW", fused=True),
}
#: What torch does not count: on a GPU, whose memory is not looked at, it has to be told.
UNSEEN_ON_CUDA = {
    "through .data",
    "one value through .data",
    "through numpy",
    "one value through numpy",
}


@SOME
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_weight_is_quantized_anew(what: str, name: str, device: str) -> None:
    """Between microbatches, whatever changed it; also one that is not contiguous."""
    for strided in (False, True):
        if strided and what == "vector_to_parameters":
            continue  # which asks for contiguous ones
        recipe = RECIPES[name]()
        linear = ops.Linear(48, 40, bias=False)
        if strided:
            linear.weight.data = linear.weight.detach().t().contiguous().t()
        state = LinearRecipe(recipe)
        f = state.formats
        x, ones = torch.randn(24, 48).requires_grad_(), torch.ones(24, 40)
        for step in range(4):
            if step in (1, 3):
                CHANGES[what](linear)
                if device == "cuda" and what in UNSEEN_ON_CUDA:
                    te.quantization.note_weights_changed()
            y = call(linear, recipe, x)
            (dx,) = torch.autograd.grad(y, [x], ones)
            w, at = linear.weight.detach(), f"{'strided ' if strided else ''}step {step}"
            scales = {role: state.scale(role) for role in f}
            for role, value in (("input", x.detach()), ("weight", w), ("grad_output", ones)):
                state.note(role, value)
            state.update(*f)
            wanted = rowwise(x.detach(), f["input"], scales["input"])
            wanted = wanted @ rowwise(w, f["weight"], scales["weight"]).t()
            assert_product(y, wanted, torch.float32, f"y of {at}", recipe)
            if not is_stochastic(recipe):
                wanted = rowwise(ones, f["grad_output"], scales["grad_output"])
                wanted = wanted @ columnwise(w, f["weight"], scales["weight"]).t()
                assert_product(dx, wanted, torch.float32, f"dx of {at}", recipe)


@pytest.mark.parametrize("fused", [True, False])
def test_small_steps_of_an_optimizer(fused: bool) -> None:
    """A few values of a large bfloat16 weight change, and no version of it by a fused step."""
    recipe = RECIPES["current"]()
    linear = ops.BasicLinear(256, 256, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-6, weight_decay=0.0, fused=fused)
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    for _ in range(4):
        call(linear, recipe, x)
        before = linear.weight.detach().clone()
        linear.weight.grad = torch.randn_like(linear.weight)
        optimizer.step()
        assert 0 < (linear.weight != before).sum() < 1000
        fresh = ops.BasicLinear(256, 256, dtype=torch.bfloat16)
        with torch.no_grad():
            fresh.weight.copy_(linear.weight)
        assert torch.equal(call(linear, recipe, x), call(fresh, recipe, x))


@SOME
def test_a_weight_is_quantized_once_while_it_stays(name: str) -> None:
    """What is saved of it is one memory."""
    recipe = RECIPES[name]()
    linear = ops.BasicLinear(48, 40)
    x = torch.randn(24, 48)
    held = []
    for _ in range(4):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=saved: to.append(t) or t, lambda t: t
        ):
            call(linear, recipe, x.clone().requires_grad_())
        held.append([t for t in saved if t.dtype == torch.uint8][-2 if name == "nvfp4" else -1])
    assert held[-1].data_ptr() == held[-2].data_ptr()
    if not isinstance(recipe, DelayedScaling):
        assert held[0].data_ptr() == held[-1].data_ptr()


@SOME
def test_without_gradients_first(name: str) -> None:
    """What an evaluation made is of use, or no hindrance, in training."""
    for mode in (torch.inference_mode, torch.no_grad):
        recipe = RECIPES[name]()
        model, x = mlp(), torch.randn(24, 32)
        twin = copy.deepcopy(model)
        with mode(), te.autocast(recipe=recipe):
            y = model(x.clone())
        with torch.no_grad(), te.autocast(recipe=recipe):
            assert torch.equal(twin(x.clone()), y)
        for _ in range(2):
            assert_equal(gradients(model, recipe, x), gradients(twin, recipe, x))


def test_what_backward_reads_is_of_its_forward() -> None:
    """A weight may change between forward and backward: backward has the one of forward."""
    recipe = RECIPES["mxfp8"]()
    linear = ops.BasicLinear(48, 40)
    x = torch.randn(24, 48).requires_grad_()
    y = call(linear, recipe, x)
    (wanted,) = torch.autograd.grad(y, [x], torch.ones_like(y), retain_graph=True)
    linear.weight.data.mul_(2)
    call(linear, recipe, x)
    (got,) = torch.autograd.grad(y, [x], torch.ones_like(y))
    assert torch.equal(got, wanted)


# -- graphs that run again


@EVERY
def test_a_retained_graph(name: str) -> None:
    recipe = RECIPES[name]()
    model, x = mlp(), torch.randn(24, 32).requires_grad_()
    y = call(model, recipe, x)
    leaves = [x, *model.parameters()]
    runs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        runs.append(torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True))
    if isinstance(recipe, DelayedScaling):
        # The first has factors of 1, later ones those of the pass before.
        assert all(distance(a, b) < 0.1 for a, b in zip(*runs[1:], strict=True))
        return
    first, second, third = runs
    assert_equal(list(first), list(third))
    if is_stochastic(recipe):
        assert not torch.equal(first[0], second[0])
    else:
        assert_equal(list(first), list(second))


@EVERY
def test_a_deep_copy(name: str) -> None:
    """With the factors so far, and apart from then on."""
    recipe = RECIPES[name]()
    model, x = mlp(torch.bfloat16), torch.randn(24, 32, dtype=torch.bfloat16)
    gradients(model, recipe, x)
    twin = copy.deepcopy(model)
    assert_equal(gradients(twin, recipe, x), gradients(model, recipe, x))
    with torch.no_grad():
        twin[1].weight.mul_(2)
    assert not torch.equal(call(twin, recipe, x), call(model, recipe, x))
    before = call(model, recipe, x)
    for _ in range(2):
        gradients(twin, recipe, 100 * x)
    assert torch.equal(call(model, recipe, x), before)


class _Checkpointed(torch.nn.Module):
    def __init__(self, model: Any, reentrant: bool) -> None:
        super().__init__()
        self.model = model
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return te.checkpoint(self.model, x, use_reentrant=self.reentrant)


@EVERY
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_no_checkpoints(name: str, reentrant: bool) -> None:
    recipe = RECIPES[name]()
    model, x = mlp(), torch.randn(24, 32)
    twin = copy.deepcopy(model)
    for _ in range(2):
        got = gradients(_Checkpointed(model, reentrant), recipe, x)
        assert_equal(got, gradients(twin, recipe, x))


@EVERY
def test_recompute_cheap_is_no_recompute(name: str) -> None:
    """Also when gradients add up over microbatches of one context."""
    recipe = RECIPES[name]()
    plain = mlp()
    cheap = ops.Sequential(*copy.deepcopy(plain), recompute="cheap")
    batches = torch.randn(2, 24, 32)

    def run(model: Any) -> list[Tensor]:
        leaf = batches.clone().requires_grad_()
        model.zero_grad()
        with te.autocast(recipe=recipe):
            outputs = [model(part) for part in leaf]
        for k, y in enumerate(outputs):
            torch.manual_seed(k)
            y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        return [*outputs, leaf.grad, *(p.grad for p in model.parameters())]

    for _ in range(2):
        for a, b in zip(run(cheap), run(plain), strict=True):
            assert distance(a, b) < 1e-6


def test_seeds_are_those_of_torchs_generator() -> None:
    """One draw of 64 bits per gradient, whatever is needed of it."""
    recipe = RECIPES["nvfp4"]()
    linear, x = ops.BasicLinear(48, 40), torch.randn(24, 48).requires_grad_()
    y = call(linear, recipe, x)
    for leaves in ([x], [linear.weight], [x, linear.weight]):
        torch.manual_seed(3)
        torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        next_seed()
        assert torch.equal(torch.get_rng_state(), after)

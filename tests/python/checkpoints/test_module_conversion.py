"""Models with quantized weights and recipe state: converted, without memory, in other processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from delayed_reference import recipe_state
from quantized_support import same_bits

import ligature as te
from ligature.common import recipe as recipes

RECIPES = {
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Any:
    return RECIPES[request.param]()


def make(recipe: Any = None, **where: Any) -> te.ops.Sequential:
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return te.ops.Sequential(
            te.ops.LayerNorm(32, **where),
            te.ops.Linear(32, 64, **where),
            te.ops.GELU(),
            te.ops.BasicLinear(64, 32, **where),
        )


def train(model: torch.nn.Module, recipe: Any) -> Any:
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = model(torch.randn(16, 32))
        y.square().sum().backward()
    return model


def weights(model: Any) -> list[Any]:
    return [model[1].weight, model[3].weight]


# -- conversions


@pytest.fixture(params=["in place", "swapped", "overwritten"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    setters = {
        "swapped": torch.__future__.set_swap_module_params_on_conversion,
        "overwritten": torch.__future__.set_overwrite_module_params_on_conversion,
    }
    setter = setters.get(request.param, lambda flag: None)
    setter(True)
    yield
    setter(False)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", ["method", "to"])
@pytest.mark.parametrize("dtype", ["half", "bfloat16", "float"])
def test_dtypes_that_low_precision_stands_for(
    recipe: Any, called: bool, how: str, dtype: str
) -> None:
    model = make(recipe)
    if called:
        train(model, recipe)
    before = [copy.deepcopy(w.detach()) for w in weights(model)]
    wanted = getattr(torch, dtype)
    getattr(model, dtype)() if how == "method" else model.to(wanted)
    assert {p.dtype for p in model.parameters()} == {wanted}
    for weight, old in zip(weights(model), before, strict=True):
        assert isinstance(weight, te.QuantizedTensor)
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.requires_grad
        assert same_bits(weight, old)
        assert weight.grad is None or weight.grad.dtype == wanted
        assert (weight.grad is not None) == called
    with te.autocast(recipe=recipe):
        model(torch.randn(4, 32, dtype=wanted)).sum().backward()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("convert", [lambda m: m.double(), lambda m: m.to(torch.float64)])
def test_float64_is_plain(recipe: Any, called: bool, convert: Any) -> None:
    """Low precision cannot stand for it: every parameter becomes float64, none is left behind."""
    model = make(recipe)
    if called:
        train(model, recipe)
    values = [w.detach().dequantize() for w in weights(model)]
    grads = [None if w.grad is None else w.grad.clone() for w in weights(model)]
    names = list(model.state_dict())
    convert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    for weight, value, grad in zip(weights(model), values, grads, strict=True):
        assert type(weight) is torch.nn.Parameter
        assert weight.requires_grad
        assert torch.equal(weight.detach(), value.double())
        assert (weight.grad is None) == (grad is None)
        assert grad is None or torch.equal(weight.grad, grad.double())
    assert [n for n, _ in model.named_parameters()] == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "3.weight")
    ]
    assert len(names) >= len(list(model.state_dict()))
    x = torch.randn(4, 32, dtype=torch.float64)
    y = model(x)
    h = torch.nn.functional.layer_norm(x, (32,), model[0].weight, model[0].bias)
    h = torch.nn.functional.linear(h, model[1].weight, model[1].bias)
    h = torch.nn.functional.gelu(h, approximate="tanh")
    torch.testing.assert_close(y, torch.nn.functional.linear(h, model[3].weight))


def test_a_conversion_that_fails_changes_nothing_of_the_operation() -> None:
    linear = make(RECIPES["mxfp8"]())[1]
    before = [id(p) for p in linear.parameters()]

    def fails(t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 1:
            raise ValueError("no vectors")
        return t.double()

    with pytest.raises(ValueError, match="no vectors"):
        linear._apply(fails)
    assert [id(p) for p in linear.parameters()] == before
    assert isinstance(linear.weight, te.QuantizedTensor)
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]


def test_other_functions_are_applied_to_the_values(recipe: Any) -> None:
    model = make(recipe)
    values = [w.detach().dequantize() for w in weights(model)]
    model._apply(lambda t: t * 2)
    for weight, old in zip(weights(model), values, strict=True):
        assert isinstance(weight, te.QuantizedTensor)
        got = weight.detach().dequantize()
        assert (got - 2 * old).norm() <= 0.06 * (2 * old).norm()
    assert torch.equal(model[0].weight.detach(), torch.full((32,), 2.0))


@pytest.mark.usefixtures("_way")
def test_load_state_dict(recipe: Any) -> None:
    model, other = train(make(recipe), recipe), make(recipe)
    for assign in (False, True):
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
        for a, b in zip(weights(model), weights(other), strict=True):
            assert isinstance(b, torch.nn.Parameter)
            assert same_bits(a, b)


# -- without memory at first


def test_on_the_meta_device(recipe: Any, device: str) -> None:
    model = make(recipe, device="meta")
    for weight in weights(model):
        assert isinstance(weight, te.QuantizedTensor)
        assert weight.is_meta
        assert weight.format == make(recipe)[1].weight.format
    assert not recipe_state(model.state_dict())
    assert all(
        value.is_meta
        for key, value in model.state_dict().items()
        if "_data" in key or "_scale" in key
    )
    assert repr(model)


@pytest.mark.parametrize("way", ["to_empty", "of a plain module"])
def test_to_empty(recipe: Any, way: str, device: str) -> None:
    model = make(recipe, device="meta")
    outer = model if way == "to_empty" else torch.nn.ModuleList([model])
    outer.to_empty(device=device)
    for op in (model[0], model[1], model[3]):
        op.reset_parameters()
    fresh = make(recipe)
    for weight, like in zip(weights(model), weights(fresh), strict=True):
        assert isinstance(weight, te.QuantizedTensor)
        assert not weight.is_meta
        assert weight.shape == like.shape
        values = weight.detach().dequantize()
        assert values.isfinite().all()
        assert 0.9 < values.std() / like.detach().dequantize().std() < 1.1
    source = train(make(recipe), recipe)
    model.load_state_dict(source.state_dict())
    for weight, like in zip(weights(model), weights(source), strict=True):
        assert same_bits(weight, like)
    train(model, recipe)


@pytest.mark.parametrize("trained", [False, True])
def test_assigned_from_quantized(recipe: Any, trained: bool) -> None:
    source = make(recipe)
    if trained:
        train(source, recipe)
    model = make(recipe, device="meta")
    result = model.load_state_dict(source.state_dict(), assign=True)
    assert not result.missing_keys
    for weight, like in zip(weights(model), weights(source), strict=True):
        assert isinstance(weight, torch.nn.Parameter)
        assert same_bits(weight, like)
    x = torch.randn(8, 32)
    outputs = []
    for each in (source, model):
        torch.manual_seed(5)
        with te.autocast(recipe=recipe):
            outputs.append(each(x))
    assert torch.equal(*outputs)
    train(model, recipe)


def test_assigned_from_plain(recipe: Any) -> None:
    """A plain checkpoint is quantized on the way: the model was built for it."""
    source = make()
    for place in ("meta", None):
        model = make(recipe, device=place)
        model.load_state_dict(source.state_dict(), assign=True)
        for weight, plain in zip(weights(model), weights(source), strict=True):
            assert isinstance(weight, te.QuantizedTensor)
            assert isinstance(weight, torch.nn.Parameter)
            values = weight.detach().dequantize()
            limit = 0.15 if "nvfp4" in weight.format else 0.05
            assert (values - plain).norm() < limit * plain.norm()
        assert torch.equal(model[1].bias, source[1].bias)
        train(model, recipe)


def test_copying_into_the_meta_device_is_no_load() -> None:
    model = make(RECIPES["mxfp8"](), device="meta")
    with pytest.warns(UserWarning, match="copying from a non-meta parameter"):
        model.load_state_dict(make(RECIPES["mxfp8"]()).state_dict())
    assert all(weight.is_meta for weight in weights(model))


def test_copies_of_a_model_without_memory(recipe: Any) -> None:
    model = copy.deepcopy(make(recipe, device="meta"))
    assert all(isinstance(w, te.QuantizedTensor) and w.is_meta for w in weights(model))
    model.load_state_dict(make(recipe).state_dict(), assign=True)
    train(model, recipe)


def test_initial_values_are_those_that_there_are() -> None:
    with te.quantized_model_init(recipe=RECIPES["mxfp8"](), preserve_high_precision_init_val=True):
        linear = te.ops.Linear(32, 32, device="meta")
    assert not hasattr(linear.weight, "get_high_precision_init_val")


# -- another process


def _child(model: Any, recipe: Any, x: torch.Tensor, results: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = model(x)
    state = {k: v.tolist() for k, v in recipe_state(model.state_dict()).items()}
    results.put((y.tolist(), state))


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("quantized", [False, True])
def test_spawned_processes(name: str, quantized: bool, device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of this device is not shared")
    recipe = RECIPES[name]()
    model = train(make(recipe if quantized else None), recipe)
    model.zero_grad()
    x = torch.randn(4, 32)
    twin = copy.deepcopy(model)
    with torch.no_grad(), te.autocast(recipe=recipe):
        wanted = twin(x)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_child, args=(model, recipe, x, results))
    process.start()
    y, state = results.get()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(y), wanted)
    assert state == {k: v.tolist() for k, v in recipe_state(twin.state_dict()).items()}
    assert bool(state) == (name == "delayed")


def test_a_model_in_a_queue(device: str) -> None:
    """What is put in holds no tensors that are gone when it is taken out."""
    if device != "cpu":
        pytest.skip("memory of this device is not shared")
    recipe = RECIPES["delayed"]()
    model = train(make(), recipe)
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(model)
    other = queue.get()
    got, wanted = recipe_state(other.state_dict()), recipe_state(model.state_dict())
    assert len(wanted) == 16
    assert {k: v.tolist() for k, v in got.items()} == {k: v.tolist() for k, v in wanted.items()}

"""Models built with weights in low precision."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from delayed_reference import factor_for, state_of
from quantized_reference import is_native

import ligature as te
from ligature.common import recipe as recipes

RECIPES = {
    "delayed": (lambda: recipes.DelayedScaling(amax_history_len=4), te.Float8Tensor),
    "current": (recipes.Float8CurrentScaling, te.Float8Tensor),
    "block": (recipes.Float8BlockScaling, te.Float8BlockwiseQTensor),
    "mxfp8": (recipes.MXFP8BlockScaling, te.MXFP8Tensor),
    "nvfp4": (recipes.NVFP4BlockScaling, te.NVFP4Tensor),
}


@pytest.fixture(params=RECIPES)
def name(request) -> str:
    return request.param


@pytest.fixture
def recipe(name):
    return RECIPES[name][0]()


def is_quantized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, te.QuantizedTensor)


def fields(tensor) -> dict:
    return te.quantization.tensor._C.quantized_of(tensor).fields


def test_which_parameters(name, recipe) -> None:
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.Sequential(
            te.ops.LayerNorm(32),
            te.ops.Linear(32, 64),
            te.ops.BasicLinear(64, 32),
            te.ops.Bias(32),
            torch.nn.Linear(32, 32),
        )
    found = {n: type(p) for n, p in model.named_parameters() if is_quantized(p)}
    kind = RECIPES[name][1]
    assert found == {"1.weight": kind, "2.weight": kind}
    weight = model[1].weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.shape == (64, 32)
    role = te.QuantizerRole("linear", "weight", "")
    quantizer = recipe._native.make_quantizer(role, weight.device)
    assert fields(weight) == quantizer._handle.fields
    one_is_enough = name in ("delayed", "current", "block", "nvfp4")
    one_is_enough = one_is_enough and not is_native(recipe, weight.device)
    assert (weight.columnwise_data is None) == one_is_enough  # made when it is needed


def test_values_are_those_of_a_usual_initialization(name, recipe) -> None:
    torch.manual_seed(5)
    plain = te.ops.Linear(64, 64)
    torch.manual_seed(5)
    with te.quantized_model_init(recipe=recipe):
        linear = te.ops.Linear(64, 64)
    assert torch.equal(linear.bias, plain.bias)
    error = (linear.weight.dequantize() - plain.weight).norm() / plain.weight.norm()
    assert error < (0.15 if name == "nvfp4" else 0.04)
    again = linear.weight.dequantize()
    linear.reset_parameters()
    assert is_quantized(linear.weight)
    assert not torch.equal(linear.weight.dequantize(), again)
    assert linear.weight.dequantize().abs().max() <= 1.1 / 8


def own_scale(weight) -> torch.Tensor:
    """What the values of a weight in delayed scaling were multiplied by."""
    return torch.ones(1) / weight._scale_inv


def test_the_first_weight_of_delayed_scaling_has_a_scale_of_its_own() -> None:
    with te.quantized_model_init(recipe=recipes.DelayedScaling(margin=1)):
        linear = te.ops.BasicLinear(32, 32)
    codes = linear.weight.detach().dequantize() * own_scale(linear.weight)
    torch.testing.assert_close(codes.abs().max(), torch.tensor(224.0))
    scale, amax, history = state_of(linear)[0][1]
    assert (scale, amax) == (1, 0)  # no step has computed with it
    assert not history.any()


def test_computes_as_with_a_plain_weight(name, recipe) -> None:
    """The same as a high-precision weight with the quantized values; inside and outside."""
    if name == "nvfp4":
        recipe.disable_stochastic_rounding = True
    with te.quantized_model_init(recipe=recipe):
        linear = te.ops.Linear(64, 64)
    plain = te.ops.Linear(64, 64)
    with torch.no_grad():
        plain.weight.copy_(linear.weight.dequantize())
        plain.bias.copy_(linear.bias)
    x = torch.randn(32, 64)
    torch.testing.assert_close(linear(x), plain(x))
    if name == "delayed":
        plain.basic_ops[0]._handle.load_recipe_state(
            recipe._native, linear.weight.device, *state_of(linear)
        )
        plain.basic_ops[0].get_quantizer("forward", 1).scale = own_scale(linear.weight)
    grads = []
    for model in (linear, plain):
        given = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = model(given)
        y.backward(torch.ones_like(y))
        grads.append((y.detach(), given.grad, model.weight.grad, model.bias.grad))
    if name in ("mxfp8",):
        # its orientations are rounded each by itself: values rounded twice differ
        torch.testing.assert_close(grads[0][0], grads[1][0])
        return
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_recipe_other_than_that_of_the_weight() -> None:
    with te.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        linear = te.ops.BasicLinear(32, 32)
    plain = te.ops.BasicLinear(32, 32)
    with torch.no_grad():
        plain.weight.copy_(linear.weight.dequantize())
    x = torch.randn(16, 32)
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        assert torch.equal(linear(x), plain(x))


def test_trains_as_a_weight_that_is_rounded_in_every_step(name, recipe) -> None:
    """Bit for bit: between two steps there is nothing but the quantized weight."""

    def build():
        return te.ops.Sequential(te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32))

    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = build()
    plain = build()
    role = te.QuantizerRole("linear", "weight", "")
    with torch.no_grad():
        for i in (0, 2):
            plain[i].weight.copy_(model[i].weight.get_high_precision_init_val())
            plain[i].bias.copy_(model[i].bias)
            if name == "delayed":
                plain[i].basic_ops[0]._handle.load_recipe_state(
                    recipe._native, model[i].weight.device, *state_of(model[i])
                )
    x, target = torch.randn(64, 32), torch.randn(64, 32)
    losses = {}
    for which, subject in (("quantized", model), ("plain", plain)):
        torch.manual_seed(7)  # stochastic rounding
        losses[which] = []
        optimizer = torch.optim.SGD(subject.parameters(), lr=0.5, foreach=False)
        for _ in range(12):
            scales = []
            if name == "delayed" and which == "plain":  # those that the weights hold
                scales = [torch.tensor([factor_for(448, subject[i].weight)]) for i in (0, 2)]
                for i in (0, 2):
                    subject[i].basic_ops[0].get_quantizer("forward", 1).scale = scales[i // 2]
            with te.autocast(recipe=recipe):
                loss = torch.nn.functional.mse_loss(subject(x), target)
            loss.backward()
            losses[which].append(loss.item())
            if which == "plain":
                with torch.no_grad():
                    for i in (0, 2):
                        weight = subject[i].weight
                        quantizer = recipe._native.make_quantizer(role, weight.device)
                        if scales:
                            quantizer.scale = scales[i // 2]
                        weight.copy_(quantizer(weight).dequantize())
            optimizer.step()
            optimizer.zero_grad()
    assert losses["quantized"] == losses["plain"]
    assert len(set(losses["plain"])) > 6
    assert isinstance(model[0].weight, te.QuantizedTensor)


def test_trains_with_adam(name, recipe) -> None:
    if name == "nvfp4":
        pytest.skip("four bits alone cannot add up small steps")
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.Sequential(te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32))
    x = torch.randn(64, 32)
    target = torch.nn.functional.linear(x, torch.randn(32, 32) / 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        with te.autocast(recipe=recipe):
            loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_delayed_scaling_follows_a_weight_that_grows() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=2)
    with te.quantized_model_init(recipe=recipe):
        linear = te.ops.BasicLinear(32, 32)
    x = torch.randn(8, 32)
    for _ in range(4):
        with torch.no_grad():
            linear.weight.copy_(linear.weight.dequantize() * 1.5)
        with te.autocast(recipe=recipe):
            linear(x)
        scale = state_of(linear)[0][1][0]
        torch.testing.assert_close(scale, own_scale(linear.weight))


def test_nesting_exceptions_and_disabling() -> None:
    recipe = recipes.Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        with te.quantized_model_init(enabled=False):
            assert not is_quantized(te.ops.Linear(8, 8).weight)
        with te.fp8_model_init(recipe=recipes.MXFP8BlockScaling()):
            assert isinstance(te.ops.Linear(32, 32).weight, te.MXFP8Tensor)
        with pytest.raises(KeyError), te.quantized_model_init(enabled=False):
            raise KeyError
        assert isinstance(te.ops.Linear(8, 8).weight, te.Float8Tensor)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(te.ops.Linear(8, 8).weight))
        thread.start()
        thread.join()
        assert not is_quantized(seen[0])
    assert not is_quantized(te.ops.Linear(8, 8).weight)
    with te.quantized_model_init():
        linear = te.ops.Linear(8, 8)
    assert fields(linear.weight)["scaling"] == "delayed"


def test_high_precision_values_are_kept_on_demand() -> None:
    recipe = recipes.Float8CurrentScaling()
    torch.manual_seed(5)
    plain = te.ops.Linear(16, 16)
    torch.manual_seed(5)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        linear = te.ops.Linear(16, 16)
    kept = linear.weight.get_high_precision_init_val()
    assert kept.device.type == "cpu"
    assert torch.equal(kept, plain.weight.detach().cpu())
    assert not hasattr(linear.bias, "get_high_precision_init_val")
    linear.weight.clear_high_precision_init_val()
    assert linear.weight.get_high_precision_init_val() is None
    with te.quantized_model_init(recipe=recipe):
        assert not hasattr(te.ops.Linear(16, 16).weight, "get_high_precision_init_val")


def test_copies_have_quantizers_of_their_own() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=4)
    with te.quantized_model_init(recipe=recipe):
        model = te.ops.Linear(32, 32)
    twin = copy.deepcopy(model)
    assert is_quantized(twin.weight)
    assert torch.equal(twin.weight.rowwise_data, model.weight.rowwise_data)
    before = str(state_of(model))
    with torch.no_grad():
        twin.weight.mul_(3)
    with te.autocast(recipe=recipe):
        twin(torch.randn(4, 32))
    assert str(state_of(model)) == before
    assert state_of(twin)[0][1][2][0] > state_of(model)[0][1][2][0] * 2


def test_a_custom_recipe_may_leave_weights_alone() -> None:
    def factory(role):
        return None

    with te.quantized_model_init(recipe=recipes.CustomRecipe(factory)):
        assert not is_quantized(te.ops.Linear(8, 8).weight)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: te.ops.Linear(8, 8, dtype=torch.float64),
            TypeError,
            r"\[Linear\] weight: .*Double",
        ),
    ],
)
def test_what_cannot_be_quantized(make, error, message) -> None:
    with te.quantized_model_init(), pytest.raises(error, match=message):
        make()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="enabled must be a bool, got 1"):
        te.quantized_model_init(enabled=1)
    with pytest.raises(TypeError, match="recipe must be a Recipe, got str"):
        te.quantized_model_init(recipe="fp8")

"""The state of delayed scaling: one per operation, which goes on whatever the recipe says."""

from __future__ import annotations

import pytest
import torch
from delayed_reference import LinearReference, factor_for, state_of
from quantized_reference import assert_product

import ligature as te
from ligature.common.recipe import DelayedScaling, Float8CurrentScaling, Format, QParams

K, N, M = 32, 48, 16


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_product(actual, expected, torch.float32, "product", DelayedScaling())


def test_one_state_whatever_the_recipe_says() -> None:
    """Fields change from step to step; scale and history go on."""
    linear = te.ops.BasicLinear(K, N)
    recipe = DelayedScaling(amax_history_len=4)
    steps = [
        {},
        {"margin": 2},
        {"amax_compute_algo": "most_recent"},
        {"amax_compute_algo": lambda history: history.max()},
        {"margin": 0},
        {"reduce_amax": False},
        {"amax_compute_algo": "max"},
    ]
    reference = LinearReference(4)
    for step, fields in enumerate(steps):
        for name, value in fields.items():
            setattr(recipe, name, value)
        x, dy = torch.randn(M, K) * (step % 3 + 1), torch.randn(M, N) * (step + 1)
        with te.autocast(recipe=recipe):
            y = linear(x)
        close(y, reference.forward(x, linear.weight))
        y.backward(dy)
        reference.backward(dy)
        for factor in (reference.x, reference.w, reference.dy):
            factor.margin = recipe.margin
            factor.algo = "most_recent" if recipe.amax_compute_algo == "most_recent" else "max"
            factor.update()
        reference.check(linear)
        with torch.no_grad():
            linear.weight.mul_(1.5)
        with te.autocast(recipe=Float8CurrentScaling()):
            linear(x)  # another kind of recipe has no part in it


@pytest.mark.parametrize("lengths", [(4, 2, 6), (1, 3), (5, 1, 5)])
def test_a_history_of_another_length_keeps_the_newest(lengths) -> None:
    linear = te.ops.BasicLinear(K, N)
    wanted: list[float] = []
    value = 1.0
    for length in lengths:
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(amax_history_len=length)), torch.no_grad():
                linear(torch.full((M, K), value))
            wanted = [value, *wanted][:length]
            scale, amax, history = state_of(linear)[0][0]
            assert history.tolist() == wanted + [0.0] * (length - len(wanted))
            assert scale == 448 / max(wanted)
            assert amax == 0
            value /= 2


def test_another_format_begins_with_a_scale_for_it() -> None:
    """HYBRID, E4M3, E5M2: a scale made for 57344 would cut off what reaches 448."""
    linear = te.ops.BasicLinear(K, N)
    x, dy = torch.full((M, K), 2.0), torch.full((M, N), 3.0)
    wanted = None
    for fmt in (Format.HYBRID, Format.E4M3, Format.HYBRID, Format.E5M2, Format.E4M3):
        with te.autocast(recipe=DelayedScaling(fp8_format=fmt)):
            if wanted is not None:
                assert linear.get_quantizer("forward", 0).scale == fmt.value.max_fwd / 2
                assert linear.get_quantizer("backward", 0).scale == fmt.value.max_bwd / 3
            y = linear(x)
        (dw,) = torch.autograd.grad(y, linear.weight, dy)
        if wanted is None:
            wanted = dw
        torch.testing.assert_close(dw, wanted)
        assert state_of(linear)[0][0][0] == fmt.value.max_fwd / 2
        assert state_of(linear)[1][0][0] == fmt.value.max_bwd / 3


def test_two_formats_in_one_context() -> None:
    linear = te.ops.BasicLinear(K, N)
    x = torch.randn(M, K)
    recipe = DelayedScaling(fp8_format=Format.E5M2)
    with te.autocast(recipe=recipe):
        linear(x)
    expected = x @ linear.weight.detach().T
    with te.autocast(recipe=recipe):
        linear(x)
        with te.autocast(recipe=DelayedScaling(fp8_format=Format.E4M3)):
            y = linear(x)
    assert (y - expected).norm() / expected.norm() < 0.06


def test_a_function_made_in_every_step() -> None:
    """As if it were the same one."""
    results = []
    for once in (True, False):
        torch.manual_seed(0)
        linear = te.ops.BasicLinear(K, N)
        made = [lambda history: history.max() * 2 for _ in range(5)]
        scales = []
        for i in range(5):
            recipe = DelayedScaling(
                amax_history_len=3,
                amax_compute_algo=made[0 if once else i],
                scaling_factor_compute_algo=lambda amax, old, largest, recipe: largest / amax,
            )
            with te.autocast(recipe=recipe):
                scales.append(linear.get_quantizer("forward", 0).scale.item())
                linear(torch.randn(M, K) * (i + 1)).sum().backward()
        assert scales[0] == 1
        assert all(scale != 1 for scale in scales[1:])
        results.append((scales, str(state_of(linear))))
    assert results[0] == results[1]


def test_the_function_of_the_step_is_the_one_that_is_called() -> None:
    linear = te.ops.BasicLinear(K, N)
    called = []
    for i in range(3):

        def amax(history: torch.Tensor, i: int = i) -> torch.Tensor:
            called.append(i)
            return history.max()

        with te.autocast(recipe=DelayedScaling(amax_compute_algo=amax)), torch.no_grad():
            linear(torch.randn(M, K))
    assert called == [0, 0, 1, 1, 2, 2][: len(called)]
    assert set(called) == {0, 1, 2}


def test_an_operation_in_two_models_with_two_recipes() -> None:
    """Each call is followed by an update of its own recipe."""
    linear = te.ops.BasicLinear(K, N)
    models = [te.ops.Sequential(linear), te.ops.Sequential(linear, te.ops.Identity())]
    given = [DelayedScaling(margin=0), DelayedScaling(margin=3)]
    for step in range(6):
        which = step % 2
        x = torch.full((M, K), float(step + 1))
        with te.autocast(recipe=given[which]), torch.no_grad():
            models[which](x)
        scale = state_of(linear)[0][0][0].item()
        assert scale == factor_for(448, x) / 2.0 ** given[which].margin


def test_state_outlives_recipes_that_are_forgotten() -> None:
    linear = te.ops.BasicLinear(K, N)
    recipe = DelayedScaling()
    with te.autocast(recipe=recipe):
        linear(torch.full((M, K), 2.0))
    for i in range(20):
        other = Float8CurrentScaling()
        other.fp8_quant_fwd_inp = QParams(amax_epsilon=float(i))
        with te.autocast(recipe=other):
            linear(torch.randn(M, K))
    twin = te.ops.BasicLinear(K, N)
    twin.load_state_dict(linear.state_dict())
    assert state_of(twin)[0][0][2][0] == 2
    with te.autocast(recipe=recipe):
        assert linear.get_quantizer("forward", 0).scale == 224
    assert state_of(linear)[0][0][2][0] == 2


def test_looking_at_another_recipe_changes_nothing() -> None:
    model = te.ops.Sequential(te.ops.BasicLinear(K, N))
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        model(torch.randn(M, K))
    before = str(state_of(model[0]))
    with te.autocast(recipe=DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3)):
        model.explain(torch.randn(M, K))
    assert str(state_of(model[0])) == before

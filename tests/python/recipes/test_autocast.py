"""The low-precision context: nesting, exceptions, threads, recomputation, and what is available."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.utils.checkpoint
from delayed_reference import state_of
from quantized_reference import assert_product

import ligature as te
from ligature.common import recipe as recipes
from ligature.quantization import (
    get_autocast_recipe,
    is_autocast_calibrating,
    is_autocast_enabled,
)

RECIPES = {
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


def quantized(value: torch.Tensor, recipe, kind: str) -> torch.Tensor:
    role = te.QuantizerRole("linear", kind, "")
    return recipe._native.make_quantizer(role, value.device)(value).dequantize()


def test_what_is_computed_with() -> None:
    """Current scaling, from the quantizers themselves."""
    recipe = recipes.Float8CurrentScaling()
    linear = te.ops.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    dy = torch.randn(16, 48)
    with te.autocast(recipe=recipe):
        y = linear(x)
    y.backward(dy)
    qx = quantized(x.detach(), recipe, "input").double()
    qw = quantized(linear.weight.detach(), recipe, "weight").double()
    qdy = quantized(dy, recipe, "grad_output").double()
    for got, wanted, what in (
        (y, qx @ qw.T + linear.bias.double(), "y"),
        (x.grad, qdy @ qw, "dx"),
        (linear.weight.grad, qdy.T @ qx, "dw"),
    ):
        assert_product(got, wanted, torch.float32, what, recipe)
    plain = torch.nn.functional.linear(x, linear.weight, linear.bias)
    assert not torch.allclose(y, plain, rtol=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_near_high_precision(name) -> None:
    model = te.ops.Sequential(
        te.ops.LayerNorm(64), te.ops.Linear(64, 128), te.ops.SwiGLU(), te.ops.Linear(64, 64)
    )
    x = torch.randn(32, 64)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):  # the factors of delayed scaling are chosen by the first
            with te.autocast(recipe=RECIPES[name]()):
                y = model(x)
    error = (y - expected).norm() / expected.norm()
    assert 1e-4 < error < (0.25 if name == "nvfp4" else 0.08), error


def test_nesting_restores() -> None:
    outer, inner = recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()

    def now():
        return is_autocast_enabled(), is_autocast_calibrating(), get_autocast_recipe()

    assert now() == (False, False, None)
    with te.autocast(recipe=outer):
        assert now() == (True, False, outer)
        assert get_autocast_recipe() is outer
        with te.autocast(recipe=inner):
            assert get_autocast_recipe() is inner
            with te.autocast(enabled=False, calibrating=True):
                assert now() == (False, True, recipes.DelayedScaling())
            assert get_autocast_recipe() is inner
        with pytest.raises(KeyError), te.autocast(enabled=False):
            raise KeyError
        assert now() == (True, False, outer)
    assert now() == (False, False, None)


def test_a_context_can_be_entered_again() -> None:
    context = te.autocast(recipe=recipes.Float8CurrentScaling())
    for _ in range(2):
        with context, context:
            assert is_autocast_enabled()
        assert not is_autocast_enabled()


def test_disabled_inside_enabled_computes_in_high_precision() -> None:
    linear = te.ops.Linear(32, 32)
    x = torch.randn(8, 32)
    expected = linear(x)
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        with te.autocast(enabled=False):
            assert torch.equal(linear(x), expected)
        assert not torch.equal(linear(x), expected)
    assert torch.equal(linear(x), expected)


def test_a_field_set_inside_takes_effect_with_the_next_call() -> None:
    recipe = recipes.Float8CurrentScaling()
    other = recipes.Float8CurrentScaling(use_power_2_scales=True)
    linear = te.ops.Linear(32, 32)
    x = torch.randn(8, 32)
    with te.autocast(recipe=other):
        expected = linear(x)
    with te.autocast(recipe=recipe):
        before = linear(x)
        with te.autocast(enabled=False, recipe=recipe):
            recipe.use_power_2_scales = True
        assert torch.equal(linear(x), expected)
        assert not torch.equal(before, expected)


def test_older_names() -> None:
    recipe = recipes.Float8CurrentScaling()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=None):
        assert get_autocast_recipe() is recipe
    with te.fp8_autocast(False, True):
        assert is_autocast_calibrating()
        assert get_autocast_recipe() == te.get_default_recipe()
    assert te.recipe is recipes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enabled": 1}, r"\[autocast\] enabled must be a bool, got 1"),
        ({"calibrating": None}, r"\[autocast\] calibrating must be a bool, got None"),
        ({"recipe": recipes.Format.E4M3}, r"\[autocast\] recipe must be a Recipe, got Format"),
        ({"recipe": recipes.DelayedScaling}, "recipe must be a Recipe, got type"),
    ],
)
def test_wrong_arguments(arguments, message) -> None:
    with pytest.raises(TypeError, match=message):
        te.autocast(**arguments)


@pytest.mark.parametrize("name", RECIPES)
def test_backward_uses_what_forward_used(name) -> None:
    """Outside the context, inside it, and inside one of another recipe."""
    recipe = RECIPES[name]()
    grads = []
    dy = torch.randn(32, 32)
    torch.manual_seed(0)
    model = te.ops.Sequential(te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(32, 32)
    for where in ("outside", "inside", "another"):
        torch.manual_seed(1)  # stochastic rounding
        model = te.ops.Sequential(te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32))
        model.load_state_dict(state)
        torch.manual_seed(1)
        with te.autocast(recipe=recipe):
            y = model(x)
            if where == "inside":
                y.backward(dy)
        if where == "outside":
            y.backward(dy)
        elif where == "another":
            with te.autocast(recipe=recipes.MXFP8BlockScaling(fp8_format=recipes.Format.E5M2)):
                y.backward(dy)
        grads.append([p.grad for p in model.parameters()])
    model.zero_grad()
    model(x).backward(dy)
    plain = [p.grad for p in model.parameters()]
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(plain[0], grads[0][0])


def test_each_thread_has_its_own() -> None:
    seen = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        seen["before"] = is_autocast_enabled()
        with te.autocast(recipe=recipes.MXFP8BlockScaling()):
            seen["recipe"] = get_autocast_recipe()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        inside.set()
        done.wait()
        assert isinstance(get_autocast_recipe(), recipes.Float8CurrentScaling)
    thread.join()
    assert seen == {"before": False, "recipe": recipes.MXFP8BlockScaling()}


def test_threads_with_recipes_of_their_own() -> None:
    model = te.ops.Linear(32, 32)
    x = torch.randn(16, 32)
    made = {"current": RECIPES["current"](), "mxfp8": RECIPES["mxfp8"]()}
    expected = {}
    for name, recipe in made.items():
        with te.autocast(recipe=recipe):
            expected[name] = model(x)
    expected["none"] = model(x)
    wrong = []

    def work(name: str) -> None:
        for _ in range(30):
            if name == "none":
                y = model(x)
            else:
                with te.autocast(recipe=made[name]):
                    y = model(x)
            if not torch.equal(y, expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_gradients_and_inference() -> None:
    linear = te.ops.Linear(32, 32)
    x = torch.randn(8, 32)
    recipe = recipes.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        expected = linear(x).detach()
        with torch.no_grad():
            assert torch.equal(linear(x), expected)
        with torch.inference_mode():
            assert torch.equal(linear(x), expected)
        linear.requires_grad_(False)
        assert torch.equal(linear(x), expected)


def test_torch_autocast_too(device) -> None:
    linear = te.ops.Linear(32, 32)
    x = torch.randn(8, 32)
    with torch.autocast(device, torch.bfloat16), te.autocast(recipe=recipes.MXFP8BlockScaling()):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


# -- recomputation


class Model(torch.nn.Module):
    """Operations with torch's own around them: either may be the first that backward asks."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.body = te.ops.Sequential(te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return torch.tanh(y) if self.last else y


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", [*RECIPES, "none"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, name, where, last) -> None:
    """The same gradients, and the same state of delayed scaling, as without it."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        model = Model(last)
        x = torch.randn(16, 32, requires_grad=True)
        recipe = RECIPES[name]() if name != "none" else None
        if name == "nvfp4":
            recipe.disable_stochastic_rounding = True  # its random numbers are drawn in order
        grads = []
        for _ in range(2):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = te.checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
                if where == "inside":
                    y.square().sum().backward()
            if where == "outside":
                y.square().sum().backward()
            grads += [p.grad.clone() for p in (x, *model.parameters())]
        states = [state_of(model.body[i]) for i in (0, 2)] if name == "delayed" else []
        results.append((grads, states))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    assert str(results[0][1]) == str(results[1][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint(reentrant, device) -> None:
    """torch's own, where it can know: backward inside, or (not reentrant) asking operations."""
    if reentrant and device == "cuda":
        pytest.skip("backward on a GPU runs in a thread of its own, which is in no context")
    grads = []
    for way in ("plain", "inside", "outside"):
        if way == "outside" and reentrant:
            continue
        torch.manual_seed(3)
        model = Model(False)
        x = torch.randn(16, 32, requires_grad=True)
        recipe = RECIPES["delayed"]()
        for _ in range(2):
            with te.autocast(recipe=recipe):
                if way == "plain":
                    y = model(x)
                else:
                    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
                if way != "outside":
                    y.square().sum().backward()
            if way == "outside":
                y.square().sum().backward()
        grads.append(([p.grad for p in model.parameters()], str(state_of(model.body[0]))))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0][0], other[0], strict=True))
        assert other[1] == grads[0][1]


def test_checkpoint_passes_arguments_on() -> None:
    linear = te.ops.Linear(8, 8)
    seen = []

    def function(x, y=None, *, factor):
        seen.append((is_autocast_enabled(), factor))
        return linear(x) * factor

    x = torch.randn(4, 8, requires_grad=True)
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        y = te.checkpoint(function, x, None, use_reentrant=True, factor=3)
    y.sum().backward()
    assert seen == [(True, 3), (True, 3)]
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *exception):
            entered.append(f"/{self.name}")

    y = te.checkpoint(
        linear, x, use_reentrant=False, context_fn=lambda: (Context("first"), Context("second"))
    )
    y.sum().backward()
    assert entered == ["first", "/first", "second", "/second"]
    with pytest.raises(ValueError, match="context_fn needs use_reentrant=False"):
        te.checkpoint(linear, x, use_reentrant=True, context_fn=lambda: None)
    with pytest.raises(NotImplementedError, match="tp_group"):
        te.checkpoint(linear, x, tp_group=object())


def test_checkpoint_outside_any_context_stays_outside() -> None:
    linear = te.ops.Linear(32, 32)
    x = torch.randn(8, 32, requires_grad=True)
    linear(x).square().sum().backward()
    expected, x.grad = x.grad, None
    y = te.checkpoint(linear, x, use_reentrant=False)
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        y.square().sum().backward()
        assert is_autocast_enabled()
    assert torch.equal(x.grad, expected)


# -- what is available


ANSWERS = (
    te.is_fp8_available,
    te.is_fp8_block_scaling_available,
    te.is_mxfp8_available,
    te.is_nvfp4_available,
)


@pytest.mark.parametrize("answer", ANSWERS)
def test_availability(answer) -> None:
    assert answer(device="cpu") is True
    assert answer(return_reason=True, device="cpu") == (True, "")
    good, reason = answer(return_reason=True, device="cuda")
    cuda = te.show_config("dict")["cuda"]["built"] and torch.cuda.is_available()
    assert good is cuda
    if cuda:
        assert reason == "" or "is emulated" in reason
    else:
        assert reason.endswith("; the CPU has it")
    assert answer() is answer(device=torch.get_default_device())
    with torch.device("meta"):
        assert answer() is False


def test_bf16_availability() -> None:
    assert te.is_bf16_available(device="cpu") is True
    assert te.is_bf16_available(True, "meta") == (False, "meta is not a device of Ligature's")
    good, reason = te.is_bf16_available(True, "cuda")
    assert good == (torch.cuda.is_available() and torch.cuda.is_bf16_supported(False))
    assert good == (not reason)

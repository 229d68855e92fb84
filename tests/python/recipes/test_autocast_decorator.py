"""The low-precision contexts as decorators, and one context object in several threads."""

from __future__ import annotations

import threading

import pytest
import torch

import ligature as te
from ligature.common import recipe as recipes
from ligature.quantization import get_autocast_recipe, is_autocast_enabled


def test_as_a_decorator() -> None:
    recipe = recipes.Float8CurrentScaling()
    linear = te.ops.Linear(32, 32)
    x = torch.randn(16, 32)

    @te.autocast(recipe=recipe)
    def low(x: torch.Tensor, times: int = 0) -> torch.Tensor:
        """What it does."""
        assert get_autocast_recipe() is recipe
        y = low(x, times - 1) if times else linear(x)
        assert is_autocast_enabled()
        return y

    assert (low.__name__, low.__doc__) == ("low", "What it does.")
    with te.autocast(recipe=recipe):
        wanted = linear(x)
    assert torch.equal(low(x), wanted)
    assert torch.equal(low(x, times=2), wanted)
    assert not torch.equal(linear(x), wanted)
    with te.autocast(recipe=recipes.MXFP8BlockScaling()):
        low(x)
        assert isinstance(get_autocast_recipe(), recipes.MXFP8BlockScaling)
    assert get_autocast_recipe() is None

    @te.fp8_autocast(enabled=False)
    def high(x: torch.Tensor) -> torch.Tensor:
        assert not is_autocast_enabled()
        return linear(x)

    with te.autocast(recipe=recipe):
        assert torch.equal(high(x), torch.nn.functional.linear(x, linear.weight, linear.bias))


def test_a_decorated_function_that_fails() -> None:
    @te.autocast(recipe=recipes.DelayedScaling(amax_history_len=2))
    def fails(linear: te.ops.BasicLinear, x: torch.Tensor) -> None:
        linear(x)
        raise KeyError("x")

    linear = te.ops.BasicLinear(16, 16)
    with pytest.raises(KeyError):
        fails(linear, torch.randn(16, 16))
    assert get_autocast_recipe() is None
    scale = linear.get_quantizer("forward", 0).scale
    assert scale.item() == 1.0, "the history moved on"


def test_a_decorated_generator_is_inside_while_it_runs() -> None:
    recipe = recipes.Float8CurrentScaling()

    @te.autocast(recipe=recipe)
    def each():
        for _ in range(3):
            assert get_autocast_recipe() is recipe
            yield is_autocast_enabled()

    for inside in each():
        assert inside
        assert not is_autocast_enabled()


def test_what_cannot_be_decorated() -> None:
    async def later() -> None: ...

    with pytest.raises(TypeError, match=r"\[autocast\] cannot decorate .*later.*coroutine"):
        te.autocast()(later)
    with pytest.raises(TypeError, match=r"\[autocast\] can decorate a function, got <class"):
        te.autocast()(torch.nn.Linear)
    with pytest.raises(TypeError, match=r"\[autocast\] enabled must be a bool, got <function"):

        @te.autocast
        def forgot() -> None: ...


def test_model_init_as_a_decorator() -> None:
    @te.quantized_model_init(recipe=recipes.Float8CurrentScaling())
    def build() -> te.ops.Linear:
        return te.ops.Linear(16, 16)

    assert isinstance(build().weight, te.QuantizedTensor)
    assert not isinstance(te.ops.Linear(16, 16).weight, te.QuantizedTensor)


def test_one_context_object_in_two_threads() -> None:
    """Each thread returns to what it computed in before, in whichever order they leave."""
    shared = te.autocast(recipe=recipes.MXFP8BlockScaling())
    outer = recipes.Float8CurrentScaling()
    linear = te.ops.Linear(32, 32)
    compiled = torch.compile(linear, backend="aot_eager")
    x = torch.randn(32, 32)
    with te.autocast(recipe=outer):
        wanted = linear(x)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with shared:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with te.autocast(recipe=outer):
        with shared:
            thread.start()
            inside.wait()
        leave.set()
        thread.join()
        with shared:
            pass
        assert torch.equal(compiled(x), wanted)


def test_a_context_must_end_where_it_began() -> None:
    context = te.autocast()
    seen: list[BaseException] = []

    def leave() -> None:
        try:
            context.__exit__(None)
        except RuntimeError as error:
            seen.append(error)

    with context:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert "must end in the thread that entered it" in str(seen[0])

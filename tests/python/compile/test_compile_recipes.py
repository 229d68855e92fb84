"""torch.compile in low precision: every recipe, with autocast around the compiled function and
inside it, against eager mode bit by bit, the state of delayed scaling included."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch
from compile_support import Pair, mlp
from quantized_reference import EVERY_RECIPE as RECIPES
from quantized_reference import SOME_RECIPES

import ligature as te
from ligature.common import recipe as recipes
from ligature.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from ligature.quantization import recipe_base
from ligature.quantization.scope import SCOPE

#: tools/run_tests.py reads it: torch.compile keeps what it has seen in a process.
IN_ONE_PROCESS = True

pytestmark = [
    pytest.mark.usefixtures("device", "one_thread"),
    pytest.mark.filterwarnings("error:.*may not alias"),
]

ops = te.ops
Tensor = torch.Tensor
EVERY = pytest.mark.parametrize("name", RECIPES)
SOME = pytest.mark.parametrize("name", SOME_RECIPES)
H = 32


def x_of(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).requires_grad_()


class Inside(torch.nn.Module):
    """Enters autocast in its forward."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe | None) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        with te.autocast(recipe=self.recipe):
            y = self.model(x)
        return y * 2


@EVERY
def test_autocast_around(name: str) -> None:
    recipe = RECIPES[name]()
    pair = Pair(mlp(H, 64))
    for seed in range(3):
        pair.step(x_of(8, H, scale=1 + seed), scope=lambda: te.autocast(recipe=recipe), seed=seed)
    assert pair.graphs == 1


@SOME
def test_autocast_inside(name: str) -> None:
    pair = Pair(Inside(mlp(H, 64), RECIPES[name]()))
    for seed in range(3):
        pair.step(x_of(8, H, scale=1 + seed), seed=seed)
    assert pair.graphs == 1


def test_the_default_recipe_inside() -> None:
    pair = Pair(Inside(mlp(H, 64), None))
    for seed in range(2):
        pair.step(x_of(8, H), seed=seed)
    assert pair.graphs == 1


@SOME
def test_the_second_call_makes_no_graph(name: str) -> None:
    """In a process that has never entered an autocast in eager mode."""
    model, recipe, x = mlp(H, 64), RECIPES[name](), x_of(32, H)
    SCOPE.__dict__.clear()
    SCOPE.__init__()  # type: ignore[misc]

    def step(x: Tensor) -> Tensor:
        with te.autocast(recipe=recipe):
            return model(x)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(x).sum().backward()


def newest(history: Tensor) -> Tensor:
    return history[0]


def no_quantizer(role: Any) -> None:
    return None


def set_afterwards() -> Recipe:
    recipe = Float8CurrentScaling(fp8_gemm_dgrad=recipes.MMParams(use_split_accumulator=False))
    recipe.fp8_quant_fwd_inp = recipes.QParams(power_2_scale=True, amax_epsilon=0.25)
    recipe.use_power_2_scales = True
    return recipe


MADE_INSIDE: dict[str, Any] = {
    **{name: (lambda make=make: make()) for name, make in RECIPES.items()},
    "arguments": lambda: DelayedScaling(1, recipes.Format.E4M3, amax_history_len=4),
    "function": lambda: DelayedScaling(amax_compute_algo=newest),
    "split": lambda: Float8CurrentScaling(fp8_gemm_fprop=recipes.MMParams()),
    "set": set_afterwards,
    "custom": lambda: recipes.CustomRecipe(no_quantizer),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_a_recipe_made_inside(name: str) -> None:
    make = MADE_INSIDE[name]
    model = mlp(H, 64)
    twin = copy.deepcopy(model)

    def step(model: Any, x: Tensor) -> tuple[Tensor, Recipe]:
        recipe = make()
        with te.autocast(recipe=recipe):
            return model(x), recipe

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            x = x_of(32, H)
            torch.manual_seed(seed)
            wanted, recipe = step(twin, x)
            torch.manual_seed(seed)
            got, given_out = compiled(model, x)
            assert torch.equal(got, wanted)
            assert given_out == recipe
            assert given_out._native.key == recipe._native.key


def test_too_many_arguments_inside() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        with te.autocast(recipe=DelayedScaling(*([0] * 30))):  # type: ignore[arg-type]
            return x + 1

    with pytest.raises(Exception, match=r"\[DelayedScaling\] takes .*margin.*got 30 arguments"):
        step(torch.ones(2))


def test_a_name_that_is_ignored_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_base, "_warned", set())
    model, x = mlp(H, 64), x_of(32, H)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        with te.autocast(recipe=DelayedScaling(margin=1, interval=4)):  # type: ignore[call-arg]
            return model(x)

    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"\[DelayedScaling\] the argument 'interval'"):
        y = step(x)
    with te.autocast(recipe=DelayedScaling(margin=1)):
        assert torch.equal(y, twin(x))


def test_a_decorated_function() -> None:
    model, x = mlp(H, 64), x_of(32, H)
    decorated = te.autocast(recipe=Float8CurrentScaling())(model)
    torch._dynamo.reset()
    compiled = torch.compile(decorated, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert torch.equal(compiled(x), decorated(x))
    assert not torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_inductor(name: str) -> None:
    recipe = RECIPES[name]()
    pair = Pair(mlp(H, 64), "inductor")
    for seed in range(2):
        pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=recipe), seed=seed)
    assert pair.graphs == 1


@SOME
def test_a_dynamic_batch(name: str) -> None:
    """More rows than one block of any format: the compiler tells one block from several."""
    recipe = RECIPES[name]()
    pair = Pair(mlp(H, 64))
    for n in (140, 200, 301):
        pair.step(x_of(n, H), scope=lambda: te.autocast(recipe=recipe), seed=n, dynamic=True)
    assert pair.graphs == 1


@SOME
def test_operations_that_hand_on_low_precision(name: str) -> None:
    recipe = RECIPES[name]()
    model = ops.Sequential(
        ops.RMSNorm(H),
        ops.Quantize(),
        ops.Linear(H, H),
        ops.GELU(),
        ops.Quantize(backward=True),
        ops.Linear(H, H),
        ops.Dropout(0.25),
    )
    pair = Pair(model)
    for seed in range(2):
        pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=recipe), seed=seed)
    assert pair.graphs == 1


def test_one_graph_per_recipe() -> None:
    pair = Pair(mlp(H, 64))
    first, second = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
    for _ in range(2):
        pair.step(x_of(8, H))
        pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=first))
        pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=second))
        pair.step(x_of(8, H), scope=lambda: te.autocast(enabled=False, recipe=second))
    assert pair.graphs == 3
    first.margin = 1
    pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=first))
    assert pair.graphs == 4


def test_calibration() -> None:
    pair = Pair(mlp(H, 64))
    recipe = DelayedScaling(amax_history_len=4)
    for seed in range(2):
        pair.step(
            x_of(8, H),
            scope=lambda: te.autocast(enabled=False, calibrating=True, recipe=recipe),
            seed=seed,
        )
    pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=recipe))
    assert pair.graphs == 2


def test_delayed_scaling_with_microbatches() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    pair = Pair(mlp(H, 64))
    results: list[Any] = []
    for call, model in ((pair.eager, pair.eager), (pair.compiled, pair.model)):
        torch.manual_seed(3)
        for step in range(3):
            batches = [torch.randn(8, H) * (1 + step) for _ in range(3)]
            outputs = []
            for x in batches:
                with te.autocast(recipe=recipe):
                    outputs.append(call(x))
            for y in outputs:
                y.square().sum().backward()
        results.append([*(p.grad for p in model.parameters())])
        results[-1] += [v for v in model.state_dict().values() if isinstance(v, Tensor)]
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    assert pair.graphs == 1


@SOME
def test_training(name: str) -> None:
    recipe = RECIPES[name]()
    pair = Pair(mlp(H, 64))
    losses: list[list[float]] = []
    for call, model in ((pair.eager, pair.eager), (pair.compiled, pair.model)):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(10):
            x = torch.randn(8, H)
            with te.autocast(recipe=recipe):
                y = call(x)
            loss = (y - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert pair.graphs == 1
    assert losses[0] == losses[1]


def test_inference() -> None:
    recipe = DelayedScaling()
    pair = Pair(mlp(H, 64))
    for scope in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with scope():
                pair.step(x_of(8, H), scope=lambda: te.autocast(recipe=recipe))


def test_a_thread_with_another_recipe_is_refused() -> None:
    model = mlp(H, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, H)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compiled(x)
        except RuntimeError as error:
            errors.append(error)

    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        compiled(x)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "compiled for Float8CurrentScaling" in str(errors[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_a_checkpoint(name: str, use_reentrant: bool) -> None:
    """Backward is called outside of autocast, after the factors have moved on."""
    recipe = RECIPES[name]()
    pair = Pair(mlp(H, 64))
    results: list[list[Tensor]] = []
    for call, model in ((pair.eager, pair.eager), (pair.compiled, pair.model)):
        torch.manual_seed(3)
        for step in range(3):
            x = x_of(8, H, scale=1 + step)
            with te.autocast(recipe=recipe):
                y = te.checkpoint(call, x, use_reentrant=use_reentrant)
            y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
        results[-1] += [v for v in model.state_dict().values() if isinstance(v, Tensor)]
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(got, wanted)


def test_a_checkpoint_with_delayed_scaling_inside_is_refused() -> None:
    compiled = torch.compile(
        Inside(mlp(H, 64), DelayedScaling()), fullgraph=True, backend="aot_eager"
    )
    y = te.checkpoint(compiled, x_of(8, H), use_reentrant=False)
    with pytest.raises(RuntimeError, match="enter autocast around the checkpoint"):
        y.sum().backward()


def test_threads_that_overlap_leave_nothing_behind() -> None:
    model = mlp(H, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, H)
    inside, outside = threading.Event(), threading.Event()

    def run() -> None:
        with te.autocast(recipe=Float8CurrentScaling()):
            inside.set()
            outside.wait()

    thread = threading.Thread(target=run)
    with te.autocast(recipe=DelayedScaling()):
        thread.start()
        inside.wait()
    outside.set()
    thread.join()
    assert torch.equal(compiled(x), model(x))


def test_after_an_autocast_that_ended_in_an_error() -> None:
    model = mlp(H, 64)
    x = torch.randn(8, H)
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe):
        model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


def test_sharing_largest_values_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[te.autocast.__module__]
    monkeypatch.setattr(module, "_share_amax", lambda group: print)
    compiled = torch.compile(
        Inside(mlp(H, 64), DelayedScaling()), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="enter autocast around it"):
        compiled(torch.randn(8, H))


def test_a_quantized_result_is_refused() -> None:
    model = ops.Sequential(ops.Linear(H, H), ops.Quantize())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with (
        te.autocast(recipe=Float8CurrentScaling()),
        pytest.raises(Exception, match="cannot return a quantized tensor"),
    ):
        compiled(torch.randn(8, H))

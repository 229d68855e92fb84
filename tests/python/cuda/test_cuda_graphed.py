"""Graphed callables give the bits of eager calls, run after run, and say what they cannot do.

A graph quantizes its weights each time it runs, so the eager twins count theirs as changed.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graph_support import (
    ALL,
    RECIPES,
    H,
    data,
    eager,
    low_precision,
    make_model,
    same,
    same_state,
    twins,
)

import ligature as te
from ligature.quantization import note_weights_changed

pytestmark = pytest.mark.usefixtures("_cuda_backend")


# ---- graphed callables


def graph_of(model: Any, recipe: te.recipe.Recipe | None, **options: Any) -> Any:
    return te.make_graphed_callables(
        model, (data(0)[0],), enabled=recipe is not None, recipe=recipe, **options
    )


@ALL
@pytest.mark.parametrize("inside", [True, False])
def test_graphed_module(name: str, inside: bool) -> None:
    """``inside``: called in an autocast, as a te.ops script would."""
    recipe = RECIPES[name]()
    model, twin = twins()
    graphed = graph_of(model, recipe)
    assert graphed is model
    for step in range(5):
        x, dy = data(step)
        mine = x.detach().clone().requires_grad_()
        with low_precision(recipe) if inside else nullcontext():
            y = graphed(mine)
        y.backward(dy)
        wanted = eager(twin, x, dy, recipe)
        same(y.detach(), wanted, f"step {step}: y")
        same(mine.grad, x.grad, f"step {step}: dx")
        same_state(model, twin, f"step {step}:")  # gradients add up meanwhile
    model.eval()
    assert model(data(0)[0]).grad_fn is not None  # as it was, without a graph


@ALL
@pytest.mark.parametrize("cache", [False, True])
def test_graphed_training(name: str, cache: bool) -> None:
    """Three microbatches per step of an optimizer, whose weights the graph sees."""
    recipe = RECIPES[name]()
    model, twin = twins()
    graphed = graph_of(model, recipe, cache_quantized_params=cache)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, twin)]
    for step in range(3):
        for micro in range(3):
            x, dy = data(3 * step + micro)
            y = graphed(x, is_first_microbatch=micro == 0)
            y.backward(dy)
            wanted = eager(twin, x, dy, recipe)
            if not (cache and name == "delayed" and (step or micro)):
                same(y.detach(), wanted, f"step {step} {micro}: y")
        if cache and name == "delayed":
            # A weight keeps the factor of the first microbatch.
            torch.testing.assert_close(
                y.detach(), wanted, rtol=0.2, atol=0.2 * wanted.abs().max().item()
            )
        else:
            same_state(model, twin, f"step {step}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def test_kept_weights_stay_until_the_next_first_microbatch() -> None:
    recipe = te.recipe.MXFP8BlockScaling()
    model = make_model()
    graphed = graph_of(model, recipe, cache_quantized_params=True)
    x, _ = data(0)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="before any first microbatch"):
            graphed(x, is_first_microbatch=False)
        first = graphed(x, is_first_microbatch=True).clone()
        model[1].weight.mul_(2)
        assert torch.equal(graphed(x, is_first_microbatch=False), first)
        assert not torch.equal(graphed(x, is_first_microbatch=True), first)


def test_one_update_per_context() -> None:
    """Two calls inside one autocast are one update of delayed scaling, as without graphs."""
    recipe = RECIPES["delayed"]()
    model, twin = twins()
    graphed = graph_of(model, recipe)
    for step in range(3):
        note_weights_changed()
        with low_precision(recipe):
            for micro in range(2):
                x, dy = data(2 * step + micro)
                y = graphed(x)
                y.backward(dy)
                wanted = twin(x)
                wanted.backward(dy)
                same(y.detach(), wanted.detach(), f"step {step} {micro}: y")
        same_state(model, twin, f"step {step}:")


@pytest.mark.parametrize("name", ["high precision", "delayed", "block"])
@pytest.mark.parametrize("flagged", [False, True])
def test_graphed_main_grad(name: str, flagged: bool) -> None:
    recipe = RECIPES[name]()
    model, twin = twins(accumulate_into_main_grad=True)
    for one in (model, twin):
        for linear in (one[1], one[3]):
            linear.weight.main_grad = torch.ones(linear.weight.shape)
            if flagged:
                linear.weight.grad_added_to_main_grad = False
    graphed = graph_of(model, recipe)
    assert bool((model[1].weight.main_grad == 1).all())  # the warm-up left no trace
    assert not getattr(model[1].weight, "grad_added_to_main_grad", False)
    for step in range(3):
        x, dy = data(step)
        graphed(x).backward(dy)
        eager(twin, x, dy, recipe)
    for i in (1, 3):
        same(model[i].weight.main_grad, twin[i].weight.main_grad, "main_grad")
        same(model[i].weight.grad, twin[i].weight.grad, "grad")
        assert getattr(model[i].weight, "grad_added_to_main_grad", flagged) == flagged
    model[1].weight.main_grad = torch.zeros(4 * H, H)
    with pytest.raises(RuntimeError, match="main_grad"):
        graphed(data(0)[0]).sum().backward()


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_two_modules(name: str) -> None:
    recipe = RECIPES[name]()
    (a, a_twin), (b, b_twin) = twins(), twins()
    x, _ = data(0)
    graphed = te.make_graphed_callables((a, b), ((x,), (x,)), enabled=True, recipe=recipe)
    assert graphed == (a, b)
    for step in range(4):
        x, dy = data(step)
        if step % 2:
            a(x).backward(dy)
            b(x).backward(dy)
            eager(a_twin, x, dy, recipe)
            eager(b_twin, x, dy, recipe)
        else:
            y = b(torch.nn.functional.gelu(a(x)))
            y.backward(dy)
            wanted = eager(lambda x: b_twin(torch.nn.functional.gelu(a_twin(x))), x, dy, recipe)
            same(y.detach(), wanted, f"step {step}: y")
        same_state(a, a_twin, f"step {step}: first")
        same_state(b, b_twin, f"step {step}: second")


def test_functions_and_keywords() -> None:
    model = make_model()

    def function(x: torch.Tensor, *, scale: torch.Tensor, pair: Any, negate: bool) -> Any:
        y = model(x) * scale + pair["a"]
        return {"y": -y if negate else y, "mean": y.detach().mean(), "word": "kept"}

    def arguments(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        x, dy = data(step)
        return x, {"scale": dy[:, :1].clone().requires_grad_(), "pair": {"a": dy}, "negate": True}

    x, kwargs = arguments(0)
    graphed = te.make_graphed_callables(function, (x,), sample_kwargs=kwargs)
    for step in range(3):
        x, kwargs = arguments(step)
        found = graphed(x, **kwargs)
        found["y"].sum().backward()
        got = x.grad, kwargs["scale"].grad
        x.grad = kwargs["scale"].grad = None
        wanted = function(x, **kwargs)
        wanted["y"].sum().backward()
        same(found["y"].detach(), wanted["y"].detach(), "y")
        same(found["mean"], wanted["mean"], "mean")
        assert not found["mean"].requires_grad
        assert found["word"] == "kept"
        same(got[0], x.grad, "dx")
        same(got[1], kwargs["scale"].grad, "dscale")
    with pytest.raises(ValueError, match=r"part of the graph and must be True, got False"):
        graphed(x, **{**kwargs, "negate": False})
    with pytest.raises(TypeError, match="as in the sample"):
        graphed(x)


def test_backward_twice() -> None:
    x, dy = data(0)
    y = graph_of(make_model(), None)(x)
    y.backward(dy, retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph_in_backward"):
        y.backward(dy)
    model, twin = twins()
    x, dy = data(0)
    y = graph_of(model, None, retain_graph_in_backward=True)(x)
    for _ in range(2):
        y.backward(dy, retain_graph=True)
    eager(twin, data(0)[0], dy, None)
    eager(twin, data(0)[0], dy, None)
    same_state(model, twin)


def test_the_warm_up_leaves_no_trace() -> None:
    recipe = RECIPES["delayed"]()
    model, twin = twins()
    for one in (model, twin):
        eager(one, *data(1), recipe)
    model.append(te.ops.Dropout(0.5))
    torch.manual_seed(3)
    wanted = torch.rand(4, device="cuda"), torch.rand(4, device="cpu")
    torch.manual_seed(3)
    graph_of(model, recipe, num_warmup_iters=2)
    assert torch.equal(torch.rand(4, device="cuda"), wanted[0])
    assert torch.equal(torch.rand(4, device="cpu"), wanted[1])
    for i in (1, 3):
        same_state(model[i], twin[i])


def test_dropout_follows_the_seed() -> None:
    model = make_model().append(te.ops.Dropout(0.5))
    graphed = graph_of(model, None)
    x, _ = data(0)
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        y = graphed(x)
        seen.append(y.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


# ---- errors


def test_wrong_calls() -> None:
    model = make_model()
    x, dy = data(0)
    graphed = graph_of(model, None)
    with pytest.raises(ValueError, match=r"argument 0 must be bfloat16 \[128, 128\] on cuda:0"):
        graphed(x[:64])
    with pytest.raises(ValueError, match="got float32"):
        graphed(x.float())
    with pytest.raises(ValueError, match="on cpu"):
        graphed(x.cpu())
    first = graphed(x)
    graphed(x)
    with pytest.raises(RuntimeError, match="backward must run before the next forward"):
        first.backward(dy)
    with pytest.raises(ValueError, match="graphed before"):
        graph_of(model, None)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="outside of autocast"), te.autocast():
        graph_of(make_model(), None)
    plain = te.make_graphed_callables(make_model(), (x.detach(),))
    with pytest.raises(ValueError, match="requires a gradient, and its sample did not"):
        plain(x)
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(RuntimeError, match="has moved"):
        graphed(x)


def test_unused_inputs() -> None:
    x, dy = data(0)
    unused = torch.ones(3, requires_grad=True)

    def function(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(ValueError, match="allow_unused_input=True"):
        te.make_graphed_callables(function, (x, unused))
    graphed = te.make_graphed_callables(function, (x, unused), allow_unused_input=True)
    graphed(x, unused).backward(dy)
    same(x.grad, 2 * dy, "dx")
    assert unused.grad is None


def test_a_graph_inside_a_checkpoint() -> None:
    model, recipe = make_model(), RECIPES["delayed"]()
    graphed = graph_of(model, recipe)
    x, dy = data(0)
    with te.autocast(recipe=recipe):
        y = te.checkpoint(graphed, x)
    with pytest.raises(RuntimeError, match="checkpoint inside what is captured"):
        y.backward(dy)

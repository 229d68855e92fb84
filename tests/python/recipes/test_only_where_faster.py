"""autocast(only_where_faster=True): small calls compute in high precision, and say so."""

from __future__ import annotations

import pytest
import torch
from quantized_reference import RECIPES

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

ops = te.ops
H = 64


def mlp(h: int = H) -> ops.Sequential:
    torch.manual_seed(3)
    return ops.Sequential(
        ops.RMSNorm(h, dtype=torch.bfloat16),
        ops.Linear(h, 2 * h, dtype=torch.bfloat16),
        ops.SwiGLU(),
        ops.Linear(h, h, dtype=torch.bfloat16),
    )


def step(model: ops.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    grads = torch.autograd.grad(y, [leaf, *model.parameters()], torch.ones_like(y))
    return [y.detach(), *grads]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def situation(explained: te.Explanation) -> tuple[str | None, str]:
    (part,) = explained.parts
    return part["situation"]["recipe"], str(explained)


@pytest.mark.parametrize("name", RECIPES)
def test_small_calls(name: str) -> None:
    model, x = mlp(), torch.randn(32, H, dtype=torch.bfloat16)
    plain = step(model, x)
    recipe = RECIPES[name]()
    with te.autocast(recipe=recipe):
        low = step(model, x)
    with te.autocast(recipe=recipe, only_where_faster=True):
        got = step(model, x)
        before, before_text = situation(model.explain(x))
    assert same(got, plain)
    assert not same(got, low)
    recipe_of_call, text = situation(model.explain())
    for recipe_found, note in ((recipe_of_call, text), (before, before_text)):
        assert recipe_found is None
        assert f"{type(recipe).__name__} not used (only_where_faster=True):" in " ".join(
            note.split()
        )
    step(model, x)
    assert "only_where_faster" not in str(model.explain())


def test_contexts_nest() -> None:
    model, x = mlp(), torch.randn(32, H, dtype=torch.bfloat16)
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=recipe, only_where_faster=True):
        with te.autocast(recipe=recipe):
            low = step(model, x)
        plain = step(model, x)
    with te.autocast(recipe=recipe):
        assert same(step(model, x), low)
    assert same(step(model, x), plain)


def test_delayed_scaling_stays_as_it_is() -> None:
    model, x = mlp(), torch.randn(32, H, dtype=torch.bfloat16)
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        step(model, x)
    before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    with te.autocast(recipe=recipe, only_where_faster=True):
        step(model, 100 * x)
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    with te.autocast(recipe=recipe):
        step(model, x)
    assert "recipe DelayedScaling" in str(model.explain())


def test_weights_in_low_precision_stay_so() -> None:
    recipe = te.recipe.Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        model = ops.Sequential(ops.Linear(H, H, dtype=torch.bfloat16))
    x = torch.randn(32, H, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe, only_where_faster=True):
        got = model(x)
        assert situation(model.explain())[0] == "Float8CurrentScaling"
    with te.autocast(recipe=recipe):
        assert torch.equal(got, model(x))


def test_what_has_no_products_follows_the_recipe() -> None:
    model = ops.Sequential(ops.Quantize(forward=True, backward=False))
    with te.autocast(recipe=te.recipe.Float8CurrentScaling(), only_where_faster=True):
        assert model(torch.randn(32, H)).__class__ is not torch.Tensor


def test_a_wrong_argument() -> None:
    with pytest.raises(TypeError, match=r"\[autocast\] only_where_faster must be a bool, got 1"):
        te.autocast(only_where_faster=1)


@pytest.mark.usefixtures("_cuda_backend")
def test_large_calls_and_graphs() -> None:
    recipe = te.recipe.Float8CurrentScaling()
    model, x = mlp(), torch.randn(32, H, dtype=torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=recipe):
        low = model(x)
    graph = torch.cuda.CUDAGraph()
    allowed = te.autocast(recipe=recipe, only_where_faster=True)
    with torch.no_grad(), torch.cuda.graph(graph), allowed:
        captured = model(x)
    graph.replay()
    assert torch.equal(captured, low)

    large, x = mlp(2304), torch.randn(4096, 2304, dtype=torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=recipe, only_where_faster=True):
        large(x)
        assert situation(large.explain())[0] == "Float8CurrentScaling"
        large(x[:1024])
        assert situation(large.explain())[0] is None

"""check_fusion in low precision: within what the recipe's formats round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_reference import RECIPES, SOME_RECIPES

import ligature as te
from ligature.testing import check_fusion

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
SHAPES = [(33, 40), (2, 3, 40)]


def linear_scale() -> list[Any]:
    return [te.ops.BasicLinear(40, 24), te.ops.ConstantScale(-1.5)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_scale_in_the_products(name: str) -> None:
    ops = linear_scale()
    report = check_fusion("BackwardLinearScale", ops, SHAPES, recipe=RECIPES[name]())
    assert report.runs > 10
    assert not ops[0]._handle.recipe_states()
    added = [*linear_scale(), te.ops.AddExtraInput()]
    assert check_fusion("ForwardLinearScaleAdd", added, SHAPES, recipe=RECIPES[name]())


class Scaled(te.ops.FusedOperation):
    """The scale in the products, by the linear's own backward; ``factor`` is a mistake."""

    factor = 1.0

    def __init__(self, linear: Any, scale: Any) -> None:
        super().__init__((linear, scale))

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        linear, scale = self.basic_ops
        dx, (dw,) = linear.op_backward(basic_op_ctxs[0], grad_output)
        dx = None if dx is None else dx * scale.scale * self.factor
        return dx, [(None if dw is None else dw * scale.scale,), ()], [(), ()]


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_one_of_a_user(name: str, monkeypatch: Any) -> None:
    fusion = te.ops.Fusion([te.ops.BasicLinear, te.ops.ConstantScale], Scaled)
    given = {"kind": "backward", "recipe": RECIPES[name](), "max_patterns": 6}
    assert check_fusion(fusion, linear_scale(), SHAPES, **given)
    monkeypatch.setattr(Scaled, "factor", -1.0)
    with pytest.raises(AssertionError, match="gradient of input is off by"):
        check_fusion(fusion, linear_scale(), SHAPES, **given)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="recipe must be a Recipe, got str"):
        check_fusion("BackwardLinearScale", linear_scale(), SHAPES, recipe="mxfp8")  # type: ignore[arg-type]
    recipe = RECIPES["mxfp8"]()
    with pytest.raises(TypeError, match="dtypes must be float32, bfloat16 or float16 under a rec"):
        check_fusion(
            "BackwardLinearScale", linear_scale(), SHAPES, recipe=recipe, dtypes=[torch.float64]
        )
    with pytest.raises(AssertionError, match=r"it does not fire on .*: the gradient is quantized"):
        check_fusion("BackwardLinearBias", te.ops.Linear(40, 8), SHAPES, recipe=recipe)

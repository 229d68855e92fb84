"""What operations have of a recipe: quantizers, roles, neighbours, copies."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from delayed_reference import factor_for, state_of
from quantized_reference import assert_product
from torch.utils._pytree import tree_map

import ligature as te
from ligature.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def run(model, recipe, steps: int = 1, x: torch.Tensor | None = None) -> torch.Tensor:
    for step in range(steps):
        given = torch.randn(16, 32) * (step + 1) if x is None else x
        with te.autocast(recipe=recipe):
            y = model(given)
        y.sum().backward()
    return y


# -- built-in operations


def test_quantizers_of_a_linear() -> None:
    linear = te.ops.BasicLinear(32, 32)
    assert [linear.num_quantizers(mode) for mode in ("forward", "backward")] == [2, 1]
    roles = linear.get_quantizer_roles("forward")
    assert [(r.module_type, r.tensor_type) for r in roles] == [
        ("linear", "input"),
        ("linear", "weight"),
    ]
    assert linear.get_quantizer_roles("backward") == [
        te.QuantizerRole("linear", "grad_output", "BasicLinear")
    ]
    assert linear.get_quantizer("forward", 0) is None
    recipe = DelayedScaling()
    with te.autocast(recipe=recipe):
        quantizer = linear.get_quantizer("forward", 0)
        assert isinstance(quantizer, te.Float8Quantizer)
        assert linear.get_input_quantizer() is quantizer
        assert linear.get_quantizer("forward", 1) is not quantizer
    with te.autocast(recipe=MXFP8BlockScaling()):
        assert isinstance(linear.get_grad_output_quantizer(), te.MXFP8Quantizer)
    assert isinstance(linear.get_input_quantizer(), te.MXFP8Quantizer)  # used last
    with te.autocast(recipe=recipe):
        assert linear.get_quantizer("forward", 0) is quantizer


def test_quantizers_of_others() -> None:
    for op in (te.ops.GELU(), te.ops.Bias(8), te.ops.LayerNorm(8)):
        assert op.num_quantizers("forward") == op.num_quantizers("backward") == 0
        with te.autocast():
            assert op.get_quantizer("forward", 0) is None
            assert op.get_input_quantizer() is None
    composite = te.ops.Linear(32, 32)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert isinstance(composite.get_input_quantizer(), te.Float8CurrentScalingQuantizer)
        assert composite.get_grad_output_quantizer() is None  # of the bias


def test_wrong_mode_and_index() -> None:
    linear = te.ops.BasicLinear(32, 32)
    with pytest.raises(ValueError, match="mode must be 'forward' or 'backward', got 'sideways'"):
        linear.num_quantizers("sideways")
    with te.autocast(), pytest.raises(ValueError, match="has 2 quantizers in forward"):
        linear.get_quantizer("forward", 2)


def test_reset() -> None:
    linear = te.ops.BasicLinear(32, 32)
    recipe, other = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=8)
    run(linear, other, 2)
    run(linear, recipe, 2)
    linear.reset_recipe_state(recipe=recipe)
    forward, backward = state_of(linear)
    for scale, amax, history in (*forward, *backward):
        assert (scale, amax) == (1, 0)
        assert history.shape == (4,)
        assert not history.any()
    with te.autocast(recipe=other):  # there is one state
        assert linear.get_quantizer("forward", 0).scale == 1


def test_the_quantizer_in_python_is_the_one_that_computes() -> None:
    linear = te.ops.BasicLinear(32, 32)
    recipe = DelayedScaling()
    x = torch.rand(16, 32)
    with te.autocast(recipe=recipe):
        quantizer = linear.get_quantizer("forward", 0)
        quantizer.scale = torch.tensor([2.0**-12])
        y = linear(x)
    assert y.abs().max() == 0  # everything is below the smallest value
    assert quantizer.scale.item() == factor_for(448, x)


def test_the_state_goes_where_the_model_goes(device) -> None:
    if device == "cpu":
        pytest.skip("there is no other device")
    recipe = DelayedScaling(amax_history_len=4)
    with torch.device("cpu"):
        model = te.ops.Linear(32, 32)
        run(model, recipe, 2)
    for place in (device, "cpu"):
        model.to(place)
        with torch.device(place):
            seen = state_of(model)[0][0][2].tolist()
            x = torch.randn(16, 32) * 5
            run(model, recipe, x=x)
        scale, _, history = state_of(model)[0][0]
        assert scale.device.type == place
        assert history.tolist() == [x.abs().max().item(), *seen[:3]]


# -- operations written in Python


class Doubled(te.ops.BasicOperation):
    """y = 2 x in the recipe's formats, which notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def num_quantizers(self, mode: str) -> int:
        return 1

    def op_forward(
        self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **unused
    ):
        self.seen.append((input_, prev_op_grad_output_quantizer, next_op_input_quantizer))
        ctx.quantizer = prev_op_grad_output_quantizer
        ctx.save_for_backward(input_)
        values = input_.dequantize() if isinstance(input_, te.QuantizedTensor) else input_
        out = values * 2
        return out if next_op_input_quantizer is None else next_op_input_quantizer(out)

    def op_backward(self, ctx, grad_output):
        self.seen.append((grad_output, *ctx.saved_tensors))
        grad = grad_output * 2
        return (grad if ctx.quantizer is None else ctx.quantizer(grad)), ()


def test_a_python_operation_between_linears() -> None:
    recipe = Float8CurrentScaling()
    middle = Doubled()
    model = te.ops.Sequential(te.ops.LayerNorm(32), middle, te.ops.BasicLinear(32, 32))
    x = torch.randn(16, 32)
    with te.autocast(recipe=recipe):
        y = model(x)
        own, linears = middle.get_input_quantizer(), model[2].get_input_quantizer()
    dy = torch.randn(16, 32)
    y.backward(dy)
    input_, before, after = middle.seen[0]
    assert isinstance(input_, te.Float8Tensor)  # written by the norm
    assert before is None
    assert after is linears
    assert own is not linears
    norm = torch.nn.functional.layer_norm(x, (32,))
    torch.testing.assert_close(input_.dequantize(), own(norm).dequantize())
    hidden = linears(own(norm).dequantize() * 2).dequantize()
    w = model[2].get_quantizer("forward", 1)(model[2].weight.detach()).dequantize()
    assert_product(y, hidden.double() @ w.double().T, torch.float32, "y", recipe)
    grad_output, saved = middle.seen[1]
    assert isinstance(saved, te.Float8Tensor)
    assert torch.equal(saved.rowwise_data, input_.rowwise_data)
    # the linear gives its gradient in high precision, and nobody asked for it otherwise
    q = model[2].get_quantizer("backward", 0)(dy).dequantize()
    assert not isinstance(grad_output, te.QuantizedTensor)
    assert_product(grad_output, q.double() @ w.double(), torch.float32, "dx", recipe)


def test_neighbours_in_backward() -> None:
    """The gradient that a Python operation gives is in the format that the one before wants."""
    recipe = MXFP8BlockScaling()
    middle = Doubled()
    first = te.ops.BasicLinear(32, 32)
    model = te.ops.Sequential(first, middle)
    x = torch.randn(32, 32, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = model(x)
        quantizer = first.get_grad_output_quantizer()
    assert middle.seen[0][1] is quantizer
    assert middle.seen[0][2] is None
    dy = torch.randn(32, 32)
    y.backward(dy)
    assert quantizer.rowwise_usage
    assert quantizer.columnwise_usage
    by_rows = te.MXFP8Quantizer(E4M3, columnwise=False)
    q = by_rows(dy * 2).dequantize()
    by_columns = te.MXFP8Quantizer(E4M3, rowwise=False)
    w = by_columns(first.weight.detach()).dequantize()
    assert_product(x.grad, q.double() @ w.double(), torch.float32, "dx", recipe)


def test_usage_follows_what_the_neighbour_needs() -> None:
    recipe = MXFP8BlockScaling()
    middle = Doubled()
    linear = te.ops.BasicLinear(32, 32)
    usages = []

    def look(op, ctx=None):
        quantizer = linear.get_input_quantizer()
        usages.append((quantizer.rowwise_usage, quantizer.columnwise_usage))

    model = te.ops.Sequential(middle, linear)
    x = torch.randn(32, 32)
    with te.autocast(recipe=recipe):
        model(x)
        look(linear)
        with torch.no_grad():
            model(x)
        look(linear)
    assert usages == [(True, True), (True, False)]


def test_without_a_recipe_nothing_is_quantized() -> None:
    middle = Doubled()
    model = te.ops.Sequential(te.ops.LayerNorm(32), middle, te.ops.BasicLinear(32, 32))
    x = torch.randn(16, 32)
    model(x).sum().backward()
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        model(x)
    for input_, *quantizers in middle.seen:
        assert not isinstance(input_, te.QuantizedTensor)
        assert quantizers == [None, None] or not isinstance(quantizers[0], te.Quantizer)


def test_roles_of_a_python_operation() -> None:
    asked = []

    class Own(Doubled):
        def num_quantizers(self, mode):
            return 3 if mode == "forward" else 1

    class Named(Own):
        def get_quantizer_roles(self, mode):
            return [te.QuantizerRole("attention", f"{mode}{i}", "n") for i in range(3)]

    recipe = CustomRecipe(lambda role: asked.append(role))
    with te.autocast(recipe=recipe):
        Own()(torch.randn(4, 8))
    assert asked == [
        te.QuantizerRole("Own", kind, "Own") for kind in ("input", "weight", "input", "grad_output")
    ]
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match="must give 1 roles"):
        Named()(torch.randn(4, 8))
    assert len(asked) == 4


def test_an_operation_may_say_that_nobody_quantizes_for_it() -> None:
    class Own(Doubled):
        def get_input_quantizer(self):
            return None

    middle = Own()
    with te.autocast(recipe=Float8CurrentScaling()):
        te.ops.Sequential(te.ops.LayerNorm(32), middle)(torch.randn(8, 32))
        assert middle.get_quantizer("forward", 0) is not None
    assert not isinstance(middle.seen[0][0], te.QuantizedTensor)


def test_an_operation_may_choose_its_own_quantizer() -> None:
    chosen = te.MXFP8Quantizer(E5M2)

    class Own(te.ops.BasicOperation):
        seen = None

        def get_input_quantizer(self):
            return chosen

        def op_forward(self, ctx, input_, **unused):
            self.seen = input_
            return input_ * 1

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    own = Own()
    te.ops.Sequential(te.ops.LayerNorm(32), own)(torch.randn(32, 32))
    assert isinstance(own.seen, te.MXFP8Tensor)
    assert own.seen._fp8_dtype == E5M2


def test_the_pieces_of_a_linear_quantize_too() -> None:
    """A fused operation in Python may run the halves of its basic operations."""

    class Fused(te.ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            linear, ctx = self.basic_ops[0], basic_op_ctxs[0]
            y, kept = linear.op_forward_compute(input_, requires_grad=ctx.requires_grad)
            if ctx.requires_grad:
                linear.op_forward_save_ctx(ctx, input_, kept, requires_grad=True)
            return y, [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            dx, grads = self.basic_ops[0].op_backward(basic_op_ctxs[0], grad_output)
            return dx, [grads], [()]

    linear = te.ops.BasicLinear(32, 32)
    x = torch.randn(16, 32, requires_grad=True)
    results = []
    for fused in (False, True):
        x.grad = linear.weight.grad = None
        fusion = te.ops.Fusion([te.ops.BasicLinear], lambda op: Fused([op]))
        handle = te.ops.register_forward_backward_fusion(fusion) if fused else None
        fuser = te.ops.OperationFuser([linear])
        with te.autocast(recipe=MXFP8BlockScaling()):
            y = fuser(x)
        y.square().sum().backward()
        assert isinstance(fuser._forward_ops[0][0], Fused) == fused
        results.append((y.detach(), x.grad, linear.weight.grad))
        if handle is not None:
            handle.unregister()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_changed_builtin_keeps_its_quantizers() -> None:
    class Halved(te.ops.BasicLinear):
        def op_backward(self, ctx, grad_output):
            dx, grads = super().op_backward(ctx, grad_output)
            return dx / 2, grads

    plain, changed = te.ops.BasicLinear(32, 32), Halved(32, 32)
    changed.load_state_dict(plain.state_dict())
    x = torch.randn(16, 32, requires_grad=True)
    results = []
    for op in (plain, changed):
        x.grad = None
        with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
            y = op(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, op.weight.grad, str(state_of(op))))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], 2 * results[1][1])
    assert torch.equal(results[0][2], results[1][2])
    assert results[0][3] == results[1][3]


# -- recipes of the user's


def test_custom_recipe() -> None:
    made = []

    def factory(role):
        made.append(role)
        if role.tensor_type == "weight":
            return te.MXFP8Quantizer(E4M3)
        if role.tensor_type == "input":
            return te.Float8CurrentScalingQuantizer(E4M3, torch.get_default_device())
        return None

    linear = te.ops.BasicLinear(32, 48)
    recipe = CustomRecipe(factory)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = linear(x)
    assert [role.tensor_type for role in made] == ["input", "weight", "grad_output"]
    with te.autocast(recipe=recipe):
        qx, qw = (linear.get_quantizer("forward", i) for i in range(2))
        assert linear.get_quantizer("backward", 0) is None
    w = qw(linear.weight.detach()).dequantize()
    expected = qx(x.detach()).dequantize().double() @ w.double().T
    assert_product(y, expected, torch.float32, "y")


def test_custom_quantizers_are_the_objects_given() -> None:
    class Own(te.Float8CurrentScalingQuantizer):
        pass

    place = torch.get_default_device()
    linear = te.ops.BasicLinear(32, 32)
    with te.autocast(recipe=CustomRecipe(lambda role: Own(E4M3, place))):
        linear(torch.randn(4, 32))
        quantizer = linear.get_input_quantizer()
        assert type(quantizer) is Own
        quantizer.note = 3
        del quantizer
        assert linear.get_input_quantizer().note == 3


def test_custom_recipe_with_factors_of_the_users() -> None:
    scale, amax = torch.tensor([4.0]), torch.zeros(1)

    def factory(role):
        if role.tensor_type != "input":
            return None
        return te.Float8Quantizer(scale, amax, E4M3)

    linear = te.ops.BasicLinear(32, 32)
    x = torch.randn(16, 32)
    with te.autocast(recipe=CustomRecipe(factory)):
        y = linear(x)
    codes = (x * 4).to(torch.float8_e4m3fn).float() / 4
    expected = codes.double() @ linear.weight.detach().double().T
    assert_product(y, expected, torch.float32, "y")
    assert amax == x.abs().max()
    assert scale == 4  # nobody's but the user's


def test_custom_recipes_that_give_nonsense() -> None:
    linear = te.ops.BasicLinear(32, 32)
    x = torch.randn(4, 32)
    wrong = CustomRecipe(lambda role: "fp8")
    with te.autocast(recipe=wrong), pytest.raises(TypeError, match="a Quantizer or None, got"):
        linear(x)
    failing = CustomRecipe(lambda role: 1 / 0)
    with te.autocast(recipe=failing), pytest.raises(ZeroDivisionError):
        linear(x)
    linear(x)


# -- copies

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: torch.load(_saved(m), weights_only=False),
}


def _saved(model) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


class Rounded(te.ops.BasicOperation):
    """Its input after a cast to the recipe's format and back."""

    def num_quantizers(self, mode: str) -> int:
        return 1

    def op_forward(self, ctx, input_, **unused):
        return self.get_quantizer("forward", 0)(input_).dequantize()

    def op_backward(self, ctx, grad_output):
        return self.get_quantizer("backward", 0)(grad_output).dequantize(), ()


def numbers_of(model: Any) -> str:
    """Its state, wherever it is: a pickled one goes to the device of the first call."""
    return str(tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, state_of(model)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", ["Linear", "BasicLinear", "Rounded", "Sequential"])
def test_copies_keep_the_state(way, make) -> None:
    model = {
        "Linear": lambda: te.ops.Linear(32, 32),
        "BasicLinear": lambda: te.ops.BasicLinear(32, 32),
        "Rounded": Rounded,
        "Sequential": lambda: te.ops.Sequential(te.ops.Linear(32, 32)),
    }[make]()
    recipe = DelayedScaling(amax_history_len=3)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            model(x).sum().backward()
    twin = WAYS[way](model)
    if make == "Sequential":
        if way == "copy":
            return  # shares its modules
        model, twin = model[0], twin[0]
    before = numbers_of(model)
    assert numbers_of(twin) == before
    with torch.no_grad():
        for parameter in (*model.parameters(), *(twin.parameters() if way != "copy" else ())):
            parameter.mul_(2)  # a weight is quantized anew
    with te.autocast(recipe=recipe):
        y = model(x * 3)
        assert numbers_of(twin) == before
        assert torch.equal(twin(x * 3), y)
    assert numbers_of(twin) == numbers_of(model) != before


def test_functions_without_a_name_do_not_hinder_pickling() -> None:
    linear = te.ops.Linear(32, 32)
    run(linear, DelayedScaling(amax_compute_algo=lambda history: history.max()))
    assert len(copy.deepcopy(linear).basic_ops[0]._handle.recipe_states()) == 1
    assert pickle.loads(pickle.dumps(linear)).basic_ops[0]._handle.recipe_states() == []

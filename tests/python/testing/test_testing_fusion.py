"""ligature.testing.check_fusion with fusions written in Python, right ones and wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_support import (
    LINEAR_SILU,
    Base,
    FilledForward,
    Joint,
    PiecesBackward,
    PiecesForward,
    ReadingBackward,
    SplitForward,
    silu_grad,
)

import ligature as te
from ligature.testing import Report, check_fusion

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
SHAPES = [(5, 8), (2, 3, 8)]


def make_ops(dtype: torch.dtype, device: torch.device) -> list[Any]:
    return [te.ops.Linear(8, 16, bias=False, dtype=dtype, device=device), te.ops.SiLU()]


def check(cls: type, kind: str, **options: Any) -> Report:
    return check_fusion(te.ops.Fusion(LINEAR_SILU, cls), make_ops, SHAPES, kind=kind, **options)


def fails(cls: type, kind: str, message: str, **options: Any) -> str:
    with pytest.raises(AssertionError, match=re.escape(message)) as error:
        check(cls, kind, **options)
    return str(error.value)


# -- right ones


@pytest.mark.parametrize(
    ("cls", "kind", "options"),
    [
        (PiecesForward, "forward", {}),
        (FilledForward, "forward", {"contexts": "enough"}),
        (SplitForward, "forward", {"contexts": "enough"}),
        (ReadingBackward, "backward", {}),
        (PiecesBackward, "backward", {}),
        (Joint, "joint", {"may_give_unneeded": True}),
    ],
)
def test_right_ones(cls: type, kind: str, options: dict[str, Any]) -> None:
    report = check(cls, kind, **options)
    assert report
    assert report.runs > 40
    assert report.failures == []
    assert str(report) == report.text() == f"all of {report.runs} runs agree"
    assert repr(report) == f"Report(runs={report.runs}, failures=0)"


def test_waste_is_named_with_the_way_to_allow_it() -> None:
    text = fails(Joint, "joint", "gradient of BasicLinear.weight is given, though none is needed")
    assert "(may_give_unneeded=True allows gradients that nobody needs)" in text
    message = "saved tensor 0 of BasicLinear is saved, though backward does not need it"
    text = fails(FilledForward, "forward", message)
    assert "has input_dtype = nothing" not in text  # plain state that is missing is added
    assert '(contexts="enough" allows to save more)' in text


# -- wrong ones


class Backward(Base):
    """A right one, made of the basic operations' halves."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear, silu = self.basic_ops
        dy, _ = silu.op_backward(basic_op_ctxs[1], grad_output)
        dx, (dw,) = linear.op_backward(basic_op_ctxs[0], dy)
        return *self.spoil(basic_op_ctxs, grad_output, dx, dw), [(), ()]

    def spoil(self, ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> tuple[Any, list[Any]]:
        return dx, [(dw,), ()]


def backward(spoil: Callable[..., Any]) -> type:
    return type("Spoiled", (Backward,), {"spoil": lambda self, *args: spoil(*args)})


def test_right_again() -> None:
    assert check(Backward, "backward")
    assert check(Backward, "backward", dtypes=[torch.float16, (torch.bfloat16, torch.float32)])
    assert check(Backward, "backward", dtypes=[torch.float32], autocast=torch.bfloat16)


def test_wrong_gradient_of_the_input() -> None:
    def spoil(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        return None if dx is None else 1.25 * dx, [(dw,), ()]

    fails(backward(spoil), "backward", "gradient of input is off by")
    text = fails(backward(spoil), "backward", "gradient of input", dtypes=[torch.bfloat16])
    assert re.search(
        r"Spoiled, bfloat16 \[2, 3, 8\], input needs a gradient: gradient of input is off by "
        r"[\d.]+ \(allowed [\d.]+\) at \[\d, \d, \d\]",
        text,
    )


def test_wrong_gradient_of_a_parameter_in_one_dtype() -> None:
    def spoil(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        if dw is not None and dw.dtype == torch.bfloat16:
            dw[3, 5] += 2
        return dx, [(dw,), ()]

    text = fails(
        backward(spoil), "backward", "gradient of BasicLinear.weight is off by 2 (allowed "
    )
    assert "at [3, 5]" in text
    assert "float64" not in text
    assert "float32" not in text
    assert check(backward(spoil), "backward", dtypes=[torch.float64, torch.float32])


def test_gradient_of_a_wrong_dtype() -> None:
    def spoil(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        return dx, [(None if dw is None else dw.float(),), ()]

    message = "gradient of BasicLinear.weight has dtype float32, wanted bfloat16"
    fails(backward(spoil), "backward", message)


def test_gradient_missing_and_gradient_not_needed() -> None:
    def missing(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        return dx, [(dw if ctxs[0].input_requires_grad else None,), ()]

    message = "BasicLinear.weight needs a gradient: gradient of BasicLinear.weight is missing"
    fails(backward(missing), "backward", message)

    def needless(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        return dx, [(torch.zeros(16, 8, dtype=dy.dtype) if dw is None else dw,), ()]

    message = "gradient of BasicLinear.weight is given, though none is needed"
    fails(backward(needless), "backward", message)


def test_changed_gradient_and_saved_tensor() -> None:
    def gradient(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        if dy.stride(-1) > 0:
            dy.mul_(2)
        return dx, [(dw,), ()]

    message = "the gradient given for the output was changed"
    fails(backward(gradient), "backward", message)

    def saved(ctxs: Any, dy: Tensor, dx: Any, dw: Any) -> Any:
        ctxs[1].saved_tensors[0].add_(1)
        return dx, [(dw,), ()]

    fails(backward(saved), "backward", "backward changed saved tensor 0 of SiLU")


class Forward(PiecesForward):
    """A right one that can be spoiled."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extra = super().fuser_forward(basic_op_ctxs, input_)
        return self.spoil(basic_op_ctxs, input_, y), extra


def forward(spoil: Callable[..., Any]) -> type:
    return type("Spoiled", (Forward,), {"spoil": lambda self, *args: spoil(self, *args)})


def test_forgotten_saved_tensor_and_wrong_context() -> None:
    def forgets(self: Any, ctxs: Any, x: Tensor, y: Tensor) -> Tensor:
        ctxs[0].save_for_backward()
        return y

    message = "context of BasicLinear has 0 saved tensors, wanted 2"
    fails(forward(forgets), "forward", message)

    def wrong(self: Any, ctxs: Any, x: Tensor, y: Tensor) -> Tensor:
        if ctxs[1].requires_grad:
            ctxs[1].save_for_backward(y)
        return y

    fails(forward(wrong), "forward", "saved tensor 0 of SiLU is off by")

    def attribute(self: Any, ctxs: Any, x: Tensor, y: Tensor) -> Tensor:
        if ctxs[0].requires_grad:
            ctxs[0].weight_dtype = torch.float16
        return y

    message = "context of BasicLinear has weight_dtype = Half, wanted Double"
    fails(forward(attribute), "forward", message)


def test_changed_input_and_parameter() -> None:
    def changes(self: Any, ctxs: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y

    fails(forward(changes), "forward", "input was changed")

    def parameter(self: Any, ctxs: Any, x: Tensor, y: Tensor) -> Tensor:
        self.basic_ops[0].weight.mul_(2)
        return y

    fails(forward(parameter), "forward", "BasicLinear.weight was changed")


def test_output_that_shares_memory() -> None:
    class Alias(Base):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            for op, ctx in zip(self.basic_ops, basic_op_ctxs, strict=True):
                if ctx.requires_grad:
                    op.op_forward_save_ctx(ctx, input_, (), requires_grad=True)
            return input_, [() for _ in self.basic_ops]

    pattern = [te.ops.ConstantScale]
    ones = [te.ops.ConstantScale(1.0)]
    with pytest.raises(AssertionError, match="output shares memory with input"):
        check_fusion(te.ops.Fusion(pattern, Alias), ones, SHAPES, kind="forward")
    check_fusion(te.ops.Fusion(pattern, Alias), ones, SHAPES, kind="forward", may_alias=True)


def test_state_on_the_fused_operation() -> None:
    class Stateful(Base):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            self.kept = input_
            self.weight = self.basic_ops[0].weight.detach().clone()
            y = torch.nn.functional.linear(input_, self.weight)
            return torch.nn.functional.silu(y), [(), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            x, w = self.kept, self.weight
            dy = silu_grad(x @ w.t(), grad_output)
            return dy @ w, [(dy.flatten(0, -2).t() @ x.flatten(0, -2),), ()], [(), ()]

    message = "backward of the first of two forwards: "
    fails(Stateful, "joint", message, may_give_unneeded=True)


def test_parameter_read_in_backward() -> None:
    class Reading(Joint):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            x, _ = basic_op_ctxs[1].saved_tensors
            w = self.basic_ops[0].weight  # whatever it is by now
            dy = silu_grad(x @ w.t(), grad_output)
            return dy @ w, [(dy.flatten(0, -2).t() @ x.flatten(0, -2),), ()], [(), ()]

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            out = super().fuser_forward(basic_op_ctxs, input_)
            if basic_op_ctxs[1].requires_grad:
                basic_op_ctxs[1].save_for_backward(input_, None)
            return out

    message = "BasicLinear.weight edited between forward and backward: gradient of input is off"
    fails(Reading, "joint", message, may_give_unneeded=True)


def test_a_method_that_raises() -> None:
    class Raises(Base):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            raise KeyError("no such thing")

    text = fails(Raises, "backward", "no such thing")
    assert "Raises, float64 [5, 8], input and BasicLinear.weight need gradients: " in text


def test_an_interrupt_ends_the_check() -> None:
    class Interrupted(Base):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(Interrupted, "backward")


# -- how it is called


def test_functions() -> None:
    def fuse(ops: list[Any], **unused: Any) -> list[Any]:
        if [type(op) for op in ops[:2]] == LINEAR_SILU:
            return [PiecesForward(*ops[:2]), *ops[2:]]
        return ops

    assert check_fusion(fuse, make_ops, SHAPES, kind="forward")

    def idle(ops: list[Any], **unused: Any) -> list[Any]:
        return ops

    message = re.escape("idle, float64: it does not fire on [BasicLinear, SiLU]: it left")
    with pytest.raises(AssertionError, match=message):
        check_fusion(idle, make_ops, SHAPES, kind="forward")

    def drops(ops: list[Any], **unused: Any) -> list[Any]:
        return ops[:1]

    message = r"given \[BasicLinear, SiLU\], returned \[BasicLinear\]"
    with pytest.raises(AssertionError, match=message):
        check_fusion(drops, make_ops, SHAPES, kind="joint")


def test_a_pattern_that_does_not_match() -> None:
    fusion = te.ops.Fusion([te.ops.BasicLinear, te.ops.GELU], PiecesForward)
    message = r"PiecesForward, float64: it does not fire on .*: wanted GELU, found SiLU"
    with pytest.raises(AssertionError, match=message):
        check_fusion(fusion, make_ops, SHAPES, kind="forward")
    refuses = te.ops.Fusion(LINEAR_SILU, PiecesForward, predicate=lambda *ops: "not today")
    with pytest.raises(AssertionError, match=r"it does not fire on .*: not today"):
        check_fusion(refuses, make_ops, SHAPES, kind="forward")


def test_composites_and_copies() -> None:
    linear = te.ops.Linear(8, 16)
    ops = [linear, te.ops.SiLU()]
    before = linear.weight.detach().clone()

    class Whole(Base):
        fuser_forward = PiecesForward.fuser_forward

    report = check_fusion(
        te.ops.Fusion([te.ops.Linear, te.ops.SiLU], Whole), ops, SHAPES, kind="forward"
    )
    assert report
    assert linear.weight.dtype == torch.float32
    assert linear.weight.grad is None
    assert torch.equal(linear.weight, before)


def test_extra_inputs_and_channels() -> None:
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    ops = [fork, te.ops.Linear(8, 8), join]
    assert check_fusion("ForwardLinearBiasAdd", ops, SHAPES)
    assert check_fusion("BackwardLinearAdd", ops, SHAPES)
    given = [te.ops.Linear(8, 8), te.ops.AddExtraInput()]
    assert check_fusion("ForwardLinearBiasAdd", given, SHAPES)
    assert check_fusion("ForwardLinearBiasAdd", given, (5, 8), extra_shapes=[(5, 8)])
    shapes = [[(5, 8)], [(2, 3, 8)]]
    assert check_fusion("ForwardLinearBiasAdd", given, SHAPES, extra_shapes=shapes)
    with pytest.raises(AssertionError, match="extra input must have the input's shape"):
        check_fusion("ForwardLinearBiasAdd", given, (5, 8), extra_shapes=[(5, 7)])
    with pytest.raises(ValueError, match="extra_shapes must be given for each of 2 shapes, got 1"):
        check_fusion("ForwardLinearBiasAdd", given, SHAPES, extra_shapes=[[(5, 8)]])


def test_bad_arguments() -> None:
    fusion = te.ops.Fusion(LINEAR_SILU, PiecesForward)
    with pytest.raises(ValueError, match="kind must be 'forward', 'backward' or 'joint', got None"):
        check_fusion(fusion, make_ops, SHAPES)
    with pytest.raises(ValueError, match="no registered fusion named 'Nothing'; there are 'Dense"):
        check_fusion("Nothing", make_ops, SHAPES)
    with pytest.raises(ValueError, match="no forward fusion named 'BackwardLinearAdd'"):
        check_fusion("BackwardLinearAdd", make_ops, SHAPES, kind="forward")
    with pytest.raises(TypeError, match="a fusion is a function, a Fusion or a name, got int"):
        check_fusion(3, make_ops, SHAPES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fusible operations, got torch.nn.modules.*GELU"):
        check_fusion(fusion, [torch.nn.GELU()], SHAPES, kind="forward")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="contexts must be 'exact' or 'enough', got 'some'"):
        check_fusion(fusion, make_ops, SHAPES, kind="forward", contexts="some")
    with pytest.raises(ValueError, match="a check needs at least one shape"):
        check_fusion(fusion, make_ops, [], kind="forward")
    with pytest.raises(TypeError, match="dtypes must be floating, got Int"):
        check_fusion(fusion, make_ops, SHAPES, kind="forward", dtypes=[torch.int32])
    with pytest.raises(ZeroDivisionError):
        check_fusion(fusion, lambda: [1 / 0], SHAPES, kind="forward")


def test_leaves_torch_as_it_was() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        check(PiecesForward, "forward")
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.rand(4), wanted)

"""Messages name what is wrong, not what came of it: parameters, layouts, gradients, lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ligature as te

ops = te.ops
X = torch.randn(2, 8, device="cpu")


def raises(error: type[Exception], message: str) -> Any:
    return pytest.raises(error, match=re.escape(message))


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 8))


# -- dtypes of parameters

WRONG_DTYPES = [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
PARAMETERS: list[tuple[Callable[[], torch.nn.Module], str, str]] = [
    (lambda: ops.Linear(8, 4), "weight", "Long[4, 8]"),
    (lambda: ops.Linear(8, 4), "bias", "Long[4]"),
    (lambda: ops.BasicLinear(8, 4), "weight", "Long[4, 8]"),
    (lambda: ops.LayerNorm(8), "weight", "Long[8]"),
    (lambda: ops.LayerNorm(8), "bias", "Long[8]"),
    (lambda: ops.RMSNorm(8), "weight", "Long[8]"),
    (lambda: ops.Bias(8), "bias", "Long[8]"),
]


@pytest.mark.parametrize(("make", "name", "got"), PARAMETERS)
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
def test_dtype_of_a_parameter(
    make: Callable[[], torch.nn.Module], name: str, got: str, dtype: torch.dtype
) -> None:
    op = make()
    value = getattr(op, name).detach().to(dtype)
    setattr(op, name, torch.nn.Parameter(value, requires_grad=False))
    if dtype is not torch.int64:
        got = ""
    message = (
        f"[{type(op).__name__}] {name}'s dtype must be float32, bfloat16, float16 or float64, got "
        f"{got}"
    )
    with raises(TypeError, message):
        op(x())
    with raises(TypeError, message):
        ops.Sequential(ops.Identity(), op)(x())


# -- layouts


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "nested":
        return torch.nested.nested_tensor([tensor, tensor[:1]])
    if layout == "jagged":
        return torch.nested.nested_tensor([tensor, tensor[:1]], layout=torch.jagged)
    return {
        "coo": tensor.to_sparse,
        "csr": tensor.to_sparse_csr,
        "csc": tensor.to_sparse_csc,
        "bsr": lambda: tensor.to_sparse_bsr((1, 1)),
    }[layout]()


SPARSE = {"coo": "Sparse", "csr": "SparseCsr", "csc": "SparseCsc", "bsr": "SparseBsr"}


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse).*")
@pytest.mark.parametrize("layout", [*SPARSE, "nested", "jagged"])
@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "GELU", "Sequential"])
def test_layout_of_the_input(name: str, layout: str) -> None:
    op = {
        "Linear": lambda: ops.Linear(8, 4),
        "LayerNorm": lambda: ops.LayerNorm(8),
        "GELU": lambda: ops.GELU(),
        "Sequential": lambda: ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 4)),
    }[name]()
    label = "RMSNorm" if name == "Sequential" else name
    if layout in SPARSE:
        got = f"one with layout {SPARSE[layout]}; give its to_dense()"
    else:
        got = "a nested one; give its values(), or torch.nested.to_padded_tensor() of it"
    with raises(TypeError, f"[{label}] input must be a dense tensor, got {got}"):
        op(in_layout(x(), layout))


@pytest.mark.filterwarnings("ignore:.*Sparse.*")
def test_layout_of_parameters_and_extra_inputs() -> None:
    linear = ops.Linear(8, 4)
    linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse())
    with raises(TypeError, "[Linear] weight must be a dense tensor, got one with layout Sparse"):
        linear(x())
    with raises(TypeError, "[AddExtraInput] extra input 0 must be a dense tensor, got one with"):
        ops.AddExtraInput()(x(), x().to_sparse())


# -- main_grad


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (
            lambda: torch.zeros(4, 8, dtype=torch.int64),
            TypeError,
            "[Linear] main_grad must be a dense tensor of float32, bfloat16, float16 or float64, "
            "got Long",
        ),
        (lambda: torch.zeros(4, 8, dtype=torch.complex64), TypeError, "got ComplexFloat"),
        (lambda: torch.zeros(4, 8).to(torch.float8_e4m3fn), TypeError, "got Float8_e4m3fn"),
        (lambda: torch.zeros(4, 8).to_sparse(), TypeError, "got Float with layout Sparse"),
        (
            lambda: torch.zeros(4, 8, device="meta"),
            ValueError,
            "[Linear] main_grad must be on the weight's device",
        ),
        (
            lambda: torch.zeros(8, 4),
            ValueError,
            "[Linear] main_grad must be [4, 8] like the weight",
        ),
        (lambda: "x", TypeError, "[Linear] main_grad must be a tensor, got <class 'str'>"),
        (lambda: None, RuntimeError, "[Linear] accumulate_into_main_grad is set, but the weight"),
    ],
)
def test_main_grad(buffer: Callable[[], Any], error: type[Exception], message: str) -> None:
    linear = ops.Linear(8, 4, accumulate_into_main_grad=True)
    linear.weight.main_grad = buffer()
    linear.weight.grad_added_to_main_grad = False
    y = linear(x())
    with raises(error, message):
        y.sum().backward()
    assert linear.weight.grad_added_to_main_grad is False


# -- groups


@pytest.mark.parametrize("group", ["world", 3, [0, 1], object()])
def test_groups(group: Any) -> None:
    wanted = "must be a torch.distributed.ProcessGroup or None, got"
    with raises(TypeError, f"[autocast] amax_reduction_group {wanted}"):
        te.autocast(amax_reduction_group=group)
    with raises(TypeError, f"[autocast] amax_reduction_group {wanted}"):
        te.fp8_autocast(fp8_group=group)
    e4m3 = te.DType.kFloat8E4M3
    with raises(TypeError, f"[Float8CurrentScalingQuantizer] amax_reduction_group {wanted}"):
        te.Float8CurrentScalingQuantizer(e4m3, with_amax_reduction=True, amax_reduction_group=group)
    wanted = "must be a torch.distributed.ProcessGroup, a DeviceMesh of one dimension or None, got"
    with raises(TypeError, f"[Linear] tensor_parallel_group {wanted}"):
        ops.Linear(8, 4, tensor_parallel_mode="column", tensor_parallel_group=group)
    with raises(TypeError, f"[Bias] tensor_parallel_group {wanted}"):
        ops.Bias(8, tensor_parallel_group=group)


def test_groups_that_are_some() -> None:
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    for group in (None, outside):
        with te.autocast(recipe=te.recipe.DelayedScaling(), amax_reduction_group=group):
            ops.Linear(8, 4)(x())


# -- a gradient that is None, and None for a list


@pytest.mark.parametrize("name", ["Bias", "GELU", "LayerNorm", "BasicLinear", "ConstantScale"])
def test_operations_called_with_none(name: str) -> None:
    arguments = {"Bias": (8,), "LayerNorm": (8,), "BasicLinear": (8, 4), "ConstantScale": (2.0,)}
    op = getattr(ops, name)(*arguments.get(name, ()))
    ctx = ops.OperationContext()
    given = x()
    output, tensors = op.op_forward_compute(given, requires_grad=True)
    op.op_forward_save_ctx(ctx, given, tensors, requires_grad=True)
    with raises(TypeError, f"[{name}] grad_output must be a tensor, got None"):
        op.op_backward(ctx, None)
    with raises(TypeError, f"[{name}] input must be a tensor, got None"):
        op.op_forward_compute(None, requires_grad=True)
    with raises(TypeError, f"[{name}] input must be a tensor, got None"):
        op.fuser_forward([ctx], None, basic_op_extra_inputs=[()])
    with raises(TypeError, f"[{name}] grad_output must be a tensor, got None"):
        op.fuser_backward([ctx], None, basic_op_grad_extra_outputs=[()])
    for what, call in {
        "basic_op_ctxs": lambda: op.fuser_forward(None, given, basic_op_extra_inputs=[()]),
        "basic_op_extra_inputs": lambda: op.fuser_forward([ctx], given, basic_op_extra_inputs=None),
        "basic_op_grad_extra_outputs": lambda: op.fuser_backward(
            [ctx], output, basic_op_grad_extra_outputs=None
        ),
    }.items():
        with raises(TypeError, f"[{name}] {what} must be a list with an entry for each"):
            call()


@pytest.mark.parametrize("op", [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.ScaledSReLU()])
def test_operations_with_branches_called_without_them(op: Any) -> None:
    """Ended the process before."""
    with raises(RuntimeError, "call its fuser_forward"):
        op.op_forward_compute(x(), requires_grad=True)


class Branches(ops.BasicOperation):
    """What its methods return is given to it."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, forward: Any, backward: Any) -> None:
        super().__init__()
        self.results = (forward, backward)

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **unused: Any) -> Any:
        return input_ * 2, self.results[0]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> Any:
        return (grad_output, *self.results[1])


@pytest.mark.parametrize("given", [None, 3])
def test_lists_that_are_none(given: Any) -> None:
    e = x().requires_grad_()
    got = "None" if given is None else "<class 'int'>"
    start = "must be a list with 1 entries, one per basic operation, got"
    with raises(TypeError, f"[Branches] extra outputs {start} {got}"):
        Branches(given, ())(x(), e)
    for what, results in (
        ("parameter gradients", (given, [(x(),)])),
        ("extra input gradients", ([()], given)),
    ):
        y, _ = Branches([(x(),)], results)(x().requires_grad_(), e)
        with raises(TypeError, f"[Branches] {what} {start} {got}"):
            y.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.OperationFuser(None),
            "[OperationFuser] ops must be a list of operations, got None",
        ),
        (
            lambda: ops.OperationFuser(3),
            "[OperationFuser] ops must be a list of operations, got int",
        ),
        (
            lambda: ops.Sequential(None),
            "[Sequential] module '0' must be a torch.nn.Module, got None",
        ),
        (
            lambda: ops.Sequential(ops.GELU(), strict=None),
            "[strict] fusions must be a list of names, got None",
        ),
        (lambda: te.strict(None), "[strict] fusions must be a list of names, got None"),
        (
            lambda: ops.Sequential().extend(None),
            "[Sequential] what it is extended by must be modules, got None",
        ),
        (lambda: ops.Sequential() + None, "[Sequential] what is added must be modules, got None"),
        (
            lambda: ops.Sequential(ops.GELU())(X, op_kwargs=[{}]),
            "[Sequential] op_kwargs must map operations or their indices to dicts, got list",
        ),
        (
            lambda: ops.FusedOperation(None),
            "[FusedOperation] basic_ops must be a list of operations, got None",
        ),
        (
            lambda: ops.Fusion(None, ops.FusedOperation),
            "[Fusion] pattern must be a list of classes or functions, got None",
        ),
        (
            lambda: ops.Fusion([ops.GELU], None),
            "[Fusion] factory must be a function, got None",
        ),
        (
            lambda: ops.OperationFuser([ops.GELU()])(X, basic_op_kwargs=[None]),
            "basic_op_kwargs must be a list of dicts, one per basic operation, got None in it",
        ),
        (
            lambda: ops.OperationFuser([ops.GELU()])(X, basic_op_kwargs=3),
            "basic_op_kwargs must be a list of dicts, one per basic operation, got <class 'int'>",
        ),
        (lambda: ops.Reshape(None), "[Reshape] shape must be sizes, got None"),
        (lambda: ops.LayerNorm(None), "[LayerNorm] normalized_shape must be sizes, got None"),
    ],
)
def test_none_for_a_list(call: Callable[[], Any], message: str) -> None:
    with raises(TypeError, message):
        call()

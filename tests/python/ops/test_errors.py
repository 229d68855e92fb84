"""Every message: which operation, which argument, what was wanted and what was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ligature as te

X = (2, 8)


def raises(error: type[Exception], message: str) -> Any:
    return pytest.raises(error, match=re.escape(message))


# -- inputs


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (
            lambda: te.ops.Linear(8, 4),
            (16, 7),
            "[Linear] input's last dimension must be in_features=8, got [16, 7]",
        ),
        (
            lambda: te.ops.Linear(8, 4, bias=False),
            (8, 2, 3),
            "[Linear] input's last dimension must be in_features=8, got [8, 2, 3]",
        ),
        (
            lambda: te.ops.BasicLinear(8, 4),
            (),
            "[BasicLinear] input's last dimension must be in_features=8, got []",
        ),
        (
            lambda: te.ops.Bias(8),
            (2, 7),
            "[Bias] input's last dimension must be size=8, got [2, 7]",
        ),
        (
            lambda: te.ops.LayerNorm(8),
            (2, 7),
            "[LayerNorm] input's trailing dimensions must be normalized_shape=[8], got [2, 7]",
        ),
        (
            lambda: te.ops.RMSNorm((3, 8)),
            (2, 8),
            "[RMSNorm] input's trailing dimensions must be normalized_shape=[3, 8], got [2, 8]",
        ),
        (
            lambda: te.ops.RMSNorm((3, 8)),
            (8,),
            "[RMSNorm] input's trailing dimensions must be normalized_shape=[3, 8], got [8]",
        ),
        (
            lambda: te.ops.L2Normalization(),
            (),
            "[L2Normalization] input must have at least one dimension, got []",
        ),
        (lambda: te.ops.GELU(), (), "[GELU] input must have at least one dimension, got []"),
        (
            lambda: te.ops.GLU(),
            (2, 7),
            "[GLU] input's last dimension must be even, got [2, 7]",
        ),
        (
            lambda: te.ops.SwiGLU(glu_interleave_size=4),
            (2, 12),
            "[SwiGLU] input's last dimension must be divisible by 2*glu_interleave_size=8, "
            "got [2, 12]",
        ),
        (
            lambda: te.ops.Reshape((3, -1)),
            X,
            "[Reshape] input must have as many elements as shape=[3, -1], got [2, 8]",
        ),
        (
            lambda: te.ops.Reshape((2, 7)),
            X,
            "[Reshape] input must have as many elements as shape=[2, 7], got [2, 8]",
        ),
    ],
)
def test_shape_of_the_input(
    make: Callable[[], torch.nn.Module], shape: tuple[int, ...], message: str
) -> None:
    with raises(ValueError, message):
        make()(torch.randn(shape))
    with raises(ValueError, message):
        te.ops.Sequential(te.ops.Identity(), make())(torch.randn(shape))


GATED = "GLU GEGLU QGEGLU ReGLU SReGLU SwiGLU ClampedSwiGLU SiTUGLU".split()  # noqa: SIM905


@pytest.mark.parametrize("name", GATED)
def test_gated_activation_of_an_odd_dimension(name: str) -> None:
    with raises(ValueError, f"[{name}] input's last dimension must be even, got [3, 5]"):
        getattr(te.ops, name)()(torch.randn(3, 5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize(
    "name", ["Linear", "LayerNorm", "SiLU", "Bias", "Dropout", "ConstantScale"]
)
def test_dtype_of_the_input(name: str, dtype: torch.dtype) -> None:
    arguments = {"Linear": (8, 4), "SiLU": (), "Dropout": (0.5,), "ConstantScale": (2.0,)}
    op = getattr(te.ops, name)(*arguments.get(name, (8,)))
    message = f"[{name}] input's dtype must be float32, bfloat16, float16 or float64, got "
    with raises(TypeError, message):
        op(torch.ones(X, dtype=dtype))


@pytest.mark.parametrize("value", [None, 3.0, [1.0, 2.0], "x"])
def test_input_that_is_no_tensor(value: Any) -> None:
    message = f"[Linear] input must be a tensor, got {type(value)}"
    with raises(TypeError, message):
        te.ops.Linear(8, 4)(value)
    with raises(TypeError, message):
        te.ops.Sequential(te.ops.Linear(8, 4), te.ops.GELU())(value)


def test_input_and_parameters_on_two_devices() -> None:
    x, meta = torch.randn(X), torch.randn(X, device="meta")
    for op, what in [
        (te.ops.Linear(8, 4, device="meta"), "weight"),
        (te.ops.LayerNorm(8, device="meta"), "weight"),
        (te.ops.Bias(8, device="meta"), "bias"),
    ]:
        name = type(op).__name__
        message = (
            f"[{name}] input and {what} must be on one device, got input on {x.device} and {what}"
        )
        with raises(ValueError, f"{message} on meta"):
            op(x)
    with raises(ValueError, "[Linear] input and weight must be on one device, got input on meta"):
        te.ops.Linear(8, 4)(meta)
    with raises(
        ValueError,
        f"extra input 0 of [AddExtraInput] must be on the input's device {x.device}, got meta",
    ):
        te.ops.AddExtraInput()(x, meta)


# -- extra inputs


def test_number_of_extra_inputs() -> None:
    x = torch.randn(X)
    with raises(ValueError, "the operations [AddExtraInput] take 1 extra inputs, got 0"):
        te.ops.AddExtraInput()(x)
    with raises(ValueError, "the operations [GELU] take 0 extra inputs, got 1"):
        te.ops.GELU()(x, x)
    with raises(ValueError, "[BasicLinear, Bias, AddExtraInput] take 1 extra inputs, got 2"):
        te.ops.Sequential(te.ops.Linear(8, 8), te.ops.AddExtraInput())(x, x, x)
    model = te.ops.Sequential(te.ops.AddExtraInput(), torch.nn.ReLU(), te.ops.AddExtraInput())
    with raises(ValueError, "[Sequential] takes 2 extra inputs, got 1"):
        model(x, x)


def test_extra_input_that_is_no_tensor() -> None:
    x = torch.randn(X)
    with raises(TypeError, "an extra input must be a tensor, got <class 'float'>"):
        te.ops.AddExtraInput()(x, 3.0)
    with raises(TypeError, "extra input 0 of [AddExtraInput] must be a tensor, got none"):
        te.ops.AddExtraInput()(x, None)


def test_extra_input_of_another_shape_or_dtype() -> None:
    x = torch.randn(X)
    with raises(
        ValueError, "[AddExtraInput] extra input must have the input's shape [2, 8], got [8]"
    ):
        te.ops.AddExtraInput()(x, torch.randn(8))
    with raises(
        TypeError, "[AddExtraInput] extra input must have a floating dtype, got Long[2, 8]"
    ):
        te.ops.AddExtraInput()(x, torch.ones(X, dtype=torch.int64))
    for shape in [(3,), (), (2, 8), (2, 1)]:
        with raises(
            ValueError,
            "[ScaledSwiGLU] scales must have the input's shape without its last dimension, [2], "
            f"got {list(shape)}",
        ):
            te.ops.ScaledSwiGLU()(x, torch.randn(shape))
    with raises(TypeError, "[ScaledSReLU] scales must have a floating dtype, got Long[2]"):
        te.ops.ScaledSReLU()(x, torch.ones(2, dtype=torch.int64))


# -- parameters


def test_parameters_of_another_shape() -> None:
    x = torch.randn(X)
    linear, norm, bias = te.ops.Linear(8, 4), te.ops.LayerNorm(8), te.ops.Bias(8)
    linear.weight = torch.nn.Parameter(torch.randn(4, 7))
    with raises(ValueError, "[Linear] weight must be [4, 8], got [4, 7]"):
        linear(x)
    norm.bias = torch.nn.Parameter(torch.randn(2, 4))
    with raises(ValueError, "[LayerNorm] bias must be [8], got [2, 4]"):
        norm(x)
    bias.bias = torch.nn.Parameter(torch.randn(1))
    with raises(ValueError, "[Bias] bias must be [8], got [1]"):
        bias(x)


def test_parameter_that_is_gone() -> None:
    linear = te.ops.Linear(8, 4)
    linear.weight = None
    with raises(TypeError, "[Linear] parameter 'weight' must be a tensor, got <class 'NoneType'>"):
        linear(torch.randn(X))


# -- constructors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: te.ops.Linear(0, 4), "[Linear] in_features must be positive, got 0"),
        (lambda: te.ops.Linear(4, -1), "[Linear] out_features must be positive, got -1"),
        (lambda: te.ops.BasicLinear(0, 4), "[BasicLinear] in_features must be positive, got 0"),
        (lambda: te.ops.Bias(0), "[Bias] size must be positive, got 0"),
        (
            lambda: te.ops.LayerNorm(0),
            "[LayerNorm] normalized_shape must be one or more positive sizes, got [0]",
        ),
        (
            lambda: te.ops.RMSNorm(()),
            "[RMSNorm] normalized_shape must be one or more positive sizes, got []",
        ),
        (lambda: te.ops.LayerNorm(4, eps=-1.0), "[LayerNorm] eps must be zero or more, got -1"),
        (lambda: te.ops.RMSNorm(4, eps=torch.nan), "[RMSNorm] eps must be zero or more, got nan"),
        (
            lambda: te.ops.RMSNorm(4, sm_margin=-1),
            "[RMSNorm] sm_margin must be zero or more, got -1",
        ),
        (
            lambda: te.ops.L2Normalization(eps=-1.0),
            "[L2Normalization] eps must be zero or more, got -1",
        ),
        (lambda: te.ops.Dropout(1.5), "[Dropout] p must be in [0, 1], got 1.5"),
        (lambda: te.ops.Dropout(-0.1), "[Dropout] p must be in [0, 1], got -0.1"),
        (lambda: te.ops.Dropout(torch.nan), "[Dropout] p must be in [0, 1], got nan"),
        (
            lambda: te.ops.Reshape((-1, -1)),
            "[Reshape] shape must be sizes of which at most one is -1, got [-1, -1]",
        ),
        (
            lambda: te.ops.Reshape((-2,)),
            "[Reshape] shape must be sizes of which at most one is -1, got [-2]",
        ),
        (
            lambda: te.ops.SwiGLU(glu_interleave_size=0),
            "[SwiGLU] glu_interleave_size must be positive, got 0",
        ),
        (
            lambda: te.ops.ScaledSwiGLU(-2),
            "[ScaledSwiGLU] glu_interleave_size must be positive, got -2",
        ),
        (
            lambda: te.ops.ClampedSwiGLU(limit=0.0),
            "[ClampedSwiGLU] limit must be positive, got 0",
        ),
        (
            lambda: te.ops.ClampedSwiGLU(limit=torch.nan),
            "[ClampedSwiGLU] limit must be positive, got nan",
        ),
        (
            lambda: te.ops.ClampedSwiGLU(alpha=torch.inf),
            "[ClampedSwiGLU] alpha must be finite, got inf",
        ),
        (
            lambda: te.ops.ClampedSwiGLU(alpha=1e39),
            "[ClampedSwiGLU] alpha must be finite in float32, got 1e+39",
        ),
        (
            lambda: te.ops.ScaledClampedQGeGLU(glu_linear_offset=torch.nan),
            "[ScaledClampedQGeGLU] glu_linear_offset must be finite, got nan",
        ),
        *[
            (
                lambda op=op, name=name, value=value: getattr(te.ops, op)(**{name: value}),
                f"[{op}] {name} must be {message}",
            )
            for op in ("SiTUGLU", "ScaledSiTUGLU")
            for name in ("beta1", "beta2")
            for value, message in (
                (0.0, "positive, got 0"),
                (-1.0, "positive, got -1"),
                (torch.nan, "positive, got nan"),
                (torch.inf, "finite, got inf"),
                (1e39, "finite in float32, got 1e+39"),
            )
        ],
        (
            lambda: te.ops.Linear(4, 4, tensor_parallel_mode="diagonal"),
            "[Linear] tensor_parallel_mode must be None, 'column' or 'row', got 'diagonal'",
        ),
        (
            lambda: te.ops.Sequential(recompute="all"),
            "[Sequential] recompute must be 'none' or 'cheap', got 'all'",
        ),
        (
            lambda: te.ops.OperationFuser([te.ops.GELU()], recompute="all"),
            "recompute must be 'none' or 'cheap', got 'all'",
        ),
        (lambda: te.ops.OperationFuser([]), "a fuser needs at least one operation"),
        (lambda: te.ops.Fusion([], te.ops.FusedOperation), "a pattern of at least one operation"),
    ],
)
def test_bad_value_in_a_constructor(make: Callable[[], Any], message: str) -> None:
    with raises(ValueError, message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.ops.Linear(4.5, 4),
        lambda: te.ops.Linear("4", 4),
        lambda: te.ops.Linear(4, 4, False),
        lambda: te.ops.GELU(approximate="none"),
        lambda: te.ops.SwiGLU(glu_interleave_size=2.5),
        lambda: te.ops.LayerNorm(8, 1e-5),
        lambda: te.ops.AddExtraInput(True),
        lambda: te.ops.AddExtraInput(in_place="yes"),
        lambda: te.ops.Sequential(3),
        lambda: te.ops.Sequential(torch.nn.functional.gelu),
        lambda: te.ops.OperationFuser([torch.nn.GELU()]),
        lambda: te.ops.Fusion(["Linear"], te.ops.FusedOperation),
        lambda: te.ops.register_forward_fusion("Linear"),
    ],
)
def test_wrong_kind_in_a_constructor(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        make()


# -- keyword arguments


def test_unknown_keyword_arguments() -> None:
    x = torch.randn(X)
    with raises(TypeError, "[GELU] takes no keyword argument 'approximate'"):
        te.ops.GELU()(x, approximate="none")
    model = te.ops.Sequential(te.ops.Linear(8, 8), te.ops.GELU())
    with raises(TypeError, "[GELU] takes no keyword argument 'a'"):
        model(x, op_kwargs={1: {"a": 1}})
    with raises(ValueError, "[Sequential] op_kwargs are for SiLU, which is not one of its"):
        model(x, op_kwargs={te.ops.SiLU(): {}})
    with pytest.raises(IndexError):
        model(x, op_kwargs={5: {}})
    with raises(
        ValueError, "keyword arguments must be given for each of 3 basic operations, got 1"
    ):
        te.ops.OperationFuser(list(model))(x, basic_op_kwargs=[{}])


# -- an error comes before any kernel runs and before any state changes


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: te.ops.Linear(7, 3),
        lambda: te.ops.LayerNorm(7),
        lambda: te.ops.Reshape((3, 5)),
        lambda: te.ops.SwiGLU(glu_interleave_size=3),
        lambda: te.ops.Linear(8, 3, device="meta"),
    ],
)
def test_a_later_operation_is_wrong(wrong: Callable[[], torch.nn.Module]) -> None:
    add = te.ops.AddExtraInput(in_place=True)
    model = te.ops.Sequential(te.ops.Dropout(0.5), add, te.ops.Linear(8, 8), te.ops.GELU(), wrong())
    x, extra = torch.randn(X, requires_grad=True), torch.randn(X)
    before, version, random = extra.clone(), extra._version, torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(f"[{type(model[-1]).__name__}]")):
            model(x, extra)
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.equal(extra, before)
        assert extra._version == version
    model[-1] = te.ops.Linear(8, 3)
    model(x, extra).sum().backward()
    assert not torch.equal(extra, before)
    assert x.grad is not None


@pytest.mark.parametrize("wrong", [{"size": (3, 8)}, {"size": X, "dtype": torch.int64}])
def test_a_later_extra_input_is_wrong(wrong: dict, device: str) -> None:
    extra = torch.zeros(**wrong)
    model = te.ops.Sequential(te.ops.Dropout(0.5), te.ops.GELU(), te.ops.AddExtraInput())
    random = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError), match=r"\[AddExtraInput\] extra input must have"):
        model(torch.randn(X, generator=torch.Generator(device)), extra)
    assert torch.equal(torch.get_rng_state(), random)


def test_an_extra_input_from_a_channel_is_wrong() -> None:
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "r", output_to_caller=False)
    join.set_extra_input_channel(0, "r")
    model = te.ops.Sequential(te.ops.Dropout(0.5), fork, te.ops.Linear(8, 4), join)
    random = torch.get_rng_state()
    x = torch.ones(X)
    message = "[AddExtraInput] extra input must have the input's shape [2, 4], got [2, 8]"
    with raises(ValueError, message):
        model(x)
    assert torch.equal(torch.get_rng_state(), random)


def test_keyword_arguments_are_checked_first() -> None:
    model = te.ops.Sequential(te.ops.Dropout(0.5), te.ops.GELU())
    random = torch.get_rng_state()
    with raises(TypeError, "[GELU] takes no keyword argument 'a'"):
        model(torch.ones(X), op_kwargs={1: {"a": 1}})
    assert torch.equal(torch.get_rng_state(), random)


def test_the_next_good_call_works() -> None:
    model = te.ops.Sequential(te.ops.LayerNorm(8), te.ops.Linear(8, 4), te.ops.SiLU())
    x = torch.randn(X, requires_grad=True)
    wanted = model(x)
    for bad in (torch.randn(2, 7), torch.ones(X, dtype=torch.int64), None):
        with pytest.raises((ValueError, TypeError)):
            model(bad)
        got = model(x)
        assert torch.equal(got, wanted)
    got.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in model.parameters())

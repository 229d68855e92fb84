"""Random pipelines against plain PyTorch in float64. `make soak` runs many more of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pipeline_check
import pipeline_ops
import pipeline_reference
import pytest
import quantized_reference
import reference
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from pipeline_case import Call, Case, Fuse, Nest, Op, every_op, smaller
from pipeline_check import TooLargeError, check
from pipelines import cases, numbered_case, recipe_cases
from quantized_reference import RECIPES, is_native

import ligature as te
from ligature import _C

pytestmark = [
    pytest.mark.usefixtures("device", "one_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

#: Of this many cases each built-in fusion is part, and each operation.
ENOUGH = 250
#: A GPU is waited for after each of thousands of small steps: where there is one, one of so many
#: cases is run. What they cover is told on a CPU.
SHARE = 3 if torch.cuda.is_available() else 1


@settings(
    max_examples=ENOUGH // SHARE,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(case=cases)
def test_random_pipelines(case: Case) -> None:
    try:
        check(case)
    except TooLargeError:
        assume(False)


@settings(
    max_examples=50 // SHARE,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(case=recipe_cases)
def test_random_pipelines_in_low_precision(case: Case) -> None:
    try:
        check(case)
    except TooLargeError:
        assume(False)


def test_a_soak_in_low_precision() -> None:
    fused: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for number in range(0, 60, SHARE):
        case = numbered_case(7, number, recipes=True)
        names[case.recipe] += 1
        try:
            fused += check(case)
        except TooLargeError:
            pass
        except Exception as error:
            error.add_note(f"{case!r}\nmake soak ARGS='--seed 7 --recipes --case {number}'")
            raise
    if SHARE > 1:
        return
    assert len(names) > len(RECIPES) - 4
    assert {"ForwardLinearBiasActivation", "DenseMLP", "Pieces"} <= set(fused)
    kinds = {op.kind for n in range(60) for op in every_op(numbered_case(7, n, recipes=True).ops)}
    assert {"Quantize", "Linear", "BasicLinear"} <= kinds


def test_a_soak_and_what_it_covers() -> None:
    fused: Counter[str] = Counter()
    left_out = 0
    for number in range(0, ENOUGH, SHARE):
        try:
            fused += check(numbered_case(7, number))
        except TooLargeError:
            left_out += 1
        except Exception as error:
            error.add_note(
                f"{numbered_case(7, number)!r}\nmake soak ARGS='--seed 7 --case {number}'"
            )
            raise
    assert left_out < ENOUGH / 50
    if SHARE > 1:
        return
    # Those that pay on one kind of GPU alone have sizes there that are not random.
    on_gpus = {"BackwardLinearActivation", "BackwardLinearBias"}
    over_ranks = {"OverlapForwardLinear", "OverlapBackwardLinear", "OverlapWeightGrads"}
    made = {name for name in te.ops.fused.__all__ if getattr(te.ops.fused, name).__name__ == name}
    assert made - on_gpus - over_ranks <= set(fused)
    assert {"Pieces", "SplitPieces"} <= set(fused)
    kinds = {op.kind for n in range(ENOUGH) for op in every_op(numbered_case(7, n).ops)}
    # What rounding sends to another expert cannot be compared: test_routing has the router.
    assert {*_C.operation_names()} - {"TopKRouter"} | {"Linear", *pipeline_ops.GUESTS} <= kinds


# -- the data


def test_a_case_prints_as_the_python_that_makes_it() -> None:
    for number in range(50):
        case = numbered_case(1, number, recipes=number % 2 == 1)
        assert eval(repr(case)) == case
    assert numbered_case(1, 3) == numbered_case(1, 3) != numbered_case(2, 3)


def test_smaller_cases_are_smaller() -> None:
    case = numbered_case(1, 5)
    candidates = list(smaller(case))
    assert candidates
    assert all(len(repr(candidate)) < len(repr(case)) for candidate in candidates)


# -- what it has found

LINEAR = {"in_features": 8, "out_features": 8, "dtype": "float64"}
BIAS = {"size": 4, "dtype": "float64"}
CALL = Call(seed=1, shape=(3, 8))
VIEW = Op("AddExtraInput", {"in_place": True}, extra=("", "every second"))

FOUND: dict[str, Case] = {
    "gradients through a view that was added to in place": Case(
        ops=(Op("MakeExtraOutput"), Op("BasicLinear", LINEAR), VIEW, Op("SiLU")),
        calls=(
            replace(CALL, grad="none", extra_grads=("none",)),
            replace(CALL, extra_grads=("computed",)),
            replace(CALL, extra_grads=("computed",), backward="some"),
        ),
    ),
    "pieces under autocast": Case(
        ops=(Op("ReLU"), Op("ConstantScale", {"scale": 0.5})),
        calls=(CALL,),
        dtype="float32",
        autocast="bfloat16",
        fusions=(Fuse("joint", ("ReLU", "ConstantScale")),),
    ),
    "pieces and a channel": Case(
        ops=(
            Op("Linear", LINEAR),
            Op("MakeExtraOutput", gives="c", to_caller=False),
            Op("SiLU"),
            Op("AddExtraInput", takes="c"),
            Op("SiLU"),
        ),
        calls=(CALL,),
        fusions=(Fuse("forward", ("SiLU", "AddExtraInput")),),
    ),
    "the flag of an input that is returned without gradients": Case(
        ops=(Op("MakeExtraOutput"), Op("Identity")),
        calls=(replace(CALL, mode="no_grad"), replace(CALL, mode="inference")),
    ),
    "float64 under autocast": Case(
        ops=(Op("Linear", LINEAR), Op("torch.Linear", LINEAR), Op("ScaledSReLU")),
        calls=(CALL,),
        autocast="bfloat16",
    ),
    "gradients that share memory and are added to": Case(
        ops=(Op("Reshape", {"shape": (-1, 2, 4)}), Op("AddExtraInput"), Op("Bias", BIAS)),
        calls=(replace(CALL, backward="twice"),),
    ),
    "main_grad behind a context filled by hand": Case(
        ops=(Op("BasicLinear", {**LINEAR, "accumulate_into_main_grad": True}), Op("SiLU")),
        calls=(CALL, replace(CALL, seed=2)),
        fusions=(Fuse("forward", ("BasicLinear", "SiLU"), "FilledLinearSiLU"),),
    ),
}


FLOAT = {"in_features": 32, "out_features": 32, "bias": False, "dtype": "float32"}
FLOATS = Case(calls=(replace(CALL, shape=(5, 32)),), dtype="float32")
FOUND |= {
    "factors of delayed scaling that began without gradients": replace(
        FLOATS,
        ops=(Op("Linear", FLOAT),),
        calls=(replace(CALL, shape=(5, 32), mode="inference"), *FLOATS.calls),
        recipe="delayed",
    ),
    "a quantized weight that was made without gradients": replace(
        FLOATS,
        ops=(Op("Linear", FLOAT),),
        calls=(replace(CALL, shape=(5, 32), mode="inference"), *FLOATS.calls),
        recipe="block",
    ),
    "a gradient that is quantized before it is scaled": replace(
        FLOATS, ops=(Op("Linear", FLOAT), Op("ConstantScale", {"scale": -1.5})), recipe="mxfp8"
    ),
    "rows that repeat, whose errors do not average out": Case(
        ops=(
            Op("GLU"),
            Op("RMSNorm", {"normalized_shape": 16, "dtype": "float16"}),
            Op("Linear", {**FLOAT, "in_features": 16, "out_features": 12}),
            Op("SReLU", hooks=("forward", "forward_pre", "backward")),
            Op("BasicLinear", {"in_features": 12, "out_features": 16, "dtype": "bfloat16"}),
            Op("BasicLinear", {"in_features": 16, "out_features": 6, "dtype": "float16"}),
        ),
        calls=(Call(seed=272247, shape=(66, 32), layout="expanded"),),
        dtype="bfloat16",
        autocast="float16",
        recipe="current",
    ),
}
NORM = {"normalized_shape": 4, "dtype": "float64"}
FOUND |= {
    f"a split form behind {first.kind}, which returns its input": Case(
        ops=(Op("GLU"), first, *others),
        calls=(CALL,),
        training=False,
        fusions=(
            Fuse("forward", (first.kind, *(op.kind for op in others)), "SplitPieces", "function"),
        ),
    )
    for first, *others in (
        (Op("Quantize", {"backward": True}), Op("LayerNorm", NORM)),
        (Op("Identity"), Op("Reshape", {"shape": (-1, 2)}), Op("SiLU")),
        (Op("Dropout", {"p": 0.3}), Op("Bias", BIAS), Op("Identity")),
    )
}

#: The reference knew neither that a weight's gradient is made in autocast's dtype, nor how far
#: float64 is off behind a norm of equal values.
WIDE = {"in_features": 33, "out_features": 6, "dtype": "float32"}
COLUMN = {"dtype": "float64", "zero_centered_gamma": True}
FOUND |= {
    "the gradient of a float32 weight under float16": Case(
        ops=(Op("Linear", WIDE),),
        calls=(Call(seed=606251, shape=(4, 33)),),
        autocast="float16",
        recipe="delayed e5m2",
    ),
    "norms of one value and of equal ones": Case(
        ops=(
            Op("LayerNorm", {"normalized_shape": 1, **COLUMN}),
            Op("LayerNorm", {"normalized_shape": (66, 1), **COLUMN}),
        ),
        calls=(Call(seed=555733, shape=(66, 1)),),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    check(FOUND[name])


# -- what it would find


class WrongGradient(pipeline_ops.Pieces):
    error = 1e-4

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        dx, *rest = super().fuser_backward(*args, **kwargs)
        return dx * (1 + self.error), *rest


class WrongOutput(pipeline_ops.Pieces):
    error = 1e-4

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        y, extra = super().fuser_forward(*args, **kwargs)
        return y * (1 + self.error), extra


class ChangedInput(pipeline_ops.Pieces):
    def fuser_forward(self, ctxs: Any, input_: Any, **kwargs: Any) -> Any:
        input_.mul_(1)
        return super().fuser_forward(ctxs, input_, **kwargs)


class WrongDtype(pipeline_ops.Pieces):
    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        y, extra = super().fuser_forward(*args, **kwargs)
        return y.float(), extra


class LostGradient(pipeline_ops.Pieces):
    """Of what comes through a channel."""

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        dx, params, extras = super().fuser_backward(*args, **kwargs)
        return dx, params, [tuple(None for _ in per_op) for per_op in extras]


class ForgottenParameter(pipeline_ops.Pieces):
    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        dx, params, extras = super().fuser_backward(*args, **kwargs)
        return dx, [tuple(None for _ in per_op) for per_op in params], extras


class StateOfTheFirstCall(pipeline_ops.Pieces):
    """Keeps what belongs into the context; found when backward runs after a second call."""

    def fuser_forward(self, ctxs: Any, input_: Any, **kwargs: Any) -> Any:
        self.__dict__["last"] = input_.sum()
        return super().fuser_forward(ctxs, input_, **kwargs)

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        dx, *rest = super().fuser_backward(*args, **kwargs)
        return dx * self.last.sign(), *rest


MUTANTS = [
    (WrongGradient, "gradient of"),
    (WrongOutput, "output 0"),
    (ChangedInput, "input 0 counts as changed"),
    (WrongDtype, "output 0"),
    (LostGradient, "gradient of"),
    (ForgottenParameter, "gradient of 1.bias: None"),
    (StateOfTheFirstCall, "gradient of"),
]


def mutant_case(dtype: str) -> Case:
    """A fusion over a bias, a SiLU and the end of a channel."""
    linear = {"in_features": 8, "out_features": 8, "dtype": dtype}
    return Case(
        ops=(
            Op("MakeExtraOutput", gives="c", to_caller=False),
            Op("Bias", {"size": 8, "dtype": dtype}),
            Op("SiLU"),
            Op("AddExtraInput", takes="c"),
            Nest(ops=(Op("Linear", linear), Op("GELU"))),
        ),
        calls=(CALL, replace(CALL, seed=2, shape=(2, 3, 8))),
        dtype=dtype,
        late=True,
        fusions=(Fuse("joint", ("Bias", "SiLU", "AddExtraInput"), "Mutant"),),
    )


@pytest.mark.parametrize(("mutant", "message"), MUTANTS)
def test_a_wrong_fusion_is_caught(mutant: type, message: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(pipeline_ops.STYLES, "Mutant", pipeline_ops.Pieces)
    check(mutant_case("float64"))
    monkeypatch.setitem(pipeline_ops.STYLES, "Mutant", mutant)
    with pytest.raises(AssertionError, match=message):
        check(mutant_case("float64"))


@pytest.mark.parametrize("mutant", [WrongGradient, WrongOutput])
@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.5)]
)
def test_a_wrong_fusion_is_caught_in_low_precision(
    dtype: str, error: float, mutant: type, monkeypatch: Any
) -> None:
    monkeypatch.setitem(pipeline_ops.STYLES, "Mutant", pipeline_ops.Pieces)
    check(mutant_case(dtype))
    monkeypatch.setattr(mutant, "error", error)
    monkeypatch.setitem(pipeline_ops.STYLES, "Mutant", mutant)
    with pytest.raises(AssertionError, match=r"where .* is allowed"):
        check(mutant_case(dtype))


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("mutant", [WrongGradient, WrongOutput])
def test_a_wrong_fusion_is_caught_under_a_recipe(name: str, mutant: type, monkeypatch: Any) -> None:
    """By the reference in float64, and by what is not fused."""
    case = replace(mutant_case("float32"), recipe=name)
    monkeypatch.setitem(pipeline_ops.STYLES, "Mutant", pipeline_ops.Pieces)
    check(case)
    # Tensor cores sum up FP8 products with so few bits that many values change their codes.
    native = is_native(RECIPES[name](), torch.get_default_device())
    monkeypatch.setattr(mutant, "error", 0.5 if native else 1e-2)
    monkeypatch.setitem(pipeline_ops.STYLES, "Mutant", mutant)
    with pytest.raises(AssertionError, match=r"where .* is allowed"):
        check(case)
    monkeypatch.setattr(pipeline_check, "has_quantize", lambda case: True)
    with pytest.raises(AssertionError, match=r"unfused.*where .* is allowed"):
        check(case)


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
def test_random_cases_tell_a_wrong_format(orientation: str, monkeypatch: Any) -> None:
    """Block scales that are a little off, in the reference."""
    right = getattr(quantized_reference, orientation)
    monkeypatch.setattr(
        quantized_reference, orientation, lambda *args, **kwargs: 1.01 * right(*args, **kwargs)
    )
    assert first_difference(20, recipes=True)


def first_difference(count: int, recipes: bool = False) -> str:
    for number in range(count):
        try:
            check(numbered_case(3, number, recipes))
        except TooLargeError:
            pass
        except AssertionError as error:
            return str(error)
    return ""


def wrong_l2(x: torch.Tensor, *, eps: float = 1e-6, **unused: Any) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1.001 * eps).sqrt()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("GELU", lambda x: torch.nn.functional.gelu(x)),
        ("SReLU", lambda x: reference.relu(x) ** 2.001),
        ("SwiGLU", lambda x, **unused: reference.swiglu(x)),
        ("l2_normalization", wrong_l2),
    ],
)
def test_random_cases_tell_a_wrong_formula(
    name: str, wrong: Callable[..., Any], monkeypatch: Any
) -> None:
    """The reference is changed, which is as good as a change of what it is compared to."""
    assert first_difference(20) == ""
    if name == "l2_normalization":
        for module in (reference, pipeline_reference):
            monkeypatch.setattr(module, name, wrong)
    elif name == "SwiGLU":
        monkeypatch.setitem(reference._WITH_OPTIONS, name, (wrong, ()))
    else:
        monkeypatch.setitem(reference.ACTIVATIONS, name, wrong)
    assert first_difference(150)

"""What all recipes have in common: fields that are checked, and a twin in C++.

The twin is made from the fields, and again after one was set. A field that is set takes effect with
the next call, also inside an open ``autocast``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

from .. import _C
from .scope import RECIPES


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which FP8 or FP4 type; its value tells the largest number, forward and backward.

    ``HYBRID`` is ``E4M3`` in forward and ``E5M2`` for gradients.
    """

    E2M1 = _Largest(max_fwd=6, max_bwd=6)
    E4M3 = _Largest(max_fwd=448, max_bwd=448)
    E5M2 = _Largest(max_fwd=57344, max_bwd=57344)
    HYBRID = _Largest(max_fwd=448, max_bwd=57344)


@dataclass(frozen=True)
class MMParams:
    """How a product's sums are accumulated, where a GPU has products of FP8 with one factor per
    tensor: moved to float32 now and then, or fast. Elsewhere they are in float32 anyway."""

    use_split_accumulator: bool = True


SPLIT = MMParams()
NO_SPLIT = MMParams(use_split_accumulator=False)


@dataclass(frozen=True)
class QParams:
    """How the tensors of one role are quantized; each recipe uses the fields of its formats."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Check = tuple[str, Callable[[Any], bool]]
BOOL: Check = ("a bool", _is_bool)
INT: Check = ("an int", _is_int)
STR: Check = ("a str", lambda value: isinstance(value, str))
FORMAT: Check = ("a Format", lambda value: isinstance(value, Format))
MM: Check = ("an MMParams", lambda value: isinstance(value, MMParams))
FUNCTION: Check = ("a function", callable)
MAYBE_FUNCTION: Check = ("a function or None", lambda value: value is None or callable(value))
NAME_OR_FUNCTION: Check = (
    "a str or a function",
    lambda value: isinstance(value, str) or callable(value),
)
ATTENTION: dict[str, Check] = {"fp8_dpa": BOOL, "fp8_mha": BOOL}
PRODUCTS: dict[str, Check] = {
    "fp8_gemm_fprop": MM,
    "fp8_gemm_dgrad": MM,
    "fp8_gemm_wgrad": MM,
}


class Recipe:
    """Base class of the recipes."""

    _name: ClassVar[str] = ""
    _checks: ClassVar[dict[str, Check]] = {}
    #: Attributes that hold the QParams of the input, the weight and the output's gradient.
    _params: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return cls._name == "DelayedScaling"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is FP8 with a factor from the tensor itself."""
        return cls._name == "Float8CurrentScaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is FP8 with one factor per tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 with float factors per block of 128."""
        return cls._name == "Float8BlockScaling"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8."""
        return cls._name == "MXFP8BlockScaling"

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4."""
        return cls._name == "NVFP4BlockScaling"

    @classmethod
    def custom(cls) -> bool:
        """Whether the user chooses each quantizer."""
        return cls._name == "CustomRecipe"

    # -- fields

    def __post_init__(self) -> None:
        for name in self._checks:
            self._check(name, getattr(self, name))
        self._take_twin(self._make_twin(self._values()))

    def _take_twin(self, twin: _C.Recipe) -> None:
        self.__dict__["_twin"] = twin
        self.__dict__["_key"] = twin.key  # traced code reads it

    def _be_known(self) -> str:
        RECIPES[self._native.key] = self._native
        return "known"

    # A compiler runs it once, while it traces.
    _be_known._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _check(self, name: str, value: Any) -> None:
        wanted, is_right = self._checks[name]
        if not is_right(value):
            raise TypeError(f"[{type(self).__name__}] {name} must be {wanted}, got {value!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_twin" not in self.__dict__:  # while it is made
            object.__setattr__(self, name, value)
            return
        if name in self._checks:
            self._check(name, value)
        elif name in self._params:
            if not isinstance(value, QParams):
                raise TypeError(f"[{type(self).__name__}] {name} must be a QParams, got {value!r}")
        else:
            raise AttributeError(f"[{type(self).__name__}] there is no field '{name}'")
        now = self._make_twin({**self._values(), name: value})
        before = self._native
        self.__dict__[name] = value
        self._take_twin(now)
        _C.replace_recipe(before, now)

    def _values(self) -> dict[str, Any]:
        """Every field, and the QParams that were set."""
        values = {name: self.__dict__[name] for name in self._checks}
        values.update({n: self.__dict__[n] for n in self._params if n in self.__dict__})
        return values

    def _default_params(self, name: str) -> QParams:
        raise AttributeError(name)

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._params:
            return self._default_params(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- the twin

    @property
    def _native(self) -> _C.Recipe:
        twin: _C.Recipe | None = self.__dict__.get("_twin")
        if twin is None:
            twin = self._make_twin(self._values())
            self._take_twin(twin)
        return twin

    def _options(self, values: dict[str, Any]) -> dict[str, Any]:
        """The options of the twin, for these values of the fields."""
        raise TypeError(f"{type(self).__name__} is not a recipe of Ligature's")

    def _make_twin(self, values: dict[str, Any]) -> _C.Recipe:
        options = self._options(values)
        for name, role in zip(self._params, ("input", "weight", "grad_output"), strict=False):
            if name in values:
                options[role] = self._param_options(values[name])
        host = (weakref.ref(self), type(self), dict(values))
        return _C.make_recipe(self._name, options, host)

    def _param_options(self, params: QParams) -> dict[str, Any]:
        return {}

    def _can_be_described(self) -> bool:
        """Whether another process could have the like: all its functions can be imported."""
        functions = [value for value in self._values().values() if callable(value)]
        return not any("#" in function_key(function) for function in functions)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_twin", "_key")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_twin"] = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe) or type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = []
        for name, value in self._values().items():
            text = value.name if isinstance(value, Format) else repr(value)
            parts.append(f"{name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"


def object_of(host: tuple[Any, type, dict[str, Any]], native: _C.Recipe) -> Recipe:
    """The recipe that a twin was made for, or an equal one when it is gone or was changed."""
    reference, cls, values = host
    recipe: Recipe | None = reference()
    if recipe is not None and recipe._native.key == native.key:
        return recipe
    made: Recipe = object.__new__(cls)
    made.__dict__.update(values, _twin=native, _key=native.key)
    return made


class UnknownFunction:
    """Stands for a function that a checkpoint names, until a recipe comes that has it."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, *args: Any) -> torch.Tensor:
        raise RuntimeError(
            f"[DelayedScaling] recipe state was loaded for the function '{self.key}', which no "
            "recipe has brought"
        )


def function_key(function: Any) -> str:
    """Tells functions apart; one that can be imported has the same key in every process."""
    if isinstance(function, UnknownFunction):
        return function.key
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", function)
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', '')}"
    if owner is None and _is_importable(inner):
        return name
    return f"{name}#{id(owner)}.{id(inner)}"


def _is_importable(function: Any) -> bool:
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in getattr(function, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    return found is function


def fp8_name(recipe: Recipe, value: Format) -> str:
    """The name of an FP8 format; refuses others."""
    if value is Format.E2M1:
        raise ValueError(
            f"[{type(recipe).__name__}] fp8_format must be Format.E4M3, E5M2 or HYBRID, got {value}"
        )
    return value.name


def split_accumulation(values: dict[str, Any]) -> dict[str, bool]:
    """Of each product of a linear layer."""
    return {name: bool(values[name].use_split_accumulator) for name in PRODUCTS}

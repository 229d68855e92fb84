"""What all recipes have in common: fields that are checked, and a twin in C++.

The twin is made from the fields, and again after one was set. A field that is set takes effect with
the next call, also inside an open ``autocast``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch.compiler import is_dynamo_compiling

from .. import _C
from .scope import know


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
#: What a field of such a type must be.
_CHECKS: dict[Any, Check] = {
    bool: ("a bool", _is_bool),
    int: ("an int", _is_int),
    str: ("a str", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
    Callable: ("a function", callable),
    Format: ("a Format", lambda value: isinstance(value, Format)),
    MMParams: ("an MMParams", lambda value: isinstance(value, MMParams)),
}
#: Of every recipe; the core knows the names.
_CHECK_OVERRIDE: Check = (
    "None, 'high_precision' or 'dequantized'",
    lambda value: value is None or (isinstance(value, str) and value != ""),
)


def _check_of(name: str, annotation: Any) -> Check:
    """What a field must be: any of the types that it is annotated with."""
    if name == "backward_override":
        return _CHECK_OVERRIDE
    types = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    checks = [_CHECKS[get_origin(one) or one] for one in types]
    wanted = " or ".join(text for text, _ in checks)
    return wanted, lambda value: any(is_right(value) for _, is_right in checks)


_warned: set[tuple[str, str]] = set()


def _warn_ignored(recipe: str, name: str) -> None:
    if (recipe, name) in _warned:
        return
    _warned.add((recipe, name))
    warnings.warn(
        f"[{recipe}] the argument '{name}' is not one of its fields and is ignored, as Transformer "
        "Engine's recipes do",
        stacklevel=4,
    )


class Recipe:
    """Base class of the recipes."""

    #: Fields that stand first in a repr.
    _first: ClassVar[tuple[str, ...]] = ()
    # What recipe_class finds out:
    _name: ClassVar[str] = ""
    #: All fields, in order.
    _names: ClassVar[tuple[str, ...]] = ()
    _checks: ClassVar[dict[str, Check]] = {}
    #: The fields that the core knows too, those of a QParams as "role.field".
    _known: ClassVar[frozenset[str]] = frozenset()
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
        know(self._native)
        return "known"

    # A compiler runs it once, while it traces.
    _be_known._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _check(self, name: str, value: Any) -> None:
        wanted, is_right = self._checks[name]
        if not is_right(value):
            raise TypeError(f"[{type(self).__name__}] {name} must be {wanted}, got {value!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_twin" not in self.__dict__:  # while it is made, or in traced code
            object.__setattr__(self, name, value)
            if "_key" in self.__dict__:
                self._take_key()
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

    # -- in traced code: a compiler cannot make a twin, but it runs a function of constants once

    def _init_traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ignored: list[str]
    ) -> None:
        names = type(self)._names
        if len(args) > len(names):
            raise TypeError(f"[{type(self).__name__}] takes {names}, got {len(args)} arguments")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in names:
            value = given[name] if name in given else getattr(type(self), name)
            object.__setattr__(self, name, value)
        self._take_key(ignored)

    def _take_key(self, ignored: Sequence[str] = ()) -> None:
        set_params = [name for name in self._params if name in self.__dict__]
        values = [_as_constants(self.__dict__[name]) for name in type(self)._names]
        params = [_as_constants(self.__dict__[name]) for name in set_params]
        key = _known_key(
            type(self), tuple(values), tuple(set_params), tuple(params), tuple(ignored)
        )
        object.__setattr__(self, "_key", key)

    # -- the twin

    @property
    def _native(self) -> _C.Recipe:
        twin: _C.Recipe | None = self.__dict__.get("_twin")
        if twin is None:
            twin = self._make_twin(self._values())
            self._take_twin(twin)
        return twin

    def _check_values(self, values: dict[str, Any]) -> None:
        """Refuses values of fields that the core does not know."""

    def _plain(self, name: str, value: Any) -> Any:
        """A field's value as the core takes it."""
        if isinstance(value, Format):
            if value is Format.E2M1:
                raise ValueError(
                    f"[{type(self).__name__}] {name} must be Format.E4M3, E5M2 or HYBRID, got "
                    f"{value}"
                )
            return value.name
        if isinstance(value, MMParams):
            return bool(value.use_split_accumulator)
        if isinstance(value, str):
            return str.__str__(value)
        return int(value) if _is_int(value) else value

    def _make_twin(self, values: dict[str, Any]) -> _C.Recipe:
        if not self._name:
            raise TypeError(f"{type(self).__name__} is not a recipe of Ligature's")
        self._check_values(values)
        plain: dict[str, Any] = {}
        functions: dict[str, tuple[Callable[..., Any], str]] = {}
        for name, value in values.items():
            if isinstance(value, QParams):
                for field in fields(QParams):
                    if f"{name}.{field.name}" in self._known:
                        kind = bool if isinstance(field.default, bool) else float
                        plain[f"{name}.{field.name}"] = kind(getattr(value, field.name))
            elif callable(value):
                functions[name] = (value, function_key(value))
            elif name in self._known:
                plain[name] = self._plain(name, value)
        made_from = (weakref.ref(self), type(self), dict(values))
        return _C.make_recipe(self._name, plain, functions, made_from)

    def _can_be_described(self) -> bool:
        """Whether another process could have the like: all its functions can be imported."""
        functions = [value for value in self._values().values() if callable(value)]
        return not any("#" in function_key(function) for function in functions)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_twin", "_key")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = inspect.signature(type(self).__init__).parameters
        for name in self._checks.keys() - state.keys():  # fields that it was pickled without
            self.__dict__[name] = given[name].default
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


R = TypeVar("R", bound=Recipe)


@dataclass_transform(eq_default=False)
def recipe_class(cls: type[R]) -> type[R]:
    """Makes a dataclass of a recipe, one that can be made in traced code as well.

    Its constructor ignores names that it does not know, with a warning once for each.
    """
    made = dataclass(repr=False, eq=False)(cls)
    made._name = cls.__name__
    made._names = tuple(field.name for field in fields(made))  # type: ignore[arg-type]
    annotations = get_type_hints(made)
    in_order = dict.fromkeys((*made._first, *made._names))
    made._checks = {name: _check_of(name, annotations[name]) for name in in_order}
    known = _C.recipe_fields(made._name)
    made._known = frozenset(known)
    made._params = tuple(dict.fromkeys(name.split(".")[0] for name in known if "." in name))
    plain: Any = made.__init__

    @functools.wraps(plain)
    def init(self: R, *args: Any, **given: Any) -> None:
        ignored = [name for name in given if name not in made._names]
        fitting = {name: value for name, value in given.items() if name in made._names}
        if is_dynamo_compiling():
            self._init_traced(args, fitting, ignored)
            return
        for name in ignored:
            _warn_ignored(type(self).__name__, name)
        plain(self, *args, **fitting)

    made.__init__ = init  # type: ignore[assignment, method-assign]
    return made


def _as_constants(value: Any) -> Any:
    """A value as a compiler hands it to a function that it runs: objects as their fields."""
    if isinstance(value, MMParams):
        return ("MMParams", value.use_split_accumulator)
    if isinstance(value, QParams):
        return (
            "QParams",
            value.power_2_scale,
            value.amax_epsilon,
            value.random_hadamard_transform,
            value.stochastic_rounding,
            value.fp4_2d_quantization,
        )
    return value


def _from_constants(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return (MMParams if value[0] == "MMParams" else QParams)(*value[1:])


def _known_key(
    cls: type[Recipe],
    values: tuple[Any, ...],
    names: tuple[str, ...],
    params: tuple[Any, ...],
    ignored: tuple[str, ...],
) -> str:
    for name in ignored:
        _warn_ignored(cls.__name__, name)
    made = cls(*map(_from_constants, values))
    for name, value in zip(names, params, strict=True):
        setattr(made, name, _from_constants(value))
    made._be_known()
    return made._native.key


# A compiler runs it once, while it traces.
_known_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


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

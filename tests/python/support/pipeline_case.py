"""A random pipeline as plain data: it prints as the Python that makes it again, and it shrinks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

Shape = tuple[int, ...]


class _Data:
    """Prints what differs from the defaults, one item of a tuple of data per line."""

    def __repr__(self) -> str:
        parts = []
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            default = item.default_factory() if item.default is MISSING else item.default
            if value != default:
                parts.append(f"{item.name}={_text(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(item, _Data) for item in value):
        return "(\n" + textwrap.indent("".join(f"{item!r},\n" for item in value), "    ") + ")"
    return repr(value)


def _none() -> Any:
    return None


@dataclass(frozen=True, repr=False)
class Op(_Data):
    """One module: an operation of Ligature, ``torch.X``, or one of pipeline_ops."""

    kind: str = field(default_factory=_none)
    options: dict[str, Any] = field(default_factory=dict)
    takes: str = ""  # the channel of its extra input
    gives: str = ""  # the channel of its extra output
    to_caller: bool = True  # whether what it gives to a channel is returned too
    extra: tuple[str, str] = ("", "contiguous")  # dtype ("": the current one) and layout
    frozen: tuple[str, ...] = ()  # parameters
    hooks: tuple[str, ...] = ()
    strided: bool = False  # whether its weight is a transposed tensor
    tied: int = 0  # operations with the same number are one module


@dataclass(frozen=True, repr=False)
class Nest(_Data):
    """A container inside the container."""

    kind: str = "ligature"  # or "torch"
    ops: tuple[Any, ...] = ()
    recompute: str = "none"
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Fuse(_Data):
    """A fusion that is registered while the case runs."""

    kind: str = "forward"  # "backward", "joint"
    pattern: tuple[str, ...] = ()
    style: str = "Pieces"  # a class of pipeline_ops
    form: str = "declarative"  # "function"
    prepend: bool = True
    since: int = 0  # the call before which it is registered


@dataclass(frozen=True, repr=False)
class Call(_Data):
    """One call of the model, and the backward after it."""

    seed: int = field(default_factory=_none)
    shape: Shape = field(default_factory=_none)
    layout: str = "contiguous"
    grad: str = "leaf"  # the input: "leaf", "computed" or "none"
    extra_grads: tuple[str, ...] = ("leaf",)  # of the extra inputs, in turn
    frozen: str = "as said"  # "none", "all"
    mode: str = "grad"  # "no_grad", "inference"
    unused: tuple[int, ...] = ()  # outputs that get no gradient
    backward: str = "once"  # "twice" on a kept graph, "some" gradients only
    grad_layout: str = "contiguous"


@dataclass(frozen=True, repr=False)
class Case(_Data):
    ops: tuple[Any, ...] = ()
    calls: tuple[Call, ...] = ()
    dtype: str = "float64"  # of the input
    autocast: str = ""
    recipe: str = ""  # a name in quantized_reference
    recompute: str = "none"
    training: bool = True
    fuser: bool = False  # an OperationFuser instead of a Sequential
    copied: bool = False  # a deep copy of the model is called
    late: bool = False  # all forwards before the first backward
    fusions: tuple[Fuse, ...] = ()


def every_op(ops: tuple[Any, ...]) -> Iterator[Op]:
    """The operations, those of inner containers too."""
    for op in ops:
        if isinstance(op, Nest):
            yield from every_op(op.ops)
        else:
            yield op


# -- smaller cases


def _without(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    size = len(items)
    while size >= 1:
        for at in range(0, len(items) - size + 1):
            yield items[:at] + items[at + size :]
        size //= 2


def _plainer(data: Any, keep: tuple[str, ...]) -> Iterator[Any]:
    """The same with one field at its default."""
    for item in fields(data):
        default = item.default if item.default is not MISSING else None
        if item.name in keep or default is None or getattr(data, item.name) == default:
            continue
        yield replace(data, **{item.name: default})


def _smaller_ops(ops: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for fewer in _without(ops):
        if fewer:
            yield fewer
    for at, op in enumerate(ops):
        before, after = ops[:at], ops[at + 1 :]
        if isinstance(op, Nest):
            yield (*before, *op.ops, *after)
            for inner in _smaller_ops(op.ops):
                yield (*before, replace(op, ops=inner), *after)
        for plain in _plainer(op, keep=("kind", "ops")):
            yield (*before, plain, *after)


def smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them. Not all of them can be run."""
    for ops in _smaller_ops(case.ops):
        yield replace(case, ops=ops)
    for name in ("fusions", "calls"):
        for fewer in _without(getattr(case, name)):
            if fewer or name == "fusions":
                yield replace(case, **{name: fewer})
    for at, call in enumerate(case.calls):
        plainer = list(_plainer(call, keep=()))
        plainer += [replace(call, shape=call.shape[1:])] if len(call.shape) > 1 else []
        for plain in plainer:
            yield replace(case, calls=(*case.calls[:at], plain, *case.calls[at + 1 :]))
    yield from _plainer(case, keep=("ops", "calls", "fusions"))

"""The fuser, and the registration of fusions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C
from .._arguments import listed
from ..distributed import mark_partial_grads
from ..explanation import Explanation, example_tensors, strict_names
from ._composite import asking_for_composites
from .fusible import FusibleOperation
from .op import FusedOperation, basic_ops_of

__all__ = [
    "Fusion",
    "FusionHandle",
    "OperationFuser",
    "optional",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]


#: All that there are: they hear of fusions that are gone.
_FUSERS: weakref.WeakSet[OperationFuser] = weakref.WeakSet()


class OperationFuser(_C.OperationFuser):
    """A run of operations: plans the fusions, and runs forward and backward as one autograd node.

    Args:
        ops: the operations, in order. Composites stand for their parts.
        recompute: ``"cheap"`` lets joint fusions recompute norms and activations in backward
            instead of saving them; ``"none"`` saves everything.
        fuse: False runs the basic operations one by one.
        strict: names of fusions that must fire; otherwise planning fails and says why.

    After a call ``_forward_ops`` and ``_backward_ops`` list ``(operation, indices of its basic
    operations)``, both in forward order.
    """

    def __init__(
        self,
        ops: Iterable[FusibleOperation],
        *,
        recompute: str = "none",
        fuse: bool = True,
        use_channels: bool = True,
        open_channels: Sequence[str] = (),
        strict: Sequence[str] = (),
    ) -> None:
        # The C++ part borrows these lists. The inner one keeps the modules, with those whose
        # parameters are used, and the fused operations that Python makes for plans.
        modules: list[torch.nn.Module] = listed(
            "OperationFuser", "ops", "a list of operations", ops
        )
        self._kept: list[list[Any]] = [[modules]]
        parts = [p for op in modules if isinstance(op, FusibleOperation) for p in basic_ops_of(op)]
        super().__init__(
            ops=modules,
            kept=self._kept,
            recompute=recompute,
            fuse=fuse,
            use_channels=use_channels,
            open_channels=list(open_channels),
            strict=strict_names(strict),
        )
        modules.extend(part._parameter_owner for part in parts)
        mark_partial_grads(self)
        _FUSERS.add(self)

    @property
    def __name__(self) -> str:
        """What a tensor class with ``__torch_function__`` sees as the function's name."""
        return "OperationFuser"

    def explain(self, *example: torch.Tensor | Sequence[int]) -> Explanation:
        """What the last call did, or what a call with ``example`` would do.

        An example is a tensor or a shape, for the input and for each extra input. Nothing is
        computed; only operations written in Python run once (on zeros for a shape).
        """
        if not example:
            return Explanation(self._explain(None, None)[0])
        owners = torch.nn.ModuleList(self._kept[0][0])
        with _disable_current_modes():
            return Explanation(self._explain(example_tensors(owners, example), None)[0])


class Registered:
    """Counts registrations, in a form that compilers guard."""

    version: str = "0"

    def change(self) -> None:
        self.version = str(int(self.version) + 1)


REGISTERED = Registered()


class FusionHandle:
    """One registration. Take it back with :meth:`unregister`, or use it as a context manager."""

    def __init__(self, handle: _C.FusionHandle) -> None:
        self._handle = handle

    def unregister(self) -> None:
        """Takes the fusion out again; plans are made anew. Doing so twice is harmless.

        The fused operations that it made go with it, but for those that a graph still needs.
        """
        self._handle.unregister()
        REGISTERED.change()
        for fuser in list(_FUSERS):
            fuser._drop_operations()

    @property
    def registered(self) -> bool:
        """Whether the fusion is still in use."""
        return self._handle.registered

    def __enter__(self) -> FusionHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unregister()


class _OptionalPlace:
    def __init__(self, wanted: Any) -> None:
        self.wanted = wanted


def optional(wanted: Any) -> Any:
    """A place of a pattern that may be missing; the factory is then given None for it."""
    return _OptionalPlace(wanted)


def _place_name(wanted: Any) -> str:
    if isinstance(wanted, tuple):
        return " or ".join(_place_name(item) for item in wanted)
    return getattr(wanted, "__name__", repr(wanted))


def _is_class(wanted: Any) -> bool:
    return isinstance(wanted, type) or (
        isinstance(wanted, tuple) and all(isinstance(item, type) for item in wanted)
    )


def _count(wanted: Any, ops: list[FusibleOperation]) -> int:
    """How many operations, from the first on, a place of a pattern covers."""
    first = ops[0]
    if not _is_class(wanted):
        return 1 if wanted(first) else 0
    if isinstance(first, wanted):
        return 1
    composite = getattr(first, "_composite", None)
    if isinstance(composite, FusedOperation) and isinstance(composite, wanted):
        parts = list(composite.basic_ops)
        if len(ops) >= len(parts) and all(a is b for a, b in zip(parts, ops, strict=False)):
            return len(parts)
    return 0


class Fusion:
    """A fusion as data: a pattern of operations, a condition, and what to make of a match.

    Args:
        pattern: one entry per place: a class, a tuple of classes, a function of an operation, or
            :func:`optional` of one of these. ``Linear`` matches the parts of one ``Linear``.
        factory: given what matched, one argument per place, makes the fused operation.
        predicate: given the same, tells whether to fuse: True or "" for yes, False or the reason.
        name: shown in plans; by default the factory's.
    """

    def __init__(
        self,
        pattern: Sequence[Any],
        factory: Callable[..., FusedOperation],
        predicate: Callable[..., bool | str] | None = None,
        name: str | None = None,
    ) -> None:
        if not listed("Fusion", "pattern", "a list of classes or functions", pattern):
            raise ValueError("a fusion needs a pattern of at least one operation")
        if not callable(factory):
            raise TypeError(f"[Fusion] factory must be a function, got {factory!r}")
        self.name = name or str(getattr(factory, "__name__", type(factory).__name__))
        self.factory = factory
        self.predicate = predicate
        self._wanted = [p.wanted if isinstance(p, _OptionalPlace) else p for p in pattern]
        for wanted in self._wanted:
            if not _is_class(wanted) and not callable(wanted):
                raise TypeError(
                    f"a place of a pattern must be a class or a function, got {wanted!r}"
                )
        self._places = [
            (_place_name(wanted), wanted, isinstance(place, _OptionalPlace))
            for place, wanted in zip(pattern, self._wanted, strict=True)
        ]

    def _join(self, index: int, ops: list[FusibleOperation]) -> FusibleOperation | None:
        if not ops:
            return None
        wanted = self._wanted[index]
        if _is_class(wanted) and not isinstance(ops[0], wanted):
            composite: FusibleOperation = ops[0]._composite  # type: ignore[assignment]
            return composite
        return ops[0]

    def _predicate(self, *ops: FusibleOperation | None) -> bool | str:
        assert self.predicate is not None
        answer = self.predicate(*ops)
        return answer if isinstance(answer, str) else bool(answer)

    def _as_rule(self) -> tuple[str, list[Any], Any, Any, Any, Any]:
        predicate = None if self.predicate is None else self._predicate
        return (self.name, self._places, predicate, self.factory, _count, self._join)

    def __call__(
        self, ops: list[FusibleOperation], recipe: Any = None, **unused: Any
    ) -> list[FusibleOperation]:
        """Applies the fusion to a list of operations, as a registered function would be."""
        return _C.apply_rule(*self._as_rule(), list(ops))


def _register(kind: str, func: Any, prepend: bool) -> FusionHandle:
    REGISTERED.change()
    if isinstance(func, Fusion):
        return FusionHandle(_C.register_rule(kind, *func._as_rule(), prepend))
    if not callable(func):
        raise TypeError(f"a fusion is a function or a Fusion, got {type(func).__name__}")
    name = getattr(func, "__name__", type(func).__name__)
    return FusionHandle(_C.register_function(kind, name, asking_for_composites(func), prepend))


def register_forward_fusion(func: Any, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of the forward pass.

    ``func`` is a :class:`Fusion`, or a function ``f(ops, recipe=...) -> ops``. What it makes must
    be interchangeable with the basic operations, contexts included, since backward is fused
    independently. ``prepend`` puts it before the others.
    """
    return _register("forward", func, prepend)


def register_backward_fusion(func: Any, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of the backward pass; see :func:`register_forward_fusion`."""
    return _register("backward", func, prepend)


def register_forward_backward_fusion(func: Any, prepend: bool = False) -> FusionHandle:
    """Registers a joint fusion: one operation serves both directions.

    Only the pair must equal the basic operations; the forward may save what only its own backward
    understands. Joint fusions come first; the other passes start from their result.
    """
    return _register("joint", func, prepend)

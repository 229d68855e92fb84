"""The context in which operations compute in low precision, and how it reaches a recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.compiler import is_compiling

from .. import _C
from .._arguments import check_group
from .recipe import DelayedScaling, Recipe
from .scope import SCOPE, THREAD, Decorator, ThreadScope


def get_default_recipe() -> Recipe:
    """What ``autocast`` uses when it is given no recipe: ``DelayedScaling()``."""
    return DelayedScaling()


_DEFAULT = DelayedScaling()


def _share_amax(group: Any) -> Callable[[torch.Tensor], None] | None:
    """The reduction over the processes of the group; None when there is only one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed.get_world_size(group) < 2:
        return None

    def reduce(amax: torch.Tensor) -> None:
        distributed.all_reduce(amax, op=distributed.ReduceOp.MAX, group=group)

    return reduce


def _shares_amax(group: Any) -> str:
    return "yes" if _share_amax(group) is not None else ""


# A compiler runs it once, while it traces.
_shares_amax._dynamo_marked_constant = True  # type: ignore[attr-defined]


class autocast(Decorator):  # noqa: N801 - used like torch.autocast
    """Operations called inside compute in low precision, as the recipe says.

    Args:
        enabled: False computes in high precision, also inside another ``autocast``.
        calibrating: with ``enabled=False``, note the largest values that delayed scaling needs.
        recipe: by default :func:`get_default_recipe`.
        amax_reduction_group: the processes that share the largest values of delayed scaling; None
            is torch's default group.
        only_where_faster: compute in high precision where low precision would make a call slower:
            small ones on a GPU that are not captured, and all where a device has no products of the
            format. ``explain()`` says so. A compiled graph follows the recipe.

    It decorates functions, too. Contexts nest, and each thread has its own. The backward pass uses
    what forward used, inside or outside the context. Delayed scaling moves on when the outermost
    context ends without an exception, and after each backward pass.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        only_where_faster: bool = False,
    ) -> None:
        flags = {"enabled": enabled, "calibrating": calibrating}
        for name, value in {**flags, "only_where_faster": only_where_faster}.items():
            if not isinstance(value, bool):
                raise TypeError(f"[autocast] {name} must be a bool, got {value!r}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"[autocast] recipe must be a Recipe, got {type(recipe).__name__}")
        check_group("autocast", "amax_reduction_group", amax_reduction_group)
        self._enabled = enabled
        self._calibrating = calibrating
        self._recipe = _DEFAULT if recipe is None else recipe
        self._group = amax_reduction_group
        self._only_where_faster = only_where_faster
        self._outer: list[ThreadScope] = []  # only in traced code

    def _fresh(self) -> autocast:
        return autocast(
            self._enabled,
            self._calibrating,
            self._recipe,
            self._group,
            only_where_faster=self._only_where_faster,
        )

    def __enter__(self) -> None:
        traced = is_compiling()
        if not traced:
            _C.enter_autocast(
                self._enabled,
                self._calibrating,
                self._recipe._native,
                _share_amax(self._group),
                self._only_where_faster,
            )
        elif _shares_amax(self._group):
            raise NotImplementedError(
                "[autocast] largest values cannot be shared between processes inside a compiled "
                "function; enter autocast around it"
            )
        if "_twin" in self._recipe.__dict__:  # else it was made in traced code, which made it known
            self._recipe._be_known()
        active = self._enabled or self._calibrating
        key = self._recipe._key if active else ""
        flags = "enabled" if self._enabled else "calibrating" if active else ""
        if traced:
            self._outer.append((SCOPE.recipe, SCOPE.flags, SCOPE.own))
        else:
            THREAD.outer.append(THREAD.scope)
            THREAD.scope = (key, flags, False)
        SCOPE.recipe, SCOPE.flags, SCOPE.own = key, flags, traced

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        traced = is_compiling()
        if not traced and not THREAD.outer:
            raise RuntimeError("[autocast] must end in the thread that entered it")
        outer = (self._outer if traced else THREAD.outer).pop()
        SCOPE.recipe, SCOPE.flags, SCOPE.own = outer
        if not traced:
            THREAD.scope = outer
            _C.exit_autocast(kind is None)
        elif not SCOPE.own and SCOPE.met:
            from ..ops._traced.calls import update_delayed

            if kind is None:
                update_delayed()
            SCOPE.met.clear()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> autocast:
    """:class:`autocast` under its older name and with the older names of its arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def is_autocast_enabled() -> bool:
    """Whether operations called now, in this thread, compute in low precision."""
    return _C.autocast_state()[0]


def is_autocast_calibrating() -> bool:
    """Whether operations called now, in this thread, note largest values for a recipe."""
    return _C.autocast_state()[1]


def get_autocast_recipe() -> Recipe | None:
    """The recipe of the innermost ``autocast`` of this thread, or None outside any."""
    recipe: Recipe | None = _C.autocast_state()[2]
    return recipe


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    **kwargs: Any,
) -> Any:
    """Runs ``function`` without keeping what its backward needs, and again when it is needed.

    Like ``torch.utils.checkpoint.checkpoint``, and the low-precision context goes with it: the
    second run has the recipe and the factors of the first wherever backward is called, and notes
    nothing a second time. Other keyword arguments are torch's; with ``use_reentrant=True`` they are
    those of ``function``, besides ``preserve_rng_state``.
    """
    if distribute_saved_activations or get_rng_state_tracker is not None or tp_group is not None:
        raise NotImplementedError(
            "[checkpoint] distribute_saved_activations, get_rng_state_tracker and tp_group are not "
            "available in this version"
        )
    state = captured_context()
    if use_reentrant:
        if context_fn is not None:
            raise ValueError("[checkpoint] context_fn needs use_reentrant=False")
        preserve = kwargs.pop("preserve_rng_state", True)
        return torch.utils.checkpoint.checkpoint(
            _Again(functools.partial(function, **kwargs), state),
            *args,
            use_reentrant=True,
            preserve_rng_state=preserve,
        )

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if context_fn is None:
            return nullcontext(), Recompute(state)
        first, second = context_fn()
        return first, Recompute(state, second)

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


class _Captured(NamedTuple):
    """A thread's context, in the core and as traced code sees it."""

    core: _C.AutocastState
    scope: ThreadScope


def captured_context() -> _Captured:
    """This thread's context, for :class:`Recompute`."""
    return _Captured(_C.capture_autocast(), THREAD.scope)


class Recompute:
    """Runs something again as it ran in a captured context, inside another context if there is one.

    Reusable: a graph may be run backward more than once.
    """

    def __init__(self, state: _Captured, outer: AbstractContextManager[Any] | None = None):
        self._state = state
        self._outer = outer or nullcontext()
        self._scopes: list[tuple[_C.RecomputeScope, ThreadScope, ThreadScope]] = []

    def __enter__(self) -> None:
        self._outer.__enter__()
        before = (THREAD.scope, (SCOPE.recipe, SCOPE.flags, SCOPE.own))
        self._scopes.append((_C.RecomputeScope(self._state.core), *before))
        THREAD.scope = self._state.scope
        SCOPE.recipe, SCOPE.flags, SCOPE.own = self._state.scope

    def __exit__(self, *exception: Any) -> bool | None:
        scope, THREAD.scope, (SCOPE.recipe, SCOPE.flags, SCOPE.own) = self._scopes.pop()
        scope.exit()
        return self._outer.__exit__(*exception)


class _Again:
    """A function whose first call is as it is, and whose later ones are recomputations of it."""

    def __init__(self, function: Callable[..., Any], state: _Captured) -> None:
        self._function = function
        self._state = state
        self._called = False

    def __call__(self, *args: Any) -> Any:
        if not self._called:
            self._called = True
            return self._function(*args)
        with Recompute(self._state):
            return self._function(*args)

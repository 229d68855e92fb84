"""The low-precision context as traced code sees it.

Each thread has a context of its own in the core. A compiler cannot guard what belongs to a thread,
so :class:`autocast` also says here, in plain strings, which recipe computes now. A compiled graph
compares that with its thread's context when it runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._contextlib import context_decorator

from .. import _C

F = TypeVar("F", bound=Callable[..., Any])


class Scope:
    """What computes now: empty in high precision.

    Its attributes exist from the beginning, since a compiler guards which ones there are.
    """

    def __init__(self) -> None:
        self.recipe = ""  #: its key
        self.flags = ""  #: "enabled", "calibrating"
        self.own = False  #: entered in traced code
        #: What delayed scaling met in it, to be updated when the outermost one ends.
        self.met: list[Any] = []


SCOPE = Scope()


#: The recipe's key, the flags, and whether it was entered in traced code.
ThreadScope = tuple[str, str, bool]


class _Thread(threading.local):
    """What computes now in this thread, where it was entered in eager mode."""

    scope: ThreadScope = ("", "", False)

    def __init__(self) -> None:
        self.outer: list[ThreadScope] = []  #: what computed before each context entered


THREAD = _Thread()

#: The core's recipes by key, of those that computed lately, the last one at the end.
RECIPES: dict[str, _C.Recipe] = {}
_MOST_RECIPES = 64


def know(recipe: _C.Recipe) -> None:
    """From now on the recipe is found by its key, in traced code."""
    RECIPES.pop(recipe.key, None)
    RECIPES[recipe.key] = recipe
    if len(RECIPES) > _MOST_RECIPES:
        del RECIPES[next(iter(RECIPES))]


class Decorator:
    """Lets a context manager decorate functions: each call enters a context of its own.

    A generator is in the context while it runs, not while its caller does.
    """

    def _fresh(self) -> Any:
        """Another one with the same arguments."""
        raise NotImplementedError

    def __call__(self, function: F) -> F:
        name = type(self).__name__
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"[{name}] can decorate a function, got {function!r}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"[{name}] cannot decorate {function.__qualname__}: a coroutine shares its thread, "
                "and thereby the context, with others; enter it where nothing is awaited"
            )
        decorated: F = context_decorator(self._fresh, function)
        return decorated

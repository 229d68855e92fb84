"""Composites in fusions written as functions.

A fuser sees basic operations: a function that asks ``isinstance(op, Linear)`` is shown the parts.
While such a function runs, a part that is all there is of its composite counts as one; if the
composite has more parts, a warning says how to write it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any


class _Asked(threading.local):
    classes: set[str] | None = None  # None: no function is running


_asked = _Asked()


class CompositeMeta(type):
    """Lets ``isinstance(part, Composite)`` be answered while a fusion function runs."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        if _asked.classes is None:
            return False
        composite = getattr(instance, "_composite", None)
        if composite is None or not super().__instancecheck__(composite):
            return False
        if len(composite.basic_ops) == 1:
            return True
        _asked.classes.add(cls.__name__)
        return False


def asking_for_composites(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a warning when it sought a composite of several parts and did nothing."""
    name = getattr(func, "__name__", type(func).__name__)

    def run(ops: list[Any], **kwargs: Any) -> Any:
        before, _asked.classes = _asked.classes, set()
        try:
            given = list(ops)
            result = func(ops, **kwargs)
            if _asked.classes and list(result) == given:
                kinds = ", ".join(sorted(_asked.classes))
                warnings.warn(
                    f"fusion '{name}' looks for {kinds}, but a fuser sees its parts (BasicLinear, "
                    f"Bias), so it did not fire; register Fusion([{kinds}, ...], factory), or look "
                    "for the parts",
                    stacklevel=2,
                )
            return result
        finally:
            _asked.classes = before

    functools.update_wrapper(run, func, updated=())
    return run

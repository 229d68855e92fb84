"""The low-precision context as traced code sees it.

Each thread has a context of its own in the core. A compiler cannot guard what belongs to a thread,
so :class:`autocast` also says here, in plain strings, which recipe computes now. A compiled graph
compares that with its thread's context when it runs.
"""

from __future__ import annotations

import threading
from typing import Any

from .. import _C


class Scope:
    """What computes now: empty in high precision."""

    recipe: str = ""  #: its key
    flags: str = ""  #: "enabled", "calibrating"
    own: bool = False  #: entered in traced code

    def __init__(self) -> None:
        #: What delayed scaling met in it, to be updated when the outermost one ends.
        self.met: list[Any] = []


SCOPE = Scope()


#: The recipe's key, the flags, and whether it was entered in traced code.
ThreadScope = tuple[str, str, bool]


class _Thread(threading.local):
    """What computes now in this thread, where it was entered in eager mode."""

    scope: ThreadScope = ("", "", False)


THREAD = _Thread()

#: The core's recipes by key, of those that computed: constants, few and small.
RECIPES: dict[str, _C.Recipe] = {}

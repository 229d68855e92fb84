"""What was replaced in a model, what was not, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Left", "Replaced", "Report"]


@dataclass(frozen=True)
class Replaced:
    """A module that operations stand for now."""

    name: str  #: of the module
    operations: tuple[str, ...]  #: that run in its place
    norm: str | None = None  #: the norm that runs with it, by its name
    note: str = ""  #: why not with the norm, for an MLP

    def __str__(self) -> str:
        text = ", ".join(self.operations)
        if self.norm is not None:
            text += f" (with {self.norm.rpartition('.')[2]})"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True)
class Left:
    """A module that was left alone."""

    name: str  #: of the module
    kind: str  #: its class
    reason: str  #: why it was not replaced

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """What :func:`replace` did. ``print`` it; layers that are alike are one line."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def __str__(self) -> str:
        lines = ["replaced:", *_lines(self.replaced)] if self.replaced else ["nothing replaced"]
        if self.left:
            lines += ["left alone:", *_lines(self.left)]
        return "\n".join(lines)


def _lines(entries: Iterable[Replaced | Left]) -> list[str]:
    groups: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", entry.name), str(entry)
        groups[key] = groups.get(key, 0) + 1
    width = max(len(name) for name, _ in groups)
    return [f"  {name:{width}}  {count} x {text}" for (name, text), count in groups.items()]

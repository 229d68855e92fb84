"""What a quantizer is for: a recipe chooses a format by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer is for.

    ``tensor_type`` is ``"input"``, ``"weight"`` or ``"grad_output"``; ``module_type`` is
    ``"linear"`` for the linear layers, the class's name for operations written in Python; ``name``
    is the operation's.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

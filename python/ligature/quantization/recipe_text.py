"""Recipes of delayed scaling from checkpoints: state is kept with the recipe it is of."""

from __future__ import annotations

from typing import Any

from .. import _C
from .recipe import DelayedScaling
from .recipe_base import Format, UnknownFunction

_FUNCTIONS = ("amax_compute_algo", "scaling_factor_compute_algo")


def delayed_from_description(about: dict[str, Any]) -> DelayedScaling:
    """The recipe that a checkpoint speaks of. Functions are never looked up by their names."""
    wanted = {"recipe", *_C.recipe_fields("DelayedScaling"), *_FUNCTIONS}
    if set(about) != wanted or about["recipe"] != "DelayedScaling":
        raise ValueError(f"wanted DelayedScaling with {', '.join(sorted(wanted))}, got {about}")
    if not isinstance(about["fp8_format"], str) or about["fp8_format"] not in Format.__members__:
        raise ValueError(f"fp8_format must be the name of a Format, got {about['fp8_format']!r}")
    values = {**about, "fp8_format": Format[about["fp8_format"]]}
    del values["recipe"]
    for name in _FUNCTIONS:
        value = values[name]
        if isinstance(value, dict):
            if not isinstance(value.get("function"), str):
                raise ValueError(f"{name} must name a function, got {value!r}")
            values[name] = UnknownFunction(value["function"])
    return DelayedScaling(**values)

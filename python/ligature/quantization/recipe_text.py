"""Recipes of delayed scaling as text, for checkpoints: state is kept with the recipe it is of."""

from __future__ import annotations

from typing import Any

from .recipe import DelayedScaling
from .recipe_base import Format, Recipe, UnknownFunction, function_key

_FUNCTIONS = ("amax_compute_algo", "scaling_factor_compute_algo")
_DESCRIBED = ("margin", "amax_history_len", "reduce_amax")


def description_of(recipe: Recipe) -> dict[str, Any] | None:
    """What a checkpoint says of a recipe; None when another process could not have the like."""
    if not isinstance(recipe, DelayedScaling) or not recipe._can_be_described():
        return None
    about: dict[str, Any] = {"recipe": "DelayedScaling", "fp8_format": recipe.fp8_format.name}
    about.update({name: getattr(recipe, name) for name in _DESCRIBED})
    for name in _FUNCTIONS:
        value = getattr(recipe, name)
        if callable(value):
            value = {"function": function_key(value)}
        about[name] = value
    return about


def delayed_from_description(about: dict[str, Any]) -> DelayedScaling:
    """The recipe that a checkpoint speaks of. Functions are never looked up by their names."""
    wanted = {"recipe", "fp8_format", *_DESCRIBED, *_FUNCTIONS}
    if set(about) != wanted or about["recipe"] != "DelayedScaling":
        raise ValueError(f"wanted DelayedScaling with {', '.join(sorted(wanted))}, got {about}")
    if not isinstance(about["fp8_format"], str) or about["fp8_format"] not in Format.__members__:
        raise ValueError(f"fp8_format must be the name of a Format, got {about['fp8_format']!r}")
    values = {name: about[name] for name in (*_DESCRIBED, *_FUNCTIONS)}
    for name in _FUNCTIONS:
        value = values[name]
        if isinstance(value, dict):
            if not isinstance(value.get("function"), str):
                raise ValueError(f"{name} must name a function, got {value!r}")
            values[name] = UnknownFunction(value["function"])
    return DelayedScaling(fp8_format=Format[about["fp8_format"]], **values)

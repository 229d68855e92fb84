"""The context in which operations are built with weights in low precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .autocast import get_default_recipe
from .recipe import Recipe
from .scope import Decorator

if TYPE_CHECKING:
    from ..ops.op import BasicOperation


class quantized_model_init(Decorator):  # noqa: N801 - used like autocast
    """Linear layers built inside keep their weights in the recipe's format only.

    Args:
        enabled: False builds in high precision, also inside another ``quantized_model_init``.
        recipe: by default ``DelayedScaling()``.
        preserve_high_precision_init_val: keep the initial values on the CPU, for an optimizer with
            weights of its own: ``weight.get_high_precision_init_val()`` gives them, and
            ``weight.clear_high_precision_init_val()`` drops them.

    Biases and norms stay in high precision. Contexts nest, and each thread has its own.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        for name, value in (
            ("enabled", enabled),
            ("preserve_high_precision_init_val", preserve_high_precision_init_val),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"[quantized_model_init] {name} must be a bool, got {value!r}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"[quantized_model_init] recipe must be a Recipe, got {type(recipe).__name__}"
            )
        recipe = get_default_recipe() if recipe is None else recipe
        self._given = (enabled, recipe, preserve_high_precision_init_val)

    def _fresh(self) -> quantized_model_init:
        return quantized_model_init(*self._given)

    def __enter__(self) -> None:
        enabled, recipe, preserve = self._given
        _C.enter_quantized_model_init(recipe._native, enabled, preserve)

    def __exit__(self, *exception: object) -> None:
        _C.exit_quantized_model_init()


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """:class:`quantized_model_init` under its older name."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


class _InitialValue:
    """The values of a parameter before it was quantized, on the CPU."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value: torch.Tensor | None = value

    def get(self) -> torch.Tensor | None:
        """The values, or None once they were dropped."""
        return self.value

    def clear(self) -> None:
        """Drops them."""
        self.value = None


def quantize_new_weight(
    owner: Any, part: BasicOperation, name: str = "weight", index: int = 0
) -> None:
    """Replaces a weight of ``owner`` by a quantized one where this thread asks for it.

    ``index`` says which of the operation's weights it is.
    """
    weight: torch.nn.Parameter = getattr(owner, name)
    made = part._handle.new_weight(weight.detach(), index)
    if made is None:
        return
    quantized, values = made
    parameter = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if values is not None:
        initial = _InitialValue(values)
        parameter.get_high_precision_init_val = initial.get  # type: ignore[attr-defined]
        parameter.clear_high_precision_init_val = initial.clear  # type: ignore[attr-defined]
    setattr(owner, name, parameter)

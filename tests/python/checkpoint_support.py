"""Recipe state in a state dict, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def recipe_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that hold what delayed scaling remembers."""
    return {key: value for key, value in state.items() if "_recipe_state." in key}

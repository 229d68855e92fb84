"""When weights that are kept in low precision are quantized anew."""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _C


def note_weights_changed() -> None:
    """Says that weights on a GPU may have been written behind torch's back.

    A layer keeps its weight in low precision until it changes. Changes that torch counts are
    noticed, and so is every step of a torch optimizer. After others (an optimizer that is not
    torch's, writes through ``.data``, a CUDA graph that writes them by itself) call this. Weights
    that a captured step of a torch optimizer writes are quantized in every forward outside of the
    graph. Weights on the CPU need it not: their bytes are looked at.
    """
    _C.note_weights_changed()


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    note_weights_changed()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        groups = optimizer.param_groups
        _C.note_graph_writes([weight for group in groups for weight in group["params"]])


register_optimizer_step_post_hook(_after_step)
note_weights_changed()  # from here on somebody says so, and weights on a GPU can be kept

"""When weights that are kept in low precision are quantized anew."""

from __future__ import annotations

from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _C


def note_weights_changed(*_: object) -> None:
    """Says that weights on a GPU may have been written behind torch's back.

    A layer keeps its weight in low precision until it changes. Changes that torch counts are
    noticed, and so is every step of a torch optimizer. After others (an optimizer that is not
    torch's, writes through ``.data``, a CUDA graph that holds the optimizer's step) call this.
    Weights on the CPU need it not: their bytes are looked at.
    """
    _C.note_weights_changed()


register_optimizer_step_post_hook(note_weights_changed)
note_weights_changed()  # from here on somebody says so, and weights on a GPU can be kept

"""What ``save_pretrained`` of a replaced model writes."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from ...quantization.checkpointing import state_keys

#: How transformers knows the folders that its Trainer resumes from (``get_last_checkpoint``).
_OF_TRAINER = re.compile(r"checkpoint-\d+")


class SavePretrained:
    """``save_pretrained`` of a replaced model.

    It writes the original's checkpoint, which knows no recipes. In the folders that ``Trainer``
    resumes from there is the recipes' state too, so that training goes on exactly.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        functools.update_wrapper(self, type(model).save_pretrained)

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        save = type(model).save_pretrained
        folder = os.path.basename(os.path.normpath(os.fspath(save_directory)))
        if not _OF_TRAINER.fullmatch(folder):
            return save(model, save_directory, *args, **kwargs)
        left_out = model._keys_to_ignore_on_save
        of_recipes = tuple(state_keys("."))
        model._keys_to_ignore_on_save = {k for k in left_out if not k.endswith(of_recipes)}
        try:
            return save(model, save_directory, *args, **kwargs)
        finally:
            model._keys_to_ignore_on_save = left_out

"""What every operation is, basic or fused: copies, checkpoints, a call by itself or in a graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import _C
from ..quantization import checkpointing

if TYPE_CHECKING:
    from .op import BasicOperation


def drop_empty_state(state_dict: dict[str, Any], prefix: str) -> None:
    """Checkpoints of te.ops hold an empty tensor for each operation without a recipe."""
    key = f"{prefix}_extra_state"
    state = state_dict.get(key)
    if isinstance(state, torch.Tensor) and state.numel() == 0:
        del state_dict[key]


class FusibleOperation(torch.nn.Module):
    """An operation that a fuser can run, alone or as part of a fusion."""

    _op: _C.Operation
    _traced: Any

    @property
    def is_fused_op(self) -> bool:
        """Whether it stands for other, basic operations."""
        raise TypeError(f"{type(self).__name__} must derive from BasicOperation or FusedOperation")

    def pre_first_fuser_forward(self) -> None:
        """Called once before the first forward of a fuser."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward of a fuser."""

    def get_input_quantizer(self) -> Any:
        """The quantizer of its input, or None."""
        return None

    def get_grad_output_quantizer(self) -> Any:
        """The quantizer of its output's gradient, or None."""
        return None

    # -- copies: the C++ twin is made anew

    _not_copied: ClassVar[tuple[str, ...]] = ("_op", "_impl", "_own_fuser", "_own_run", "_traced")

    def _state(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self._not_copied}

    def __getstate__(self) -> dict[str, Any]:
        return self._state()

    def __copy__(self) -> FusibleOperation:
        made = type(self).__new__(type(self))
        made.__setstate__(self._state())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> FusibleOperation:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._state(), memo))
        return made

    # -- checkpoints: recipe state and quantized parameters are plain tensors there

    def _recipe_state_owner(self) -> BasicOperation | None:
        """The basic operation whose recipe state is kept below this module's name."""
        return None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        checkpointing.save(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        drop_empty_state(state_dict, prefix)
        entries = checkpointing.Entries(self, state_dict, prefix)
        for key in entries.keys:
            del state_dict[key]
        state_dict.update(entries.parameters)
        entries.apply_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's. What an operation cannot take is refused before anything is changed."""
        checkpointing.check(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    # -- an operation by itself

    def _alone(self) -> Any:
        fuser = self.__dict__.get("_own_fuser")
        if fuser is None:
            from .fuser import OperationFuser

            fuser = OperationFuser([self], use_channels=False)
            self.__dict__["_own_fuser"] = fuser
            self.__dict__["_own_run"] = _C.runner(fuser, None)
        return fuser

    def _prepare_traced(self) -> str:
        from .traced_group import traced

        if "_traced" not in self.__dict__:
            self.__dict__["_traced"] = traced(self._alone())
        return "ready"

    # A compiler runs it once, while it traces.
    _prepare_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _forward_traced(self, input: Any, extra_inputs: Any, kwargs: Any) -> Any:
        from . import traced

        self._prepare_traced()
        return traced.call(self._traced, input, list(extra_inputs), kwargs)

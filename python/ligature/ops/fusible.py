"""What every operation is, basic or fused: copies, checkpoints, a call by itself or in a graph."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import _C
from ..quantization import checkpointing, conversion, loading
from ._hooks import REPLACEABLE, replaced

if TYPE_CHECKING:
    from .op import BasicOperation


def refuse_script(module: torch.nn.Module) -> None:
    """Refuses torch.jit.script, which compiles a module's source."""
    raise RuntimeError(
        f"[{type(module).__name__}] torch.jit.script cannot compile it, since it computes outside "
        "of Python; record it with torch.jit.trace, or use torch.compile or torch.export"
    )


def refuse_tracers(module: torch.nn.Module, given: Any) -> None:
    """Says what is wrong where a tracer of torch gave arguments that nobody else would give."""
    if isinstance(given, torch.fx.Proxy):
        raise TypeError(
            f"[{type(module).__name__}] torch.fx.symbolic_trace cannot look into it; make it a "
            "leaf of the graph (Tracer.is_leaf_module), or use torch.export"
        )
    if torch._C._get_tracing_state() is not None:
        from ._traced.watched import refuse_onnx

        refuse_onnx()


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

    # -- what containers have to know

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REPLACEABLE:
            replaced()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in REPLACEABLE:
            replaced()
        super().__delattr__(name)

    def __prepare_scriptable__(self) -> Any:
        refuse_script(self)

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

    def _other_names(self) -> dict[str, str]:
        """Names that checkpoints of te.ops have for its parameters, and its own."""
        return {}

    def _other_extra_states(self) -> list[str]:
        """Extra states that checkpoints of te.ops have below its name."""
        return ["_extra_state"]

    @property
    def _recipe_state(self) -> SimpleNamespace:
        return checkpointing.named_state(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        checkpointing.save(self, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = checkpointing.Entries(self, state_dict, prefix)
        entries.into(state_dict)
        entries.apply_state()
        if local_metadata.get("assign_to_params_buffers", False):
            checkpointing.quantize_assigned(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    # -- conversions: a quantized parameter stays quantized where its dtype allows it

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with conversion.of_quantized(self, fn):
            return super()._apply(fn, recurse)

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
        from ._traced.group import traced

        if "_traced" not in self.__dict__:
            self.__dict__["_traced"] = traced(self._alone())
        return "ready"

    # A compiler runs it once, while it traces.
    _prepare_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _forward_traced(self, input: Any, extra_inputs: Any, kwargs: Any) -> Any:
        from ._traced import calls

        self._prepare_traced()
        return calls.call(self._traced, input, list(extra_inputs), kwargs)


loading.install()

"""The experts of a mixture, computed by operations with the parameters of the model's own module.

Under the name ``"ligature"`` transformers knows :func:`experts_forward`, so that
``model.set_experts_implementation("ligature")`` works. The operations belong to the module but are
none of its submodules: names, checkpoints and optimizers stay what they are.
"""

from __future__ import annotations

import importlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ...ops import Combine, Dispatch, GroupedLinear, Sequential
from ...quantization import quantized_model_init
from ...quantization.checkpointing import state_keys
from .gates import Gate, read_gate
from .recognition import UnsupportedError

__all__ = [
    "NAME",
    "ExpertsPipeline",
    "experts_forward",
    "is_experts",
    "is_replaced",
    "pipeline_of",
    "register",
    "replace_experts",
    "state_names",
]

Tensor = torch.Tensor

#: Of the implementation in transformers.
NAME = "ligature"
#: Where a module keeps its pipeline; ``ligature.explain`` finds it there.
PLACE = "_ligature"
#: What transformers says of every module whose experts can be computed by another implementation.
_TRAITS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def register() -> None:
    """Tells transformers of the implementation, where there is a transformers that has some."""
    try:
        interface = importlib.import_module("transformers.integrations.moe").ExpertsInterface
    except (ImportError, AttributeError):
        return
    interface.register(NAME, experts_forward)


def experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What ``self``, a module of experts, makes of [T, H] tokens.

    Each is sent to the experts ``top_k_index`` [T, K], and what they make of it is added up with
    ``top_k_weights`` [T, K]. An index that is not below the number of experts is of no expert.
    """
    if PLACE not in self.__dict__ or not self.__dict__[PLACE].is_of(self):
        _prepare(self)
    y: Tensor = self.__dict__[PLACE](hidden_states, top_k_index, top_k_weights)
    return y.to(hidden_states.dtype)


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="its gate is tried out first: for one graph, call the model once before it is compiled"
)
def _prepare(module: torch.nn.Module) -> None:
    pipeline_of(module)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether its experts can be computed by another implementation than its own."""
    return all(trait in module.__dict__ for trait in _TRAITS) and "down_proj" in dir(module)


def pipeline_of(module: torch.nn.Module, recompute: str | None = None) -> ExpertsPipeline:
    """That of a module of experts; it is made where there is none."""
    known: ExpertsPipeline | None = module.__dict__.get(PLACE)
    wanted = recompute or ("none" if known is None else known.recompute)
    if known is not None and known.is_of(module) and known.recompute == wanted:
        return known
    try:
        made = ExpertsPipeline(module, wanted)
    except UnsupportedError as error:
        raise ValueError(f"[{type(module).__name__}] {error}") from None
    made.in_checkpoints = known is not None and known.in_checkpoints
    module.__dict__[PLACE] = made
    return made


class _ExpertsLinear(GroupedLinear):
    """A linear layer of every expert, whose parameters are those of the module of experts."""

    _module: Callable[[], Any]  # a weak reference
    _name: str
    _is_transposed: bool

    def __init__(self, module: Any, name: str, *, scale_bias: bool) -> None:
        self.__dict__["_module"] = weakref.ref(module)
        self.__dict__.update(_name=name, _is_transposed=module.is_transposed)
        weight = getattr(module, name)
        columns, rows = weight.shape[1:] if module.is_transposed else weight.shape[:0:-1]
        with quantized_model_init(enabled=False):
            super().__init__(
                weight.shape[0],
                columns,
                rows,
                bias=bool(module.has_bias),
                device="meta",
                dtype=weight.dtype,
                single_grouped_weight=True,
                single_grouped_bias=bool(module.has_bias),
                scale_bias=scale_bias and bool(module.has_bias),
            )

    def _register(self, device: Any, dtype: torch.dtype | None) -> None:
        """It has no parameters of its own."""

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_module": weakref.ref(state["_module"])})

    def _parameter(self, name: str) -> Tensor:
        parameter: Tensor = getattr(self._module(), name)
        return parameter

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[num_groups, out_features, in_features], however the module has it."""
        weight = self._parameter(self._name)
        return weight.transpose(1, 2) if self._is_transposed else weight

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """[num_groups, out_features]."""
        return self._parameter(f"{self._name}_bias")

    def _quantizer_device(self) -> torch.device:
        return self.weight.device


class ExpertsPipeline(torch.nn.Module):
    """``Dispatch``, ``GroupedLinear``, an activation, ``GroupedLinear`` and ``Combine``.

    The router's weights scale the activation's result, or are given to ``Combine`` where the
    activation has no scaled form. What no operation computes, the module computes itself between
    the operations. Use :meth:`forward` like the module's.

    Args:
        experts: the module of experts.
        recompute: as ``Sequential``'s.
    """

    def __init__(self, experts: torch.nn.Module, recompute: str = "none") -> None:
        super().__init__()
        module: Any = experts
        self._module: Callable[[], Any] = weakref.ref(module)
        self.recompute = recompute
        self.in_checkpoints = False  # with the state of its operations' recipes
        self.first_name = "gate_up_proj" if module.has_gate else "up_proj"
        _check(module, self.first_name)
        self.gate: Gate = read_gate(module)
        self.has_norm = bool(getattr(module, "has_post_expert_norm", False))
        self.scales = self.gate.is_scaled and not self.has_norm
        self.dispatch = Dispatch(module.num_experts)
        self.first = _ExpertsLinear(module, self.first_name, scale_bias=False)
        self.second = _ExpertsLinear(module, "down_proj", scale_bias=self.scales)
        self.combine = Combine(weighted=not self.scales)
        self.pipeline: Sequential | None = None
        if self.gate.kind is None or self.has_norm:
            self.dispatch.set_extra_output_channel(0, "splits")
            self.first.set_extra_input_channel(0, "splits")
            self.front = Sequential(self.dispatch, self.first)
            self.act = None if self.gate.kind is None else self.gate.make(False)
        else:
            self.act = self.gate.make(self.scales)
            self._join()

    def _join(self) -> None:
        ops: OrderedDict[str, Any] = OrderedDict(
            dispatch=self.dispatch,
            first=self.first,
            act=self.act,
            second=self.second,
            combine=self.combine,
        )
        for place, name in enumerate(("splits", "row_weights", "map")):
            self.dispatch.set_extra_output_channel(place, name, output_to_caller=False)
        self.first.set_extra_input_channel(0, "splits")
        self.second.set_extra_input_channel(0, "splits")
        self.combine.set_extra_input_channel(0, "map")
        if self.scales:
            ops["act"].set_extra_input_channel(0, "row_weights")
            if self.second.num_extra_inputs > 1:
                self.second.set_extra_input_channel(1, "row_weights")
        self.pipeline = Sequential(ops, recompute=self.recompute)

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether it computes with the parameters of ``module``; of a shallow copy it does not."""
        return self._module() is module

    # A copy of a module has a copy of its pipeline, which is the copy's.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_module": weakref.ref(state["_module"])})

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of what it computes with, in order."""
        act = self.gate.name if self.act is None else type(self.act).__name__
        norm = ["post_expert_norm"] if self.has_norm else []
        return ("Dispatch", "GroupedLinear", act, "GroupedLinear", *norm, "Combine")

    # -- forward

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As :func:`experts_forward`, in the dtype that the operations compute in."""
        y: Tensor
        if self.pipeline is None:
            return self._apart(hidden_states, index, weights)
        if self.scales:
            y = self.pipeline(hidden_states, index, weights)
        else:
            y = self.pipeline(hidden_states, index, weights.detach(), weights)
        return y

    def _apart(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """With the module's own gate, or its norm, between the operations."""
        module = self._module()
        z, splits, _, rows = self.front(hidden_states, index, weights.detach())
        if self.act is not None:
            a = self.act(z)
        else:
            a = module._apply_gate(z) if module.has_gate else module.act_fn(z)
        y = self.second(a, splits)
        if self.has_norm:
            y = module.post_expert_norm(y)
        out: Tensor = self.combine(y, rows, weights)
        return out


def _check(module: Any, first: str) -> None:
    """Refuses parameters that are not what such a module has."""
    if not hasattr(module, first):
        raise UnsupportedError(f"it has no {first}")
    sizes = [getattr(module, name).shape for name in (first, "down_proj")]
    if any(len(size) != 3 or size[0] != module.num_experts for size in sizes):
        raise UnsupportedError(
            f"{first} and down_proj must be [{module.num_experts}, ...] with 3 dimensions, got "
            f"{tuple(sizes[0])} and {tuple(sizes[1])}"
        )


# -- in the place of a model's own implementation


def is_replaced(module: torch.nn.Module) -> bool:
    """Whether :func:`replace_experts` was called for it and holds."""
    pipeline = module.__dict__.get(PLACE)
    config: Any = module.config
    here: bool = config._experts_implementation == NAME
    return here and pipeline is not None and pipeline.in_checkpoints


def replace_experts(module: torch.nn.Module, recompute: str) -> ExpertsPipeline:
    """Makes this the implementation of a module, and of all others of its configuration."""
    pipeline = pipeline_of(module, recompute)
    if not pipeline.in_checkpoints:
        module.register_state_dict_post_hook(_add_states)
        module.register_load_state_dict_pre_hook(_take_states)
    pipeline.in_checkpoints = True
    config: Any = module.config
    config._experts_implementation = NAME
    return pipeline


# -- checkpoints: what a recipe keeps from step to step

_LINEARS = ("first", "second")


def state_names(prefix: str) -> list[str]:
    """Every key that checkpoints may have for a module of experts beside the original's."""
    return [key for name in _LINEARS for key in state_keys(f"{prefix}{PLACE}.{name}.")]


def _linears(module: torch.nn.Module) -> list[tuple[str, _ExpertsLinear]]:
    pipeline = module.__dict__.get(PLACE)
    if pipeline is None:
        return []
    return [(f"{PLACE}.{name}.", getattr(pipeline, name)) for name in _LINEARS]


def _add_states(
    module: torch.nn.Module, state_dict: OrderedDict[str, Any], prefix: str, metadata: Any
) -> None:
    for name, op in _linears(module):
        op._save_to_state_dict(state_dict, prefix + name, False)


def _take_states(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    for name, op in _linears(module):
        start = prefix + name
        own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
        op._load_from_state_dict(own, start, {}, strict, [], unexpected_keys, error_msgs)

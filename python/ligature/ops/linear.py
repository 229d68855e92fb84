"""Linear: the composite of a GEMM and a bias."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from .._arguments import default_device
from ..quantization.model_init import quantize_new_weight
from ._builtin import initialize
from ._composite import CompositeMeta
from ._hooks import has_hooks
from .basic import BasicLinear, Bias, Device, check_tensor_parallel
from .op import BasicOperation, FusedOperation


class Linear(FusedOperation, metaclass=CompositeMeta):
    """``y = x W^T + b``: a drop-in for ``torch.nn.Linear``, checkpoints included.

    A composite of :class:`BasicLinear` and, with ``bias``, :class:`Bias`, which compute with its
    ``weight`` and ``bias``. Arguments as :class:`BasicLinear`. ``linear.bias = None`` takes the
    bias away, until another one is set.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        check_tensor_parallel("Linear", tensor_parallel_mode, tensor_parallel_group)
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size <= 0:
                raise ValueError(f"[Linear] {name} must be positive, got {size}")
        self._rng_state_tracker_function = rng_state_tracker_function
        linear = BasicLinear._part_of(
            self,
            in_features=in_features,
            out_features=out_features,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        self._parts: tuple[BasicLinear, *tuple[Bias, ...]] = (linear,)
        if bias:
            self._parts = (linear, Bias._part_of(self, size=out_features))
        place = default_device(device)
        dtype = dtype or torch.get_default_dtype()
        weight = torch.empty(out_features, in_features, device=place, dtype=dtype)
        self.weight = torch.nn.Parameter(weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_features, device=place, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        quantize_new_weight(self, linear)

    def reset_parameters(self) -> None:
        """Initial values as those of ``torch.nn.Linear``."""
        if self.weight.device.type == "meta":
            return
        tracker = self._rng_state_tracker_function
        with torch.no_grad(), nullcontext() if tracker is None else tracker().fork():
            initialize(self._parts[0]._impl, "weight", self.weight)
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                self.bias.uniform_(-bound, bound)

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """Its parts: the GEMM and, with a bias, the bias."""
        return self._parts

    @property
    def in_features(self) -> int:
        """Size of the input's last dimension."""
        return self._parts[0].in_features

    @property
    def out_features(self) -> int:
        """Size of the output's last dimension."""
        return self._parts[0].out_features

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name == "bias" and param is not None and len(self._parts) == 1:
            raise ValueError("[Linear] it was made with bias=False and cannot be given a bias")
        super().register_parameter(name, param)

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Runs it by itself; hooks on its parts run too."""
        if not any(has_hooks(part) for part in self._parts):
            return super().forward(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        kwargs = basic_op_kwargs or [{} for _ in self._parts]
        for part, part_kwargs in zip(self._parts, kwargs, strict=True):
            input = part(input, **part_kwargs)
        return input

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self._parts = (copy.copy(self._parts[0]), *map(copy.copy, self._parts[1:]))
        for part in self._parts:
            part._set_composite(self)
        self._adopt_weight()

    def _recipe_state_owner(self) -> BasicOperation | None:
        return self._parts[0]

    def _other_names(self) -> dict[str, str]:
        return {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}

    def _other_extra_states(self) -> list[str]:
        below = [f"basic_ops.{i}._extra_state" for i in range(2)]
        return [*super()._other_extra_states(), *below]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._adopt_weight()

    def _adopt_weight(self) -> None:
        weight = self._parameters.get("weight")
        if weight is not None:
            self._parts[0]._handle.adopt_weight(weight)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )

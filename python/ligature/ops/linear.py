"""Linear: the composite of a GEMM and a bias."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from .. import _C
from .._arguments import default_device
from ..quantization.model_init import quantize_new_weight
from ._builtin import initialize
from ._composite import CompositeMeta
from ._hooks import has_hooks
from .basic import (
    AllReduce,
    BasicLinear,
    Bias,
    Device,
    ReduceScatter,
    TensorParallelAttributes,
    tensor_parallel_options,
)
from .op import BasicOperation, FusedOperation


class Linear(TensorParallelAttributes, FusedOperation, metaclass=CompositeMeta):
    """``y = x W^T + b``: a drop-in for ``torch.nn.Linear``, checkpoints included.

    A composite of :class:`BasicLinear` and, with ``bias``, :class:`Bias`, which compute with its
    ``weight`` and ``bias``. Arguments as :class:`BasicLinear`. ``linear.bias = None`` takes the
    bias away, until another one is set.

    With ``tensor_parallel_mode="row"`` it is a :class:`BasicLinear`, a :class:`Bias` and a
    :class:`ReduceScatter` (``sequence_parallel``) or :class:`AllReduce`: the biases of all ranks
    are added up, as in te.ops. The first rank's begins as in torch, the others' as zeros. Where one
    bias is wanted, add it after the sum:
    ``BasicLinear(..., tensor_parallel_mode="row")``, ``Bias``.
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
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size <= 0:
                raise ValueError(f"[Linear] {name} must be positive, got {size}")
        self._rng_state_tracker_function = rng_state_tracker_function
        given = tensor_parallel_options(
            "Linear", tensor_parallel_mode, tensor_parallel_group, sequence_parallel
        )
        self._whole: dict[str, Any] = {
            "in_features": in_features,
            "out_features": out_features,
            **_C.tensor_parallel("Linear", given, in_features, out_features),
        }
        self._parts: tuple[BasicOperation, ...] = self._make_parts(bias, accumulate_into_main_grad)
        place = default_device(device)
        dtype = dtype or torch.get_default_dtype()
        shape = self._basic_linear._impl.parameters[0][1]
        self.weight = torch.nn.Parameter(torch.empty(shape, device=place, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(shape[0], device=place, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        quantize_new_weight(self, self._basic_linear)

    def _make_parts(self, bias: bool, accumulate: bool) -> tuple[BasicOperation, ...]:
        options = self._whole
        ranks = self.tensor_parallel_size
        row = self.tensor_parallel_mode == "row"
        group = options["tensor_parallel_group"]
        names = ("tensor_parallel_mode", "tensor_parallel_group", "tensor_parallel_size")
        spread = {name: options[name] for name in (*names, "sequence_parallel")}
        parts: list[BasicOperation] = [
            BasicLinear._part_of(
                self,
                in_features=options["in_features"] // (ranks if row else 1),
                out_features=options["out_features"],
                accumulate_into_main_grad=accumulate,
                **({} if row else spread),
            )
        ]
        if bias:
            parts.append(
                Bias._part_of(
                    self,
                    size=options["out_features"] * (ranks if row else 1),
                    tensor_parallel=ranks > 1,
                    tensor_parallel_group=group,
                    tensor_parallel_size=options["tensor_parallel_size"],
                )
            )
        if row:
            kind = ReduceScatter if self.sequence_parallel else AllReduce
            parts.append(kind._named(group))
        return tuple(parts)

    def reset_parameters(self) -> None:
        """Initial values as those of ``torch.nn.Linear``."""
        if self.weight.device.type == "meta":
            return
        tracker = self._rng_state_tracker_function
        with torch.no_grad(), nullcontext() if tracker is None else tracker().fork():
            row = self.tensor_parallel_mode == "row"
            initialize(self._basic_linear._impl, "weight", self.weight)
            if row:  # the inputs of all ranks are added up
                self.weight.mul_(1 / math.sqrt(self.tensor_parallel_size))
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                self.bias.uniform_(-bound, bound)
                # The biases of all ranks are added up.
                if row and _C.group_info(self._whole["tensor_parallel_group"])["rank"] > 0:
                    self.bias.zero_()

    @property
    def _basic_linear(self) -> BasicLinear:
        linear = self._parts[0]
        assert isinstance(linear, BasicLinear)
        return linear

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """Its parts: the GEMM and, with a bias, the bias."""
        return self._parts

    def _spread(self, name: str) -> Any:
        return self._whole[name]

    @property
    def in_features(self) -> int:
        """Size of the input's last dimension."""
        size: int = self._whole["in_features"]
        return size

    @property
    def out_features(self) -> int:
        """Size of the output's last dimension."""
        size: int = self._whole["out_features"]
        return size

    @property
    def local_in_features(self) -> int:
        """Size of this rank's input's last dimension."""
        return self.weight.shape[1]

    @property
    def local_out_features(self) -> int:
        """Size of this rank's output's last dimension, before it is summed up in mode "row"."""
        return self.weight.shape[0]

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if (
            name == "bias"
            and param is not None
            and not any(isinstance(part, Bias) for part in self._parts)
        ):
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
        if "_whole" not in state:  # of a model that 0.1.0 pickled
            self._whole = self._basic_linear._impl.options()
        self._parts = (copy.copy(self._parts[0]), *map(copy.copy, self._parts[1:]))
        for part in self._parts:
            if isinstance(part, BasicLinear | Bias):
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
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
        if self.tensor_parallel_size > 1:
            text += f", tensor_parallel_mode={self.tensor_parallel_mode!r}"
            text += f", sequence_parallel={self.sequence_parallel}"
        return text

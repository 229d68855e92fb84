"""GroupedLinear: a linear layer per group of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from ... import _C
from ..._arguments import default_device
from ...quantization import conversion
from ...quantization.model_init import quantize_new_weight
from .._builtin import BuiltinOperation, initialize, option

__all__ = ["GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", "GroupedLinear"]

#: Keyword arguments of a call: where forward writes its result ...
OUTPUT_BUFFER_KEY = "output"
#: ... and backward the gradient of the input.
GRAD_INPUT_BUFFER_KEY = "grad_input"


class _WeightGradStore:
    """Whether weight gradients wait for ``backward_dw()``, as scripts for te.ops ask it."""

    def __init__(self, delayed: bool) -> None:
        self._delayed = delayed

    def delay_wgrad_compute(self) -> bool:
        """Whether they do."""
        return self._delayed


class GroupedLinear(BuiltinOperation):
    """``y_g = x_g W_g^T + b_g`` for consecutive groups of rows.

    The first extra input says how many rows each group has: ``[num_groups]`` integers of any dtype,
    on any device; those on the CPU are checked. Rows are all leading dimensions of the input. Rows
    past the last group give zeros and take part in no gradient, whatever they hold. Each group's
    results have the bits of a :class:`Linear` of its own.

    Args:
        num_groups: number of groups, each with a weight of its own.
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: one bias per group.
        device: of the parameters; by default torch's default device, CUDA where there is one.
            ``"meta"``: they may be registered by name later.
        dtype: of the parameters; by default torch's default dtype.
        rng_state_tracker_function: gives an object whose ``fork()`` surrounds the initialization of
            each weight.
        accumulate_into_main_grad: add each weight's gradient into its ``main_grad`` (or overwrite
            it when ``overwrite_main_grad``) instead of ``grad``.
        single_grouped_weight: one parameter ``weight`` [num_groups, out_features, in_features]
            instead of ``weight0``, ``weight1``, ...
        single_grouped_bias: one parameter ``bias`` [num_groups, out_features] instead of ``bias0``,
            ``bias1``, ...
        delay_wgrad_compute: backward makes no gradients of weights; :meth:`backward_dw` does.
        scale_bias: with a bias, a second extra input [rows], by which each row's bias is
            multiplied.

    A checkpoint with one parameter per group loads into one with a single parameter, and the other
    way round. A call's ``output`` is a buffer that the result is written into and shares memory
    with; ``grad_input`` is one for the input's gradient.
    """

    num_groups: int = option("num_groups", "Number of groups.")
    in_features: int = option("in_features", "Size of the input's last dimension.")
    out_features: int = option("out_features", "Size of the output's last dimension.")
    single_grouped_weight: bool = option("single_grouped_weight", "One parameter for all weights.")
    single_grouped_bias: bool = option("single_grouped_bias", "One parameter for all biases.")
    use_bias: bool = option("bias", "Whether it has biases.")
    has_bias: bool = option("bias", "Whether it has biases.")
    _scale_bias: bool = option("scale_bias", "Whether biases are scaled per row.")
    _accumulate_into_main_grad: bool = option("accumulate_into_main_grad", "As given.")
    num_extra_inputs: int = 1
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter
    _impl: _C.GroupedLinear

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        if dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ValueError(
                f"[GroupedLinear] dtype must be float32, bfloat16, float16 or float64, got {dtype}"
            )
        super().__init__(
            num_groups=num_groups,
            in_features=in_features,
            out_features=out_features,
            bias=bias,
            accumulate_into_main_grad=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=bias and single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
            scale_bias=scale_bias,
        )
        self._rng_state_tracker_function = rng_state_tracker_function
        self._wgrad_hooks: list[Callable[[], Any]] = []
        self.wgrad_store = _WeightGradStore(delay_wgrad_compute)
        self._register(device, dtype)
        self._quantize_new_weights()

    # -- parameters

    def _register(self, device: Any, dtype: torch.dtype | None) -> None:
        place = torch.device(default_device(device))
        dtype = dtype or torch.get_default_dtype()
        for name, shape in self._impl.parameters:
            meta = torch.empty(shape, device="meta", dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(meta))
        for group in range(0 if self.has_bias else self.num_groups):
            self.register_parameter(f"bias{group}", None)
        if place.type != "meta":
            self._materialize(place)

    def _materialize(self, place: torch.device) -> None:
        """Gives parameters of the meta device memory and initial values."""
        missing = {n: p for n, p in self._parameters.items() if p is not None and p.is_meta}
        for kind in ("weight", "bias"):
            names = [n for n in missing if n.startswith(kind)]
            numbered = [n for n in names if n != kind and _C.quantized_of(missing[n]) is None]
            # Parts of one buffer, which the kernels of a device can use as one operand.
            if len(numbered) == self.num_groups and place.type != "cpu":
                like = missing[numbered[0]]
                whole = torch.empty((self.num_groups, *like.shape), dtype=like.dtype, device=place)
                made = dict(zip(numbered, whole.unbind(0), strict=True))
            else:
                made = {n: conversion.empty_like(missing[n], place) for n in names}
            for name, tensor in made.items():
                needs = missing[name].requires_grad
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=needs))
        self._initialize(missing)

    def _initialize(self, names: Iterable[str]) -> None:
        fork: Callable[[], Any] = nullcontext
        if self._rng_state_tracker_function is not None:
            fork = self._rng_state_tracker_function().fork
        for name in names:
            parameter = self._parameters.get(name)
            if parameter is not None and not parameter.is_meta:
                with torch.no_grad(), fork() if name.startswith("weight") else nullcontext():
                    initialize(self._impl, name, parameter)

    def reset_parameters(self) -> None:
        """Gives every parameter its initial values again, those of the meta device memory too.

        Weights as those of ``torch.nn.Linear``, each group by itself; biases are zeros.
        """
        present = [n for n, _ in self._impl.parameters if not self._is_meta(n)]
        self._initialize(present)
        self.pre_first_fuser_forward()

    def _is_meta(self, name: str) -> bool:
        parameter = self._parameters.get(name)
        return parameter is not None and parameter.is_meta

    def pre_first_fuser_forward(self) -> None:
        """Parameters that are still on the meta device get memory and initial values."""
        own = [p for p in self._parameters.values() if p is not None]
        if any(p.is_meta for p in own):
            places = [p.device for p in own if not p.is_meta]
            self._materialize(places[0] if places else torch.device(default_device(None)))

    def _quantize_new_weights(self) -> None:
        if self.single_grouped_weight and self._handle.new_weight(self.weight[0].detach()):
            raise RuntimeError(
                "[GroupedLinear] quantized_model_init gives each group's weight a format of its "
                "own, so it needs single_grouped_weight=False"
            )
        for group in range(0 if self.single_grouped_weight else self.num_groups):
            quantize_new_weight(self, self, f"weight{group}", group)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_delayed(name, param)

    def _mark_delayed(self, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and name.startswith("weight") and self.need_backward_dw():
            param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    @property
    def _with_quantized_weight(self) -> bool:
        """Whether its weights are kept in low precision."""
        return any(_C.quantized_of(w) is not None for w in self._get_weight_tensors())

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        """The weight of each group."""
        if self.single_grouped_weight:
            return list(self.weight.unbind(0))
        return [getattr(self, f"weight{group}") for group in range(self.num_groups)]

    def _get_packed_bias_tensor(self, dtype: torch.dtype) -> torch.Tensor | None:
        """All biases, [num_groups, out_features]."""
        if not self.has_bias:
            return None
        if self.single_grouped_bias:
            return self.bias.to(dtype)
        biases = [getattr(self, f"bias{group}") for group in range(self.num_groups)]
        return torch.stack(biases).to(dtype)

    # -- weight gradients that wait

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        return bool(self._impl.get_option("delay_wgrad_compute"))

    def backward_dw(self) -> None:
        """Makes the weight gradients of the first backward whose gradients were not made yet.

        They are added to ``grad``, or to ``main_grad``. Afterwards the functions given to
        :meth:`register_wgrad_accumulation_and_reduce_hooks` run. Nothing happens where none wait.
        """
        if self._impl.num_delayed == 0:
            return
        self._impl.backward_dw()
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """``hook()`` runs after each :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()

    # -- checkpoints

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._adopt_weights()

    def _adopt_weights(self) -> None:
        for group in range(0 if self.single_grouped_weight else self.num_groups):
            weight = self._parameters.get(f"weight{group}")
            if weight is not None:
                self._handle.adopt_weight(weight, group)

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        state["_wgrad_hooks"] = []  # they belong to the module that they were given to
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt_weights()
        for name, parameter in self._parameters.items():
            self._mark_delayed(name, parameter)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}"
        )

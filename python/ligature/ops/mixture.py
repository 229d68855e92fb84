"""A block of experts as one container."""

from __future__ import annotations

from typing import Any

import torch

from .activation import ScaledSReLU, ScaledSwiGLU
from .basic import Combine, Dispatch, GroupedLinear, TopKRouter
from .op import BasicOperation
from .sequential import Sequential

__all__ = ["mixture_of_experts"]


def mixture_of_experts(
    hidden_size: int,
    ffn_hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    activation: BasicOperation | None = None,
    bias: bool = False,
    name: str = "experts",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **router: Any,
) -> Sequential:
    """``TopKRouter, Dispatch, GroupedLinear, ScaledSwiGLU, GroupedLinear, Combine``, joined.

    Its output has the shape of its input ``[..., hidden_size]``. Behind it come the auxiliary loss,
    where one of its coefficients is not zero, and the tokens per expert, with ``expert_bias``. ::

        experts = te.ops.mixture_of_experts(512, 1024, 8, 2, aux_loss_coeff=0.01)
        y, loss = experts(x)

    Args:
        hidden_size: size of the input's last dimension.
        ffn_hidden_size: size of what the activation gives.
        num_experts, top_k: how many experts there are, and how many a token is sent to.
        activation: a scaled one, by default ``ScaledSwiGLU()``. It multiplies by the row's
            probability.
        bias: whether the experts' linear layers have one. The second's is multiplied by the row's
            probability too.
        name: its channels are ``name.indices``, ``name.probabilities``, ``name.loss``,
            ``name.counts``, ``name.splits``, ``name.rows`` and ``name.map``.
        device, dtype: of the parameters.
        router: further arguments of :class:`TopKRouter`.
    """
    act = ScaledSwiGLU() if activation is None else activation
    if not isinstance(act, BasicOperation) or not type(act).__name__.startswith("Scaled"):
        raise TypeError(
            "[mixture_of_experts] activation must be an operation that takes scales, as "
            f"ScaledSwiGLU(), got {activation!r}"
        )
    has_bias = bool(router.get("expert_bias", False))
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    chooser = TopKRouter(hidden_size, num_experts, top_k, **where, **router)
    dispatch, combine = Dispatch(num_experts), Combine()
    width = ffn_hidden_size if isinstance(act, ScaledSReLU) else 2 * ffn_hidden_size
    first = GroupedLinear(num_experts, hidden_size, width, bias=bias, **where)
    second = GroupedLinear(
        num_experts, ffn_hidden_size, hidden_size, bias=bias, scale_bias=bias, **where
    )
    for op, slot, channel in (
        (dispatch, 0, "indices"),
        (dispatch, 1, "probabilities"),
        (first, 0, "splits"),
        (act, 0, "rows"),
        (second, 0, "splits"),
        *([(second, 1, "rows")] if bias else []),
        (combine, 0, "map"),
    ):
        op.set_extra_input_channel(slot, f"{name}.{channel}")
    has_loss = chooser.aux_loss_coeff != 0 or chooser.z_loss_coeff != 0
    outputs = {"indices": False, "probabilities": False, "loss": has_loss, "counts": has_bias}
    for slot, (channel, to_caller) in enumerate(outputs.items()):
        chooser.set_extra_output_channel(slot, f"{name}.{channel}", output_to_caller=to_caller)
    for slot, channel in enumerate(("splits", "rows", "map")):
        dispatch.set_extra_output_channel(slot, f"{name}.{channel}", output_to_caller=False)
    return Sequential(chooser, dispatch, first, act, second, combine)

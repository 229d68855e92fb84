"""The built-in fused operations, as they appear in plans."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from .fusible import FusibleOperation
from .op import FusedOperation, OperationContext, Tensors

__all__ = [
    "BackwardActivationBias",
    "BackwardAddLayerNorm",
    "BackwardAddRMSNorm",
    "BackwardLinearActivation",
    "BackwardLinearAdd",
    "BackwardLinearBias",
    "BackwardLinearScale",
    "DenseMLP",
    "ForwardBiasActivation",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP",
    "GroupedMLP_CuTeGEMMGLU",
    "GroupedMLP_CuTeGEMMUnary",
    "OverlapBackwardLinear",
    "OverlapForwardLinear",
    "OverlapWeightGrads",
    "UserbuffersBackwardLinear",
    "UserbuffersForwardLinear",
]


class _BuiltinFused(FusedOperation):
    """A fused operation that is computed in C++. Made of the operations it stands for, in order."""

    def __init__(self, *basic_ops: FusibleOperation) -> None:
        super().__init__(basic_ops)

    def _make_twin(self) -> None:
        self._op = _C.make_fused(type(self).__name__, list(self.basic_ops))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[Tensors],
        **unused: Any,
    ) -> tuple[torch.Tensor, list[Tensors]]:
        """The forward pass, for one that has it."""
        return _C.fuser_forward(
            self._op, list(self.basic_ops), basic_op_ctxs, input_, basic_op_extra_inputs
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[Tensors],
    ) -> tuple[torch.Tensor | None, list[Tensors], list[Tensors]]:
        """The backward pass, for one that has it."""
        return _C.fuser_backward(self._op, basic_op_ctxs, grad_output, basic_op_grad_extra_outputs)


class ForwardBiasActivation(_BuiltinFused):
    """Forward of bias and activation, in one pass over memory where the device has a kernel."""


class ForwardLinearBiasActivation(_BuiltinFused):
    """Forward of linear, bias (if any) and activation."""


class ForwardLinearBiasAdd(_BuiltinFused):
    """Forward of linear, bias (if any) and the addition of an extra input."""


class ForwardLinearScaleAdd(_BuiltinFused):
    """Forward of linear, scale and the addition of an extra input, in one GEMM."""


class BackwardActivationBias(_BuiltinFused):
    """Backward of bias and activation, in one pass over memory."""


class BackwardLinearActivation(_BuiltinFused):
    """Backward of bias (if any), activation and linear, in one GEMM where the GPU has it."""


class BackwardLinearAdd(_BuiltinFused):
    """Backward of an extra output and a linear: the sum is part of the GEMM."""


class BackwardLinearBias(_BuiltinFused):
    """Backward of linear and bias: both gradients in one GEMM where the GPU has it."""


class BackwardLinearScale(_BuiltinFused):
    """Backward of linear and scale: the scale is part of the GEMMs."""


class BackwardAddLayerNorm(_BuiltinFused):
    """Backward of an extra output and a LayerNorm, in one pass over memory."""


class BackwardAddRMSNorm(_BuiltinFused):
    """Backward of an extra output and an RMSNorm, in one pass over memory."""


class DenseMLP(_BuiltinFused):
    """Norm, linear, activation, linear, forward and backward, that recomputes what is cheap."""


class GroupedMLP(_BuiltinFused):
    """Grouped linear, activation, grouped linear, forward and backward, with or without Dispatch
    before and Combine after them.

    It saves its input and the first linear's output; the second linear's input is made again in
    backward. With Dispatch and Combine the rows are gathered inside the GEMMs, and no copy of the
    input in the experts' order is made.
    """

    @classmethod
    def is_supported(cls) -> bool:
        """Whether it can be computed here: on every device, in every dtype and recipe."""
        return True


#: The names that te.ops gives it for gated and for other activations.
GroupedMLP_CuTeGEMMGLU = GroupedMLP
GroupedMLP_CuTeGEMMUnary = GroupedMLP


class OverlapForwardLinear(_BuiltinFused):
    """Forward of linear, bias (if any) and ReduceScatter (if any), in pieces: each travels while
    the next one is computed. The bits are those of the operations one after the other."""


class OverlapBackwardLinear(_BuiltinFused):
    """Backward of linear, bias (if any) and ReduceScatter: the gradient arrives in pieces, and the
    input's gradient of each is computed while the next one travels."""


class OverlapWeightGrads(_BuiltinFused):
    """Backward of linears of which the first is spread over ranks by columns, with what is between
    them: gradients of weights are computed while collectives are under way."""


#: The names that te.ops gives them.
UserbuffersForwardLinear = OverlapForwardLinear
UserbuffersBackwardLinear = OverlapBackwardLinear


def _wrap(op: _C.Operation) -> FusedOperation:
    """The Python object for a fused operation that was made in C++."""
    cls = globals().get(op.name, _BuiltinFused)
    made: FusedOperation = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    made.basic_ops = torch.nn.ModuleList(op.basic_op_objects())
    made._op = op
    return made

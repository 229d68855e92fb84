"""Basic operations that are computed in C++, and where their parameters are made."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .. import _C
from .._arguments import default_device
from ..quantization.roles import QuantizerRole
from .op import BasicOperation, OperationContext, Tensors, _forward_form


class BuiltinOperation(BasicOperation):
    """A basic operation that is computed in C++."""

    _impl: _C.BasicOperation
    #: Names under which a method of the forward or backward can be overridden in Python.
    _methods: ClassVar[tuple[str, ...]] = (
        "op_forward",
        "op_forward_compute",
        "op_forward_save_ctx",
        "op_backward",
        "fuser_forward",
        "fuser_forward_compute",
        "fuser_forward_save_ctx",
        "fuser_backward",
    )

    def __init__(self, **options: Any) -> None:
        self.__dict__["_options"] = options
        super().__init__()
        del self.__dict__["_options"]

    @classmethod
    def _operation_name(cls) -> str:
        """The built-in class that this class is or derives from."""
        for owner in cls.__mro__:
            if owner.__module__.startswith("ligature.ops.") and issubclass(owner, BuiltinOperation):
                return owner.__name__
        raise TypeError(cls.__name__)

    @classmethod
    def _is_overridden(cls) -> bool:
        return any(
            getattr(cls, name, None) is not getattr(BuiltinOperation, name, None)
            for name in cls._methods
        )

    def _make_twin(self) -> None:
        options = self.__dict__["_options"]
        self._impl = _C.make_operation(self._operation_name(), options)
        self.num_extra_inputs = self._impl.num_extra_inputs
        self.num_extra_outputs = self._impl.num_extra_outputs
        if self._is_overridden():
            super()._make_twin()
            self._impl.bind(self)
        else:
            self._op = self._impl
            self._op.bind(self)

    def _guest_form(self) -> str:
        form = _forward_form(type(self), BuiltinOperation)
        if form != "none":
            return form
        return "fuser_classic" if self.num_extra_inputs or self.num_extra_outputs else "op_split"

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        state["_options"] = self._impl.options()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__["_options"] = state["_options"]
        super().__setstate__(state)
        del self.__dict__["_options"]

    def num_quantizers(self, mode: str) -> int:
        return len(self._impl.quantizer_roles(mode))

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole] | None:
        return self._impl.quantizer_roles(mode)

    def _register(self, device: Any, dtype: torch.dtype | None) -> None:
        """Makes the parameters that the C++ twin describes, and initializes them."""
        place = default_device(device)
        for name, shape in self._impl.parameters:
            tensor = torch.empty(shape, device=place, dtype=dtype or torch.get_default_dtype())
            self.register_parameter(name, torch.nn.Parameter(tensor))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives every parameter its initial values again."""
        for name, _ in self._impl.parameters:
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.device.type != "meta":
                initialize(self._impl, name, parameter)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self._impl.options().items() if v is not None)

    # -- the pieces, for Python code that covers this operation in a fusion

    def op_forward_compute(
        self, input_: torch.Tensor, *, requires_grad: bool, **unused: Any
    ) -> tuple[torch.Tensor, Tensors]:
        """Computes; returns the output and fresh tensors to be saved."""
        return self._impl.op_forward_compute(self, input_, requires_grad)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        tensors_to_save: Tensors,
        *,
        requires_grad: bool,
        **unused: Any,
    ) -> None:
        """Saves what its backward needs."""
        self._impl.op_forward_save_ctx(self, ctx, input_, tensors_to_save, requires_grad)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Tensors]:
        """Gradients of the input and of each parameter."""
        return self._impl.op_backward(ctx, grad_output)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[Tensors],
        **unused: Any,
    ) -> tuple[torch.Tensor, list[Tensors]]:
        """The whole forward, with lists of one entry."""
        return _C.fuser_forward(self._impl, [self], basic_op_ctxs, input_, basic_op_extra_inputs)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[Tensors],
    ) -> tuple[torch.Tensor | None, list[Tensors], list[Tensors]]:
        """The whole backward, with lists of one entry."""
        return _C.fuser_backward(
            self._impl, basic_op_ctxs, grad_output, basic_op_grad_extra_outputs
        )


def initialize(impl: _C.BasicOperation, name: str, parameter: torch.nn.Parameter) -> None:
    """Gives a parameter its initial values; a quantized one has them in its format."""
    if _C.quantized_of(parameter) is None:
        impl.initialize_parameter(name, parameter.detach())
        return
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    impl.initialize_parameter(name, values)
    with torch.no_grad():
        parameter.copy_(values)


def option(name: str, doc: str) -> Any:
    """An attribute that is an option of the C++ twin."""

    def get(self: BuiltinOperation) -> Any:
        return self._impl.get_option(name)

    def set_(self: BuiltinOperation, value: Any) -> None:
        self._impl.set_option(name, value)

    return property(get, set_, doc=doc)

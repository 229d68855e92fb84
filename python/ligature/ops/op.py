"""Base classes of everything that can be fused.

An operation is an ordinary ``torch.nn.Module`` that holds a handle (``_op``) on its C++ twin. The
twin of a built-in operation computes by itself; that of one written in Python calls its methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import compiler
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._arguments import listed
from ..quantization.roles import QuantizerRole
from .fusible import FusibleOperation, refuse_tracers

OperationContext = _C.OperationContext

Tensors = tuple[torch.Tensor | None, ...]


def _forward_form(cls: type, base: type) -> str:
    """Which methods define the forward of ``cls``: those of the nearest class that has any."""
    for owner in cls.__mro__:
        if owner is base or not issubclass(owner, base):
            break
        names = vars(owner)
        for kind in ("fuser", "op"):
            if f"{kind}_forward_compute" in names or f"{kind}_forward_save_ctx" in names:
                return f"{kind}_split"
            if f"{kind}_forward" in names:
                return f"{kind}_classic"
    return "none"


def _check_forms(cls: type, base: type) -> None:
    """Refuses a class that defines half of the split form, or both forms."""
    for kind in ("op", "fuser"):
        compute, save = f"{kind}_forward_compute", f"{kind}_forward_save_ctx"
        classic = f"{kind}_forward"
        own = vars(cls)
        if classic in own and (compute in own or save in own):
            raise TypeError(
                f"{cls.__name__} defines both {classic} and {compute if compute in own else save}; "
                f"a forward is written in the classic form ({classic}) or in the split form "
                f"({compute} and {save}), not in both"
            )

        def defined(name: str) -> bool:
            return any(
                name in vars(owner)
                for owner in cls.__mro__
                if issubclass(owner, base) and owner is not base
            )

        for half, other in ((compute, save), (save, compute)):
            if half in own and not defined(other):
                raise TypeError(
                    f"{cls.__name__} defines {half} without {other}; the split form needs both"
                )


class BasicOperation(FusibleOperation):
    """The smallest operation: parameters, a forward and a backward.

    Write its forward in one of two forms. Classic::

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return out

    Split: the first half computes and returns fresh tensors to be saved (and, if need be, a dict of
    plain values that become attributes of the context); the second saves, and may name the
    input. ::

        def op_forward_compute(self, input_, *, requires_grad, **unused):
            return out, (tensor,)

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **unused):
            ctx.save_for_backward(input_, *tensors_to_save)

    And its backward::

        def op_backward(self, ctx, grad_output):
            return grad_input, (grad_of_each_parameter,)

    Operations with extra inputs or outputs define ``fuser_forward`` and ``fuser_backward`` instead,
    whose arguments and results are lists with one entry per basic operation.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    _form: ClassVar[str] = "none"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_forms(cls, BasicOperation)
        cls._form = _forward_form(cls, BasicOperation)

    def __init__(self) -> None:
        super().__init__()
        self._make_twin()

    def _make_twin(self) -> None:
        cls = type(self)
        overrides = lambda *names: any(  # noqa: E731
            getattr(cls, name) is not getattr(BasicOperation, name) for name in names
        )
        self._op = _C.PythonOperation(
            name=cls.__name__,
            form=self._guest_form(),
            pre_forward=overrides("pre_first_fuser_forward", "pre_fuser_forward"),
            input_quantizer=overrides("get_input_quantizer", "get_quantizer"),
            grad_output_quantizer=overrides("get_grad_output_quantizer", "get_quantizer"),
            quantizer_roles=overrides("num_quantizers"),
        )
        self._op.bind(self)

    def _guest_form(self) -> str:
        return self._form

    @property
    def is_fused_op(self) -> bool:
        return False

    @property
    def _handle(self) -> _C.BasicOperation:
        op = self._op
        if isinstance(op, _C.PythonOperation):
            op.set_num_extra(self.num_extra_inputs, self.num_extra_outputs)
        assert isinstance(op, _C.BasicOperation)
        return op

    @property
    def _parameter_owner(self) -> torch.nn.Module:
        return self

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        op = self._handle
        state["_channels"] = (
            [op.extra_input_channel(i) for i in range(op.num_extra_inputs)],
            [
                (op.extra_output_channel(i), op.extra_output_to_caller(i))
                for i in range(op.num_extra_outputs)
            ],
        )
        state["_recipe_states"] = op.recipe_states()
        return state

    def __getstate__(self) -> dict[str, Any]:
        state = self._state()  # a function that has no name elsewhere cannot be pickled
        states = [item for item in state["_recipe_states"] if item[0]._can_be_described()]
        # As numbers: tensors are shared with another process, and these are gone before it reads.
        state["_recipe_states"] = [
            (recipe, _numbers_of(forward), _numbers_of(backward))
            for recipe, forward, backward in states
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        inputs, outputs = state.pop("_channels")
        recipe_states = state.pop("_recipe_states", ())
        super().__setstate__(state)
        self._make_twin()
        for recipe, forward, backward in recipe_states:
            scale = next(item[0] for item in (*forward, *backward) if item)
            device = scale.device if isinstance(scale, torch.Tensor) else torch.device("cpu")
            self._handle.load_recipe_state(
                recipe._native, device, _tensors_of(forward), _tensors_of(backward)
            )
        for i, name in enumerate(inputs):
            if name:
                self.set_extra_input_channel(i, name)
        for i, (name, to_caller) in enumerate(outputs):
            if name:
                self.set_extra_output_channel(i, name, output_to_caller=to_caller)

    # -- quantizers

    def num_quantizers(self, mode: str) -> int:
        """How many tensors it quantizes in ``"forward"`` or ``"backward"``.

        An operation written in Python that overrides this gets that many from each recipe. The
        first of forward is for its input, the first of backward for its output's gradient.
        """
        return 0

    def get_quantizer(self, mode: str, index: int) -> Any:
        """One of its quantizers: of the recipe that computes now, else of the one used last.

        None before it was used with any, and where the recipe wants high precision.
        """
        if self.num_quantizers(mode) == 0:
            return None
        return self._handle.quantizer(mode, index, self._quantizer_device())

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole] | None:
        """What each of its quantizers is for; None stands for input, weight and grad_output."""
        return None

    def reset_recipe_state(self, *, recipe: Any) -> None:
        """Begins anew with a recipe: factors of 1, no history."""
        if recipe is not None:
            self._handle.reset_recipe_state(recipe._native, self._quantizer_device())

    def _recipe_state_owner(self) -> BasicOperation | None:
        return self

    def _quantizer_device(self) -> torch.device:
        parameter = next(self._parameter_owner.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        count = self.num_quantizers(mode)
        roles = self.get_quantizer_roles(mode)
        name = type(self).__name__
        if roles is None:
            kinds = ["input", "weight"] if mode == "forward" else []
            kinds += [kinds[0] if kinds else "grad_output"] * count
            roles = [QuantizerRole(name, kind, name) for kind in kinds[:count]]
        if len(roles) != count:
            raise ValueError(
                f"[{name}] get_quantizer_roles({mode!r}) must give {count} roles, as "
                f"num_quantizers says, got {len(roles)}"
            )
        return list(roles)

    def get_input_quantizer(self) -> Any:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") > 0 else None

    def get_grad_output_quantizer(self) -> Any:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") > 0 else None

    # -- channels

    def set_extra_input_channel(self, index: int, channel: str | None) -> None:
        """Takes extra input ``index`` from the earlier extra output bound to ``channel``.

        With None it is the caller's again.
        """
        self._handle.set_extra_input_channel(index, channel)

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> None:
        """Gives extra output ``index`` to whatever later extra inputs are bound to ``channel``.

        With ``output_to_caller`` it is returned to the caller too. With None as channel it is the
        caller's alone again.
        """
        self._handle.set_extra_output_channel(index, channel, output_to_caller)

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """Runs this operation by itself; every extra input and output is the caller's."""
        if is_dynamo_compiling() or compiler._is_compiling_flag:  # cheaper than is_compiling()
            return self._forward_traced(input, extra_inputs, [kwargs] if kwargs else None)
        run = self.__dict__.get("_own_run")
        if run is None or type(extra_inputs) is not tuple or kwargs:
            refuse_tracers(self, extra_inputs)
            fuser = self._alone()
            if kwargs:
                return fuser(input, *extra_inputs, basic_op_kwargs=[kwargs])
            run = self.__dict__["_own_run"]
        # One line for the first call and later ones: torch.jit.trace compares them.
        return run(input, *extra_inputs) if extra_inputs else run(input)


def _numbers_of(states: list[Any]) -> list[Any]:
    return [None if item is None else tuple(t.tolist() for t in item) for item in states]


def _tensors_of(states: list[Any]) -> list[Any]:
    made = lambda t: torch.as_tensor(t, dtype=torch.float32)  # noqa: E731
    return [None if item is None else tuple(map(made, item)) for item in states]


class FusedOperation(FusibleOperation):
    """Stands for one or more basic operations, in forward, in backward or in both.

    It holds no parameters and no state: it reads them from ``basic_ops``. A forward-only or
    backward-only fused operation is interchangeable with its basic operations, contexts included; a
    joint one need only be right as a pair. Define ``fuser_forward`` (or ``fuser_forward_compute``
    and ``fuser_forward_save_ctx``) and/or ``fuser_backward``.
    """

    basic_ops: Any
    #: Whether it may cover both ends of a channel. It then runs that channel itself: it is given
    #: None for the inner extra input, and may return None for the inner extra output unless that is
    #: public or consumed outside.
    handles_internal_channels: bool = True

    _form: ClassVar[str] = "none"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_forms(cls, FusedOperation)
        cls._form = _forward_form(cls, FusedOperation)

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        flat: list[BasicOperation] = []
        for op in listed(type(self).__name__, "basic_ops", "a list of operations", basic_ops):
            if not isinstance(op, FusibleOperation):
                raise TypeError(
                    f"[{type(self).__name__}] basic_ops must be operations, got {type(op).__name__}"
                )
            flat.extend(basic_ops_of(op))
        if not flat:
            raise ValueError(
                f"[{type(self).__name__}] a fused operation stands for at least one basic "
                "operation, got none"
            )
        self.basic_ops = torch.nn.ModuleList(flat)
        self._make_twin()

    def _make_twin(self) -> None:
        self._op = _C.PythonFusedOperation(
            name=type(self).__name__,
            ops=list(self.basic_ops),
            form=self._form,
            internal_channels=self.handles_internal_channels,
        )
        self._op.bind(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_twin()

    @property
    def is_fused_op(self) -> bool:
        return True

    def get_input_quantizer(self) -> Any:
        return self.basic_ops[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any:
        return self.basic_ops[-1].get_grad_output_quantizer()

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Runs its basic operations by themselves, fused as the registry says."""
        if is_dynamo_compiling() or compiler._is_compiling_flag:
            return self._forward_traced(input, extra_inputs, basic_op_kwargs)
        if type(extra_inputs) is not tuple:
            refuse_tracers(self, extra_inputs)
        fuser = self.__dict__.get("_own_fuser") or self._alone()
        return fuser(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def basic_ops_of(op: FusibleOperation) -> list[BasicOperation]:
    """The basic operations that an operation stands for."""
    if isinstance(op, FusedOperation):
        return list(op.basic_ops)
    assert isinstance(op, BasicOperation)
    return [op]

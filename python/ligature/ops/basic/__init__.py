"""The basic operations. What each computes is documented with its class; all of it runs in C++."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Self

import torch

from ..._arguments import listed
from ...distributed import group_name, group_named
from ...quantization.model_init import quantize_new_weight
from .. import activation
from .._builtin import BuiltinOperation, option
from ..activation import *  # noqa: F403
from .collective import AllGather, AllReduce, ReduceScatter
from .grouped_linear import GroupedLinear
from .routing import Combine, Dispatch, TopKRouter

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "Combine",
    "ConstantScale",
    "Dispatch",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReduceScatter",
    "Reshape",
    "TopKRouter",
]
__all__ += activation.__all__

Device = torch.device | str | None


def tensor_parallel_options(
    op: str, mode: str | None, group: Any, sequence_parallel: bool
) -> dict[str, Any]:
    """How a linear layer is spread over ranks, as options of the core."""
    name = group_name(op, "tensor_parallel_group", group)
    return {
        "tensor_parallel_mode": mode,
        "tensor_parallel_group": name,
        "sequence_parallel": bool(sequence_parallel),
    }


class TensorParallelAttributes:
    """What te.ops tells of a layer that is spread over ranks, in its canonical form."""

    def _spread(self, name: str) -> Any:
        """An option of the whole layer."""
        raise NotImplementedError

    @property
    def tensor_parallel_mode(self) -> str | None:
        """``"column"``, ``"row"`` or None, as over a group of one rank."""
        mode: str | None = self._spread("tensor_parallel_mode")
        return mode

    @property
    def tensor_parallel_group(self) -> Any:
        """The group; None without a mode, and for torch's default group."""
        return group_named(self._spread("tensor_parallel_group"))

    @property
    def tensor_parallel_size(self) -> int:
        """How many ranks have a part of it."""
        return self._spread("tensor_parallel_size") or 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are spread too."""
        return bool(self._spread("sequence_parallel"))


class _Part(BuiltinOperation):
    """An operation that may be part of a composite, whose parameters it then computes with."""

    _owner: Any = None

    @property
    def _composite(self) -> torch.nn.Module | None:
        return None if self._owner is None else self._owner()

    @property
    def _parameter_owner(self) -> torch.nn.Module:
        if self._owner is None:
            return self
        composite: torch.nn.Module | None = self._owner()
        if composite is None:
            raise RuntimeError(
                f"[{self._impl.label}] this {type(self).__name__} was part of a "
                f"{self._impl.label} that is gone, and its parameters with it"
            )
        return composite

    @classmethod
    def _part_of(cls, composite: torch.nn.Module, **options: Any) -> Self:
        """One without parameters of its own."""
        made = cls.__new__(cls)
        BuiltinOperation.__init__(made, **options)
        made._set_composite(composite)
        return made

    def _set_composite(self, composite: torch.nn.Module) -> None:
        self.__dict__["_owner"] = weakref.ref(composite)
        self._impl.label = type(composite).__name__

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        state.pop("_owner", None)
        return state

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get("_owner")
        if owner is not None and name in ("weight", "bias"):
            return getattr(self._parameter_owner, name)
        return super().__getattr__(name)


class BasicLinear(TensorParallelAttributes, _Part):
    """``y = x W^T``.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        device: where the weight lives; by default torch's default device, CUDA where there is one.
        dtype: of the weight; by default torch's default dtype.
        tensor_parallel_mode: ``"column"`` gives each rank some of the output's features, ``"row"``
            some of the input's, whose results are added up. The sizes above are those of the whole
            layer; :attr:`local_in_features` and :attr:`local_out_features` are a rank's.
        tensor_parallel_group: a process group or a one-dimensional mesh; None is torch's default
            group.
        sequence_parallel: tokens, the first dimension, are spread over the ranks wherever features
            are not: a column layer gathers its input, a row layer scatters its output.
        rng_state_tracker_function: gives an object whose ``fork()`` surrounds the initialization.
        accumulate_into_main_grad: add the weight's gradient into ``weight.main_grad`` (or overwrite
            it when ``weight.overwrite_main_grad``) instead of ``weight.grad``.
        userbuffers_options: a dict asks for GEMMs that are cut into pieces, each computed while
            the next one travels; what it holds is not looked at.

    A call's ``is_first_microbatch`` is accepted for compatibility, no effect: a weight is quantized
    again when it has changed.
    """

    in_features: int = option("in_features", "Size of the input's last dimension.")
    out_features: int = option("out_features", "Size of the output's last dimension.")
    _userbuffers_options: dict[str, Any] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        parallel = tensor_parallel_options(
            name, tensor_parallel_mode, tensor_parallel_group, sequence_parallel
        )
        if userbuffers_options is not None and not isinstance(userbuffers_options, dict):
            raise TypeError(
                f"[{name}] userbuffers_options must be a dict or None, got {userbuffers_options!r}"
            )
        overlap = None if userbuffers_options is None else userbuffers_options.get("comm_name", "")
        super().__init__(
            in_features=in_features,
            out_features=out_features,
            accumulate_into_main_grad=accumulate_into_main_grad,
            userbuffers_comm_name=None if overlap is None else str(overlap),
            **parallel,
        )
        self._userbuffers_options = userbuffers_options
        self._rng_state_tracker_function = rng_state_tracker_function
        self._register(device, dtype)
        quantize_new_weight(self, self)

    def reset_parameters(self) -> None:
        tracker = self._rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork():
            super().reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt_weight()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._adopt_weight()

    def _adopt_weight(self) -> None:
        weight = self._parameters.get("weight")
        if weight is not None:
            self._handle.adopt_weight(weight)

    def _spread(self, name: str) -> Any:
        return self._impl.get_option(name)

    @property
    def local_in_features(self) -> int:
        """Size of this rank's input's last dimension."""
        return self._impl.parameters[0][1][1]

    @property
    def local_out_features(self) -> int:
        """Size of this rank's output's last dimension."""
        return self._impl.parameters[0][1][0]

    @property
    def _accumulate_into_main_grad(self) -> bool:
        return bool(self._impl.get_option("accumulate_into_main_grad"))


class Bias(_Part):
    """``y = x + b`` over the last dimension, of this ``size``.

    With ``tensor_parallel`` each rank of ``tensor_parallel_group`` has a part of the features, and
    ``size`` is that of all together.
    """

    size: int = option("size", "Number of features, of all ranks.")

    @property
    def local_size(self) -> int:
        """Number of this rank's features."""
        size: int = self._impl.parameters[0][1][0]
        return size

    def __init__(
        self,
        size: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        name = group_name(type(self).__name__, "tensor_parallel_group", tensor_parallel_group)
        super().__init__(
            size=size, tensor_parallel=bool(tensor_parallel), tensor_parallel_group=name
        )
        self._register(device, dtype)


class _Norm(BuiltinOperation):
    eps: float = option("eps", "Added to the variance.")
    zero_centered_gamma: bool = option("zero_centered_gamma", "Whether the factor is 1 + weight.")

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        shape = (
            (normalized_shape,)
            if isinstance(normalized_shape, int)
            else listed(type(self).__name__, "normalized_shape", "sizes", normalized_shape)
        )
        margin = max(sm_margin.values(), default=0) if isinstance(sm_margin, dict) else sm_margin
        super().__init__(
            normalized_shape=tuple(int(n) for n in shape),
            eps=float(eps),
            zero_centered_gamma=zero_centered_gamma,
            sm_margin=margin,
        )
        self._register(device, dtype)

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """The trailing dimensions that are normalized together."""
        shape: tuple[int, ...] = self._impl.get_option("normalized_shape")
        return shape


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the trailing dimensions.

    Statistics are computed in float32. With ``zero_centered_gamma`` the factor is ``1 + weight``.
    ``sm_margin`` is accepted for compatibility, no effect: no kernel leaves multiprocessors free.
    """


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) * weight`` over the trailing dimensions.

    Statistics are computed in float32. With ``zero_centered_gamma`` the factor is ``1 + weight``.
    ``sm_margin`` is accepted for compatibility, no effect: no kernel leaves multiprocessors free.
    """


class L2Normalization(BuiltinOperation):
    """``x / sqrt(sum(x²) + eps)`` over the last dimension.

    ``seq_length`` and ``micro_batch_size`` are accepted for compatibility, no effect: kernels need
    no warm-up with the sizes to come.
    """

    eps: float = option("eps", "Added to the sum of squares.")

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__(eps=float(eps), seq_length=seq_length, micro_batch_size=micro_batch_size)


class Dropout(BuiltinOperation):
    """Zeroes values with probability ``p`` and scales the others up; nothing in eval mode."""

    p: float = option("p", "Probability of a zero.")

    def __init__(self, p: float) -> None:
        super().__init__(p=float(p))


class Identity(BuiltinOperation):
    """Its input."""

    def __init__(self) -> None:
        super().__init__()


class Reshape(BuiltinOperation):
    """The same values in another ``shape``; one dimension may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        sizes = listed("Reshape", "shape", "sizes", shape)
        super().__init__(shape=tuple(int(n) for n in sizes))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its output."""
        shape: tuple[int, ...] = self._impl.get_option("shape")
        return shape


class ConstantScale(BuiltinOperation):
    """``x * scale``."""

    scale: float = option("scale", "The factor.")

    def __init__(self, scale: float) -> None:
        super().__init__(scale=float(scale))


class Quantize(BuiltinOperation):
    """Its input in low precision, for an operation that comes after it, also in another container.

    Args:
        forward: quantize the value.
        backward: quantize its gradient.

    Without a recipe it does nothing.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__(forward=forward, backward=backward)


class _Branch(BuiltinOperation):
    in_place: bool = option("in_place", "Whether it writes into the tensor of the branch.")

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(in_place=in_place)


class AddExtraInput(_Branch):
    """Adds an extra input. With ``in_place`` the sum is written into the extra input's memory."""


class MakeExtraOutput(_Branch):
    """Returns its input as an extra output too.

    With ``in_place`` the gradients are added up in the memory of the extra output's gradient.
    """

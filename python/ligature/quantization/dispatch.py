"""What torch's functions do with quantized tensors.

Any function works: it is given the values in high precision, and what it wrote into them is
quantized again. Only the few in the table at the end treat the quantized data itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import _C

aten = torch.ops.aten

# The class for each kind of scaling, entered by the classes themselves.
CLASSES: dict[str, type[torch.Tensor]] = {}
# What a quantized tensor may stand for.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_NOTHING = nullcontext()


def _as(handle: _C.QuantizedTensor) -> Any:
    """What shares memory with its parts counts versions where they do: outside inference mode."""
    if torch.is_inference_mode_enabled() == handle.is_inference:
        return _NOTHING
    return torch.inference_mode(handle.is_inference)


def wrap(handle: _C.QuantizedTensor, requires_grad: bool = False) -> Any:
    """The tensor object that stands for ``handle``, of the class of its format."""
    with _as(handle):
        tensor = torch.Tensor._make_wrapper_subclass(
            CLASSES[handle.fields["scaling"]],
            handle.sizes,
            dtype=handle.dtype,
            device=handle.device,
            requires_grad=requires_grad,
        )
    _C.attach_quantized(tensor, handle)
    return tensor


def write(handle: _C.QuantizedTensor, values: torch.Tensor) -> None:
    """Quantizes ``values`` into the memory of ``handle``, with scales that hold them."""
    handle.write(values)


class Whole:
    """The values of a quantized tensor, for views of it that its format cannot express."""

    def __init__(self, handle: _C.QuantizedTensor) -> None:
        self.handle = handle
        with _as(handle):
            self.values = handle.dequantize()
        self.version = self._version_now()

    def _version_now(self) -> int | None:
        part = self.handle.tensors[0]
        return None if part.is_inference() else part._version

    def refresh(self) -> None:
        """Takes over what was written into the quantized tensor since."""
        version = self._version_now()
        if version is None or version != self.version:
            self.values.copy_(self.handle.dequantize())
            self.version = version

    def write_back(self) -> None:
        """Quantizes what was written into the values, and takes over how it was rounded."""
        write(self.handle, self.values)
        self.version = -1
        self.refresh()


class QuantizedView(torch.Tensor):
    """A part of a quantized tensor, or another order of it, in high precision.

    It follows its quantized tensor: what is written into one is seen in the other. Functions of it
    give plain tensors.
    """

    _plain: torch.Tensor
    _whole: Whole

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(values_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return values_of(self).clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), values_of(self).clone())

    # What reads or writes memory without asking torch's functions.

    def apply_(self, callable: Callable[..., Any]) -> torch.Tensor:
        if self.requires_grad:
            return torch.Tensor.apply_(self, callable)  # which refuses it
        return self.copy_(values_of(self).clone().apply_(callable))

    def numpy(self, *, force: bool = False) -> Any:
        return _exported(self).numpy(force=force)

    def tolist(self) -> Any:
        return values_of(self).tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return _exported(self).__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return _exported(self).__dlpack__(**kwargs)


def _view(plain: torch.Tensor, whole: Whole) -> torch.Tensor:
    view = torch.Tensor._make_subclass(QuantizedView, plain)
    view._plain = plain
    view._whole = whole
    return view


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the values of any: dequantized where it is quantized."""
    if isinstance(tensor, QuantizedView):
        tensor._whole.refresh()
        return tensor._plain
    handle = _C.quantized_of(tensor)
    return tensor if handle is None else handle.dequantize()


def _exported(tensor: torch.Tensor) -> torch.Tensor:
    """The values for other libraries: of a view a copy, which they cannot write through."""
    values = values_of(tensor)
    if isinstance(tensor, QuantizedView):
        values = values.clone()
    return values.requires_grad_() if tensor.requires_grad else values  # torch refuses these


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The body of ``__torch_dispatch__``."""
    special = _TABLE.get(func)
    if special is not None:
        result = special(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    # Without autograd (inference mode) composite functions come here whole.
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _with_values(func, args, kwargs)


def _with_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on values in high precision; what it writes is quantized again."""
    wholes: dict[int, Whole] = {}  # one per quantized tensor, however often it is given

    def whole_of(tensor: torch.Tensor) -> Whole | None:
        if isinstance(tensor, QuantizedView):
            return tensor._whole
        handle = _C.quantized_of(tensor)
        if handle is None:
            return None
        if id(handle) not in wholes:
            wholes[id(handle)] = Whole(handle)
        return wholes[id(handle)]

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        whole = whole_of(tensor)
        if whole is None:
            return tensor
        return values_of(tensor) if isinstance(tensor, QuantizedView) else whole.values

    low_args, low_kwargs = tree_map_only(torch.Tensor, lower, (args, kwargs))
    result = func(*low_args, **low_kwargs)
    if func.is_view and (viewed := whole_of(args[0])) is not None:
        return tree_map_only(torch.Tensor, lambda t: _view(t, viewed), result)
    if not func._schema.is_mutable:
        return result
    given = {}
    for tensor, counted in _written(func, args, kwargs):
        if not counted and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        whole = whole_of(tensor)
        if whole is None:
            continue
        low = tensor._plain if isinstance(tensor, QuantizedView) else whole.values
        shape = tensor.shape if isinstance(tensor, QuantizedView) else whole.handle.sizes
        if list(low.shape) != list(shape):
            raise RuntimeError(
                f"[{type(tensor).__name__}] {func} must leave a tensor of shape "
                f"{list(shape)} as it is, got {list(low.shape)}"
            )
        if isinstance(tensor, QuantizedView):
            whole.write_back()
        else:
            write(whole.handle, whole.values)
        given[id(low)] = tensor
    return tree_map_only(torch.Tensor, lambda t: given.get(id(t), t), result)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """The tensors that ``func`` writes into, and whether autograd counts that by itself.

    It does for single tensors, not for the lists of optimizers' functions.
    """
    found = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    found[id(tensor)] = tensor, tensor is value
    return list(found.values())


# -- functions that treat the quantized data itself. NotImplemented: only the values can be treated.


def _alias(func: Any, tensor: torch.Tensor) -> Any:
    handle = _C.quantized_of(tensor)
    return NotImplemented if handle is None else wrap(handle)


def _reshape(func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    handle = _C.quantized_of(tensor)
    if handle is None:
        return NotImplemented
    shape = func(torch.empty(tensor.shape, device="meta"), *args).shape
    if len(shape) == 0 or shape[-1] != tensor.shape[-1]:
        return NotImplemented
    return wrap(handle.view(list(shape)))


def _each_part(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    handle = _C.quantized_of(tensor)
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    if handle is None or memory_format not in (torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return wrap(handle.with_tensors([func(part, *args, **kwargs) for part in handle.tensors]))


def _to_copy(func: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None) or tensor.dtype
    if dtype not in DTYPES or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    moved = _each_part(func, tensor, **kwargs)
    return moved if moved is NotImplemented else wrap(moved._handle.with_dtype(dtype))


def _copy(func: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    handle = _C.quantized_of(to)
    if handle is None:
        return NotImplemented
    other = _C.quantized_of(source)
    if other is not None and handle.same_layout(other):
        handle.copy_from(other)
    else:
        write(handle, values_of(source).expand(to.shape))
    return to


def _like(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A new plain tensor: only shape, dtype and device count."""
    pattern = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return func(pattern, *args, **kwargs)


def _dequantize(func: Any, tensor: torch.Tensor) -> Any:
    return values_of(tensor).clone()


_TABLE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([aten.detach.default, aten.alias.default], _alias),
    **dict.fromkeys(
        [
            aten.view.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ],
        _reshape,
    ),
    **dict.fromkeys([aten.clone.default, aten._pin_memory.default], _each_part),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.dequantize.self: _dequantize,
    **dict.fromkeys(
        [
            aten.empty_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
        ],
        _like,
    ),
}

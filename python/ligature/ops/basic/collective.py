"""Operations that exchange their input with the other ranks of a group."""

from __future__ import annotations

from typing import Any, Self

from ... import _C
from ...distributed import group_name, group_named
from .._builtin import BuiltinOperation

__all__ = ["AllGather", "AllReduce", "ReduceScatter"]


class _Collective(BuiltinOperation):
    def __init__(self, process_group: Any, **options: Any) -> None:
        name = group_name(type(self).__name__, "process_group", process_group)
        super().__init__(process_group=name, **options)

    @classmethod
    def _named(cls, name: str | None) -> Self:
        """Over a group that is known by its name."""
        made = cls.__new__(cls)
        BuiltinOperation.__init__(made, process_group=name)
        return made

    @property
    def process_group(self) -> Any:
        """The group; None is torch's default group."""
        return group_named(self._impl.get_option("process_group"))

    @property
    def process_group_size(self) -> int:
        """How many ranks it has."""
        size: int = _C.group_info(self._impl.get_option("process_group"))["size"]
        return size


class AllGather(_Collective):
    """The inputs of all ranks, joined along the first dimension in the order of the ranks.

    Its gradient is scattered. Where the next operation computes in low precision, the input is
    quantized before it travels, if that takes fewer bytes.

    Args:
        process_group: a process group or a one-dimensional mesh; None is torch's default group.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__(process_group)


class ReduceScatter(_Collective):
    """This rank's part, along the first dimension, of the sum of all ranks' inputs.

    Its gradient is gathered. Arguments as :class:`AllGather`.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__(process_group)


class AllReduce(_Collective):
    """The sum of all ranks' inputs. The input stays as it is.

    Its gradient is that of its output: what comes after it is computed alike on all ranks.
    ``reduce_in_backward`` is accepted for compatibility, no effect. Other arguments as
    :class:`AllGather`.
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group, reduce_in_backward=bool(reduce_in_backward))

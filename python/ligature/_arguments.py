"""Arguments that several parts of the package take: their checks and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def check_group(owner: str, name: str, group: Any) -> None:
    """Refuses what is no group of processes, whether or not there are other processes."""
    distributed = torch.distributed
    if group is None:
        return
    if distributed.is_available():
        if isinstance(group, distributed.ProcessGroup):
            return
        # What new_group() gives a process that is not in the group.
        if isinstance(group, int) and group == distributed.GroupMember.NON_GROUP_MEMBER:
            return
    raise TypeError(
        f"[{owner}] {name} must be a torch.distributed.ProcessGroup or None, got {group!r}"
    )


def listed(owner: str, name: str, items: str, given: Any) -> list[Any]:
    """What is given, as a list; ``items`` says of what."""
    if not isinstance(given, Iterable):
        got = "None" if given is None else type(given).__name__
        raise TypeError(f"[{owner}] {name} must be {items}, got {got}")
    return list(given)


def default_device(device: torch.device | str | None) -> torch.device:
    """The device given, else the one the user chose for torch, else CUDA where there is one."""
    if device is not None:
        return torch.device(device)
    if _user_default_device() or not torch.cuda.is_available():
        return torch.get_default_device()
    return torch.device("cuda", torch.cuda.current_device())


def _user_default_device() -> bool:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    if any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return True
    context = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    return getattr(context, "device_context", None) is not None

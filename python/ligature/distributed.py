"""Groups of processes, partial gradients, and what communication took.

Operations take a ``torch.distributed.ProcessGroup``, a one-dimensional ``DeviceMesh``, or None for
torch's default group (this process alone where there is none). They keep the group's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import _C

__all__ = [
    "CudaRNGStatesTracker",
    "RNGStatesTracker",
    "TransferTimes",
    "configure",
    "mark_partial_grads",
    "partial_parameters",
    "record_timeline",
    "reduce_partial_grads",
    "timeline",
    "transfer_times",
]


def default_group_name() -> str | None:
    """The name of torch's default group; None where there is none."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    name: str = distributed.distributed_c10d._get_default_group().group_name
    return name


def group_name(owner: str, argument: str, group: Any) -> str | None:
    """The name of a group that an operation is given; None is torch's default group."""
    if group is None:
        return None
    distributed = torch.distributed
    if distributed.is_available():
        if isinstance(group, distributed.ProcessGroup):
            name: str = group.group_name
            return name
        if isinstance(group, int) and group == distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"[{owner}] {argument}: this process is not in the group")
        if isinstance(group, distributed.device_mesh.DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"[{owner}] {argument} must be a mesh of one dimension, got {group.ndim} "
                    f"({group.mesh_dim_names}); take one of them: mesh['tp']"
                )
            return group_name(owner, argument, group.get_group())
    raise TypeError(
        f"[{owner}] {argument} must be a torch.distributed.ProcessGroup, a DeviceMesh of one "
        f"dimension or None, got {group!r}"
    )


def group_named(name: str | None) -> Any:
    """The process group of this name; None is torch's default group."""
    if name is None:
        return None
    resolve: Any = getattr(torch.distributed.distributed_c10d, "_resolve_process_group")  # noqa: B009
    return resolve(name)


def configure(
    group: Any = None,
    *,
    reduction: str = "native",
    check: str = "once",
    reduce_partial_grads: bool = False,
    overlap: bool = True,
    pieces: int | None = None,
    handshake_timeout: float = 60.0,
) -> None:
    """Says how operations communicate over a group from now on; every rank must say the same.

    Args:
        group: None is torch's default group.
        reduction: ``"native"`` adds up as the backend does; ``"ordered"`` in the order of the
            ranks, in float32 with one rounding, so that bits depend neither on the backend nor on
            how a GEMM is cut into pieces. It takes more memory and messages.
        check: ``"once"`` compares what ranks are about to compute before the first run of each
            plan, ``"always"`` before every run, with the sizes of its input: for debugging.
        reduce_partial_grads: add up in backward the gradients of parameters that see one rank's
            tokens (:func:`partial_parameters`), instead of by :func:`reduce_partial_grads`.
        overlap: compute while a collective is under way; False awaits each where it starts.
        pieces: into how many pieces a GEMM beside a collective is cut; None lets the model choose,
            from what it measured.
        handshake_timeout: how long ranks wait for each other's plan, in seconds.
    """
    for what, value, known in (
        ("reduction", reduction, ("native", "ordered")),
        ("check", check, ("once", "always")),
    ):
        if value not in known:
            raise ValueError(f"[configure] {what} must be one of {known}, got {value!r}")
    _C.configure_group(
        group_name("configure", "group", group),
        reduction == "ordered",
        check == "always",
        bool(reduce_partial_grads),
        bool(overlap),
        0 if pieces is None else int(pieces),
        float(handshake_timeout),
    )


@dataclass(frozen=True)
class PartialParameter:
    """A parameter whose gradient is a sum over one rank's tokens."""

    name: str
    parameter: torch.nn.Parameter
    group: Any


def mark_partial_grads(fuser: Any) -> None:
    """Sets ``sequence_parallel = True`` on the parameters of a fuser that see one rank's tokens."""
    for index, name in fuser._partial_gradients:
        op = fuser._basic_ops[index]
        for parameter_name in op._handle.parameter_names:
            parameter = op._parameter_owner._parameters.get(parameter_name)
            if parameter is not None:
                parameter.sequence_parallel = True
                parameter._sequence_parallel_group = name


def _fusers(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for group in getattr(module, "_module_groups", None) or ():
            if hasattr(group, "_partial_gradients"):
                yield group


def partial_parameters(model: torch.nn.Module) -> list[PartialParameter]:
    """The parameters whose gradients have to be added up over a group after backward.

    They are those in front of a linear with ``sequence_parallel=True`` that gathers its input, and
    behind one that scatters its output: norms and biases mostly. Known from the first call on;
    those that you mark yourself, ``parameter.sequence_parallel = True``, count too.
    """
    for fuser in _fusers(model):
        mark_partial_grads(fuser)
    return [
        PartialParameter(name, parameter, getattr(parameter, "_sequence_parallel_group", None))
        for name, parameter in model.named_parameters()
        if getattr(parameter, "sequence_parallel", False) and parameter.requires_grad
    ]


def reduce_partial_grads(model: torch.nn.Module, group: Any = None) -> None:
    """Adds up the gradients of :func:`partial_parameters`, in one all-reduce per group and dtype.

    Call it after backward and before the optimizer. ``main_grad`` is added up where a parameter has
    one and no ``grad``. ``group``: instead of the group that each parameter's linear has.
    """
    flat: dict[tuple[str | None, torch.dtype, torch.device], list[torch.Tensor]] = {}
    given = group_name("reduce_partial_grads", "group", group)
    for item in partial_parameters(model):
        parameter = item.parameter
        grad = parameter.grad
        if grad is None:
            grad = getattr(parameter, "main_grad", None)
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        key = (given if group is not None else item.group, grad.dtype, grad.device)
        flat.setdefault(key, []).append(grad)
    for (name, _, _), grads in flat.items():
        if _C.group_info(name)["size"] > 1:
            _all_reduce(grads, group_named(name))


@torch.no_grad()
def _all_reduce(grads: Iterable[torch.Tensor], group: Any) -> None:
    grads = list(grads)
    together = torch.cat([grad.reshape(-1) for grad in grads])
    torch.distributed.all_reduce(together, group=group)
    for grad, total in zip(grads, together.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class RNGStatesTracker:
    """Named states of the random number generators, so that ranks draw apart where they should.

    Each rank adds a state with a seed of its own; a layer that is given
    ``rng_state_tracker_function=lambda: tracker`` draws its initial values from it. States are
    those of the CPU's generator and, where there is one, of the current CUDA device's.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forgets all states and seeds."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """A copy, by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Takes the place of all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state. A name or a seed that is there already is an error."""
        if seed in self._seeds:
            raise RuntimeError(f"[RNGStatesTracker] there is a state with seed {seed} already")
        if name in self._states:
            raise RuntimeError(f"[RNGStatesTracker] there is a state named {name!r} already")
        self._seeds.add(seed)
        before = _generator_states()
        torch.manual_seed(seed)
        self._states[name] = _generator_states()
        _set_generator_states(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, numbers are drawn from this state; outside they go on as if nothing was."""
        if name not in self._states:
            raise KeyError(f"[RNGStatesTracker] there is no state named {name!r}; add() it first")
        before = _generator_states()
        _set_generator_states(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _generator_states()
            _set_generator_states(before)


#: The name that te gives it.
CudaRNGStatesTracker = RNGStatesTracker


def _generator_states() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), cuda


def _set_generator_states(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


@dataclass(frozen=True)
class TransferTimes:
    """How one operation's collective has gone so far in this process, in seconds."""

    count: int
    in_flight: float
    waited: float

    @property
    def hidden(self) -> float:
        """The share of its time in which this process did something else."""
        return 1.0 - self.waited / self.in_flight if self.in_flight > 0 else 0.0


def transfer_times(op: str, collective: str) -> TransferTimes:
    """Of the transfers on the CPU that operations with this label awaited."""
    return TransferTimes(*_C.transfer_times(op, collective))


def record_timeline(on: bool = True) -> None:
    """Begins, or ends, to write down when each collective was under way and awaited."""
    _C.record_timeline(on)


def timeline() -> list[dict[str, Any]]:
    """What was written down: ``name op begin end wait_begin wait_end bytes`` of each collective."""
    return list(_C.timeline())

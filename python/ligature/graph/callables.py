"""What a graphed callable is made of: copies of its arguments, its graphs, its node in autograd.

:mod:`ligature.graph.capture` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import _C
from ..quantization import QuantizedTensor

NAME = "[make_graphed_callables]"


def describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


@contextmanager
def recorded(part: _C.CapturedPart) -> Iterator[None]:
    """What delayed scaling meets inside belongs to this part and is not updated."""
    part.begin()
    try:
        yield
    finally:
        part.end()


class Arguments:
    """Copies of sample arguments, which graphs read, and what those of calls must be like."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.names = frozenset(kwargs)
        leaves, self.spec = tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        for leaf in leaves:
            if isinstance(leaf, QuantizedTensor):
                raise TypeError(f"{NAME} an argument must be a plain tensor, got {leaf.format}")
        self.leaves = [self._copy(leaf) for leaf in leaves]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self._plain = len(self.tensors) == len(args) and not kwargs

    @staticmethod
    def _copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    def unflatten(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, which must be like those of the sample."""
        leaves: Sequence[Any]
        if self._plain and not kwargs and len(args) == len(self.leaves):
            leaves = args
        else:
            leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
            if spec != self.spec:
                wanted, got = (" ".join(str(one).split()) for one in (self.spec, spec))
                raise TypeError(f"{NAME} arguments must be as in the sample, {wanted}, got {got}")
        given = []
        for i, (leaf, sample) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(sample, torch.Tensor):
                self._check(i, leaf, sample)
                given.append(leaf)
            elif leaf is not sample and leaf != sample:
                raise ValueError(
                    f"{NAME} argument {i} is part of the graph and must be {sample!r}, got {leaf!r}"
                )
        return given

    @staticmethod
    def _check(i: int, given: Any, wanted: torch.Tensor) -> None:
        if not isinstance(given, torch.Tensor) or isinstance(given, QuantizedTensor):
            raise TypeError(f"{NAME} argument {i} must be a tensor, got {type(given).__name__}")
        same = given.shape == wanted.shape and given.dtype == wanted.dtype
        if not same or given.device != wanted.device:
            raise ValueError(
                f"{NAME} argument {i} must be {describe(wanted)} as in the sample, "
                f"got {describe(given)}"
            )
        if given.requires_grad and not wanted.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{NAME} argument {i} requires a gradient, and its sample did not: "
                "the graph computes none"
            )

    def fill(self, given: Sequence[torch.Tensor]) -> None:
        for static, tensor in zip(self.tensors, given, strict=False):
            if static.data_ptr() != tensor.data_ptr():
                static.copy_(tensor)


@dataclass
class MainGrad:
    """A parameter whose gradient the graph adds to, or writes into, ``main_grad``."""

    parameter: torch.Tensor
    address: int
    overwrite: bool
    flag: bool  # whether backward sets grad_added_to_main_grad

    def check(self) -> None:
        parameter: Any = self.parameter
        overwrite = bool(getattr(parameter, "overwrite_main_grad", False))
        if parameter.main_grad.data_ptr() != self.address or overwrite != self.overwrite:
            raise RuntimeError(
                f"{NAME} main_grad or overwrite_main_grad of a parameter {list(parameter.shape)} "
                "is another one than when the graph was captured"
            )


@dataclass
class Piece:
    """One callable: what it is called with, and how often its graphs ran."""

    function: Callable[..., Any]
    context: Callable[[], Any]  # the low-precision context that it is captured in
    arguments: Arguments
    parameters: tuple[torch.Tensor, ...]
    allow_unused: bool
    retain: bool
    runs: int = 0
    addresses: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        plain = [p for p in self.parameters if not isinstance(p, QuantizedTensor)]
        self.addresses = [(p, p.data_ptr()) for p in plain]

    def call(self) -> Any:
        args, kwargs = self.arguments.unflatten()
        with self.context():
            return self.function(*args, **kwargs)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [*self.arguments.tensors, *self.parameters]

    def gradients(
        self, roots: list[torch.Tensor], grads: list[torch.Tensor], retain: bool
    ) -> list[torch.Tensor | None]:
        """Of every input; None where it needs none."""
        inputs = self.inputs
        wanted = [t for t in inputs if t.requires_grad]
        if not wanted:
            return [None] * len(inputs)
        found = iter(
            torch.autograd.grad(roots, wanted, grads, retain_graph=retain, allow_unused=True)
        )
        result = [next(found) if t.requires_grad else None for t in inputs]
        if not self.allow_unused:
            for i, (tensor, grad) in enumerate(zip(inputs, result, strict=True)):
                if tensor.requires_grad and grad is None and not hasattr(tensor, "main_grad"):
                    kind = "argument" if i < len(self.arguments.tensors) else "parameter"
                    raise ValueError(
                        f"{NAME} {kind} {describe(tensor)} requires a gradient and gets none; "
                        "allow_unused_input=True allows that"
                    )
        return result

    def warm_up(self) -> None:
        roots = [t for t in tree_flatten(self.call())[0] if _needs_grad(t)]
        if roots:
            self.gradients(roots, [torch.zeros_like(t) for t in roots], False)

    def check_addresses(self) -> None:
        for parameter, address in self.addresses:
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"{NAME} a parameter {list(parameter.shape)} has moved since the graph was "
                    "captured; graphs read and write the memory that it had then"
                )


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


class Graph:
    """The graphs of a callable, forward and backward, and the memory that they share."""

    def __init__(self, piece: Piece, weights: _C.CapturedWeights | None, pool: Any) -> None:
        self.piece = piece
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.forward = torch.cuda.CUDAGraph()
        self.backward: torch.cuda.CUDAGraph | None = None
        self.forward_part = _C.CapturedPart(weights)
        self.backward_part = _C.CapturedPart()
        self.leaves: list[Any] = []
        self.main_grads: list[MainGrad] = []
        self.grad_outputs: list[torch.Tensor | None] = []
        self.grad_inputs: list[torch.Tensor | None] = [None] * len(piece.inputs)
        self.last_backward = 0  # the run that it was for

    def capture_forward(self, stream: torch.cuda.Stream) -> None:
        with (
            recorded(self.forward_part),
            torch.cuda.graph(self.forward, pool=self.pool, stream=stream),
        ):
            result = self.piece.call()
        self.leaves, self.spec = tree_flatten(result)
        for leaf in self.leaves:
            if isinstance(leaf, QuantizedTensor):
                raise TypeError(f"{NAME} a result must be a plain tensor, got {leaf.format}")
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.fixed = [i for i, tensor in enumerate(tensors) if not tensor.requires_grad]
        self.alone = len(self.leaves) == 1 and result is self.leaves[0]

    def capture_backward(self, stream: torch.cuda.Stream) -> None:
        roots = [leaf for leaf in self.leaves if _needs_grad(leaf)]
        self.grad_outputs = [
            torch.zeros_like(leaf) if _needs_grad(leaf) else None
            for leaf in self.leaves
            if isinstance(leaf, torch.Tensor)
        ]
        if roots:
            self.backward = torch.cuda.CUDAGraph()
            grads = [grad for grad in self.grad_outputs if grad is not None]
            flags = _AddedFlags(self.piece.parameters)
            with (
                flags,
                recorded(self.backward_part),
                torch.cuda.graph(self.backward, pool=self.pool, stream=stream),
            ):
                made = self.piece.gradients(roots, grads, self.piece.retain)
            self.main_grads = flags.main_grads
            # Held here, so that autograd adds them to what is there, or copies: it would take over
            # a gradient that nobody else has, and the next run would write over it.
            self.grad_inputs = [None if g is None else g.detach() for g in made]
        if not self.piece.retain:
            self.leaves = [
                leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves
            ]

    def run_forward(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.piece.check_addresses()
        self.piece.arguments.fill(given)
        self.piece.runs += 1
        self.forward.replay()
        return [leaf.detach() for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def run_backward(
        self, run: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        if run != self.piece.runs:
            raise RuntimeError(
                f"{NAME} the memory of a graph holds its last call alone: "
                "backward must run before the next forward"
            )
        if run == self.last_backward and not self.piece.retain:
            raise RuntimeError(
                f"{NAME} backward ran a second time; "
                "retain_graph_in_backward=True captures graphs that can"
            )
        for main_grad in self.main_grads:
            main_grad.check()
        self.last_backward = run
        for static, grad in zip(self.grad_outputs, grads, strict=True):
            if static is None:
                continue
            if grad is None:
                static.zero_()
            elif static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        assert self.backward is not None
        self.backward.replay()
        for main_grad in self.main_grads:
            if main_grad.flag:
                main_grad.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        self.backward_part.ran_backward()
        return self.grad_inputs

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        if self.alone:
            return outputs[0]
        made = iter(outputs)
        return tree_unflatten(
            [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves],
            self.spec,
        )


class _AddedFlags:
    """Finds out whose gradients a backward adds to ``main_grad``, and leaves no trace of it."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters: list[Any] = [p for p in parameters if hasattr(p, "main_grad")]
        self.main_grads: list[MainGrad] = []

    def __enter__(self) -> None:
        self.before = [getattr(p, "grad_added_to_main_grad", None) for p in self.parameters]
        for parameter, flag in zip(self.parameters, self.before, strict=True):
            if flag is not None:
                parameter.grad_added_to_main_grad = False

    def __exit__(self, *_: object) -> None:
        for parameter, flag in zip(self.parameters, self.before, strict=True):
            added = flag is not None and bool(parameter.grad_added_to_main_grad)
            overwrite = bool(getattr(parameter, "overwrite_main_grad", False))
            address = parameter.main_grad.data_ptr()
            self.main_grads.append(MainGrad(parameter, address, overwrite, added))
            if flag is not None:
                parameter.grad_added_to_main_grad = flag


class Run(torch.autograd.Function):
    """One run of the graphs. After the graph come the tensors of the call, then the parameters."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = graph.run_forward(given)
        ctx.graph, ctx.run = graph, graph.piece.runs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[i] for i in graph.fixed))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.graph.run_backward(ctx.run, grads))


class Graphed:
    """A callable whose calls run graphs."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self._graphs = graphs  # with two, the second one reads weights that the first one quantized
        self._piece = graphs[0].piece
        self._begun = False

    def _choose(self, kwargs: dict[str, Any]) -> Graph:
        first = True
        if "is_first_microbatch" not in self._piece.arguments.names:
            given = kwargs.pop("is_first_microbatch", None)
            if given is not None and not isinstance(given, bool):
                raise TypeError(f"{NAME} is_first_microbatch must be a bool, got {given!r}")
            first = given is not False
        if first or len(self._graphs) == 1:
            self._begun = True
            return self._graphs[0]
        if not self._begun:
            raise RuntimeError(
                f"{NAME} is_first_microbatch=False was given before any first microbatch: "
                "there are no weights in low precision yet"
            )
        return self._graphs[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{NAME} a graphed callable cannot be part of another CUDA graph")
        graph = self._choose(kwargs)
        given = self._piece.arguments.tensors_of(args, kwargs)
        outputs = Run.apply(graph, *given, *self._piece.parameters)
        graph.forward_part.ran_forward()
        return graph.result(outputs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{NAME} what was graphed cannot be copied or saved; its state_dict can")


class GraphedForward:
    """The forward of a graphed module: graphs in the mode that they were captured in."""

    def __init__(self, module: torch.nn.Module, graphed: Graphed) -> None:
        self._module = module
        self._training = module.training
        self._graphed = graphed
        self._eager = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.training == self._training:
            return self._graphed(*args, **kwargs)
        return self._eager(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._graphed.__reduce_ex__(protocol)

"""CUDA graphs of modules and functions: how their calls are checked and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .. import _C
from ..quantization import autocast
from ..quantization.recipe import Recipe
from .callables import NAME, Arguments, Graph, Graphed, GraphedForward, Piece, describe, recorded


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    *,
    enabled: bool | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
) -> Any:
    """Makes CUDA graphs of callables: a call runs one graph, its backward another one.

    A module keeps its parameters and is returned with a new ``forward``; in the other mode
    (``train`` or ``eval``) it computes as before. Of another callable a function is returned, which
    gives gradients to its arguments alone. Arguments and results of every call have the shapes,
    dtypes and devices of the sample; results live until the next call.

    Args:
        modules: A callable, or a tuple of callables.
        sample_args: The arguments of one call, a tuple of tensors (or what holds tensors); for a
            tuple of callables a tuple of those.
        num_warmup_iters: How often each is run before it is captured. That leaves no trace: not in
            recipe state, buffers, ``main_grad`` or random numbers.
        allow_unused_input: Whether tensors that require a gradient may get none.
        sample_kwargs: Keyword arguments in the same way. What is no tensor is part of the graph.
        enabled: Whether it is captured in low precision.
        calibrating: As for :class:`autocast`.
        recipe: As for :class:`autocast`.
        amax_reduction_group: As for :class:`autocast`.
        cache_quantized_params: Weights are quantized in calls with ``is_first_microbatch=True`` (or
            without that argument) and kept for those with ``is_first_microbatch=False``. Otherwise
            every call quantizes them.
        pool: Memory that these graphs share with others, from ``torch.cuda.graph_pool_handle()``:
            then they must run in the order of capture, all forwards, then all backwards from the
            last one on. By default each callable has memory of its own.
        retain_graph_in_backward: Whether backward may run twice after a forward.

    The ``fp8_`` arguments are older names. Delayed scaling is updated as without graphs: where the
    outermost ``autocast`` around the call ends, or after the call where there is none, and after
    each backward pass.
    """
    for name, given in (
        ("_order", _order),
        ("_num_layers_per_chunk", _num_layers_per_chunk),
        ("_reuse_graph_input_output_buffers", _reuse_graph_input_output_buffers or None),
    ):
        if given is not None:
            raise NotImplementedError(f"{NAME} {name} is not available in this version")
    on = bool(_either("enabled", enabled, fp8_enabled))
    context = partial(
        autocast,
        enabled=on,
        calibrating=bool(_either("calibrating", calibrating, fp8_calibrating)),
        recipe=_either("recipe", recipe, fp8_recipe),
        amax_reduction_group=_either("amax_reduction_group", amax_reduction_group, fp8_group),
    )
    context()  # complains about what it cannot take
    cache = bool(_either("cache_quantized_params", cache_quantized_params, fp8_weight_caching))
    several = isinstance(modules, tuple)
    functions = modules if several else (modules,)
    samples = _per_callable("sample_args", sample_args, several, len(functions), (tuple, list))
    if sample_kwargs is None:
        sample_kwargs = tuple({} for _ in functions) if several else {}
    keywords = _per_callable("sample_kwargs", sample_kwargs, several, len(functions), (dict,))
    for function in functions:
        _check_callable(function)
    _check_surroundings()
    device = _device_of(functions, (samples, keywords))
    with torch.cuda.device(device):
        pieces = [
            Piece(
                function,
                context,
                Arguments(args, kwargs),
                tuple(function.parameters()) if isinstance(function, torch.nn.Module) else (),
                allow_unused_input,
                retain_graph_in_backward,
            )
            for function, args, kwargs in zip(functions, samples, keywords, strict=True)
        ]
        graphs = _capture(pieces, functions, num_warmup_iters, cache, pool)
    graphed = tuple(map(_wrap, functions, graphs))
    return graphed if several else graphed[0]


def _either(name: str, value: Any, older: Any) -> Any:
    if value is not None and older is not None:
        raise TypeError(f"{NAME} {name} was given twice, once under its older name")
    return older if value is None else value


def _per_callable(
    name: str, given: Any, several: bool, count: int, kinds: tuple[type, ...]
) -> Sequence[Any]:
    entries = given if several else (given,)
    wanted = " or a ".join(kind.__name__ for kind in kinds)
    if not isinstance(entries, (tuple, list)) or len(entries) != count:
        raise ValueError(
            f"{NAME} {name} must be a tuple with an entry per callable, {count} in all"
        )
    for entry in entries:
        if not isinstance(entry, kinds):
            raise TypeError(f"{NAME} {name} must be a {wanted}, got {type(entry).__name__}")
    return entries


def _check_callable(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{NAME} modules must be callables, got {type(function).__name__}")
    if isinstance(function, Graphed) or isinstance(
        getattr(function, "forward", None), GraphedForward
    ):
        raise ValueError(f"{NAME} a callable was graphed before")
    if not isinstance(function, torch.nn.Module):
        return
    if function._forward_hooks or function._forward_pre_hooks or function._backward_hooks:
        raise ValueError(
            f"{NAME} {type(function).__name__} has hooks, which would run while it is captured and "
            "never again; register them afterwards"
        )


def _check_surroundings() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{NAME} CUDA graphs need a CUDA device")
    if _C.autocast_state()[3] > 0:
        raise RuntimeError(f"{NAME} call it outside of autocast, with enabled=True and a recipe")
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            f"{NAME} torch.autocast keeps casts of weights, which graphs would never see change; "
            "use torch.autocast(..., cache_enabled=False)"
        )


def _device_of(functions: Iterable[Any], samples: Any) -> torch.device:
    """The one device that everything is on."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(samples) if isinstance(t, torch.Tensor)]
    for function in functions:
        if isinstance(function, torch.nn.Module):
            tensors += [*function.parameters(), *function.buffers()]
    devices = {tensor.device for tensor in tensors}
    for tensor in tensors:
        if tensor.device.type != "cuda":
            raise RuntimeError(f"{NAME} CUDA graphs need a CUDA device, got {describe(tensor)}")
    if len(devices) > 1:
        raise ValueError(f"{NAME} tensors must be on one device, got {sorted(map(str, devices))}")
    return devices.pop() if devices else torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _without_trace(functions: Iterable[Any]) -> Iterator[None]:
    """Whatever runs inside changes no recipe state, buffer, ``main_grad`` or random number."""
    modules = [function for function in functions if isinstance(function, torch.nn.Module)]
    buffers = [(b, b.clone()) for module in modules for b in module.buffers()]
    parameters: list[Any] = [p for m in modules for p in m.parameters() if hasattr(p, "main_grad")]
    main_grads = [(p.main_grad, p.main_grad.clone()) for p in parameters]
    flags = [getattr(p, "grad_added_to_main_grad", None) for p in parameters]
    part = _C.CapturedPart()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()]), recorded(part):
            yield
    finally:
        part.forget()
        with torch.no_grad():
            for tensor, before in (*buffers, *main_grads):
                tensor.copy_(before)
        for parameter, flag in zip(parameters, flags, strict=True):
            if flag is not None:
                parameter.grad_added_to_main_grad = flag


def _capture(
    pieces: Sequence[Piece], functions: Sequence[Any], warm_up: int, cache: bool, pool: Any
) -> list[list[Graph]]:
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with _without_trace(functions):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for piece in pieces:
                for _ in range(warm_up):
                    piece.warm_up()
        torch.cuda.synchronize()
    weights = [_C.CapturedWeights() if cache else None for _ in pieces]
    graphs: list[list[Graph]] = [[] for _ in pieces]
    for turn in range(2 if cache else 1):
        made = [
            Graph(piece, kept, pool if turn == 0 else None)
            for piece, kept in zip(pieces, weights, strict=True)
        ]
        for graph in made:
            graph.capture_forward(stream)
        for graph in reversed(made):
            graph.capture_backward(stream)
        for graph, own in zip(made, graphs, strict=True):
            own.append(graph)
    return graphs


def _wrap(function: Any, graphs: Sequence[Graph]) -> Callable[..., Any]:
    graphed = Graphed(graphs)
    if not isinstance(function, torch.nn.Module):
        return graphed
    function.forward = GraphedForward(function, graphed)
    return function

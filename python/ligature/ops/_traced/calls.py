"""How operations take part in graphs of torch.compile and torch.export.

Traced code reads what a call depends on (parameters, flags, the recipe) where a compiler guards it,
and calls :func:`pipeline`, which stands in the graph as it is. Below that are two functions over
flat lists of tensors, one per direction, that run the same plan as an eager call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ... import _C
from ...quantization.autocast import Recompute, captured_context
from ...quantization.scope import RECIPES, SCOPE, ThreadScope
from ..fuser import REGISTERED
from .group import CALLS, Traced, without_memory
from .shapes import hint, result_shapes

ops = torch.ops.ligature


def call(
    group: Traced, x: torch.Tensor, extra_inputs: list[torch.Tensor], kwargs: Any = None
) -> Any:
    """Calls a fuser in traced code."""
    if group.outside is not None:
        return group.outside(x, *extra_inputs, basic_op_kwargs=kwargs)
    if kwargs and any(isinstance(v, torch.Tensor) for own in kwargs for v in own.values()):
        assert group.with_buffers is not None
        return group.with_buffers(x, *extra_inputs, basic_op_kwargs=kwargs)
    static, params = arguments(group, (SCOPE.recipe, SCOPE.flags, SCOPE.own))
    owner = group.owners[group.prepare_owner(x.device)]
    scales: list[torch.Tensor] = []
    amaxes: list[torch.Tensor] = []
    if SCOPE.recipe and group.prepare_delayed(SCOPE.recipe, x.device) == "delayed":
        scales, amaxes, histories = group.delayed[SCOPE.recipe]
        if SCOPE.own:
            y, noted = pipeline(
                static, kwargs or [], owner, scales, amaxes, x, params, extra_inputs
            )
            SCOPE.met.append((group.number, SCOPE.recipe, scales, amaxes, histories, noted))
            return y
    return pipeline(static, kwargs or [], owner, scales, amaxes, x, params, extra_inputs)


def arguments(group: Traced, scope: ThreadScope) -> tuple[Any, list[Any]]:
    """What a call depends on besides its inputs: constants, and the parameters."""
    params: list[Any] = []
    counts = []
    training = []
    for source in group.sources:
        before = len(params)
        for name in source.names:
            value: Any = source.owner
            for step in name.split("."):
                value = getattr(value, step)
            if value is not None or not source.optional:
                params.append(value)
        counts.append(len(params) - before)
        training.append(source.owner.training if source.uses_training else True)
    fusions = REGISTERED.version
    return (group.number, group.label, tuple(counts), tuple(training), scope, fusions), params


def update_delayed() -> None:
    """The end of an outermost ``autocast`` in traced code."""
    done: list[str] = []
    for number, recipe, scales, amaxes, histories, _ in SCOPE.met:
        if number + recipe not in done:
            done.append(number + recipe)
            noted = [met[5] for met in SCOPE.met if met[0] == number and met[1] == recipe]
            ops.update_delayed(scales, amaxes, histories, noted, int(number), recipe)


@dataclass
class _Call:
    """One traced call: constants, and where its results go."""

    fuser: int
    number: int
    label: str
    device: torch.device
    dtypes: list[torch.dtype]  # of the input, the parameters and the extra inputs
    shapes: list[tuple[int, ...] | None]  # None: not constant
    requires_grad: list[bool]
    num_params: int
    ndims: list[int]  # of the input and the extra inputs
    structures: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)

    def layout(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        found = self.structures.get(sizes)
        if found is None:
            with without_memory(self.fuser):
                found = _C.traced_layout(self.fuser, self.number, list(sizes))
            if len(self.structures) > 256:
                self.structures.clear()
            self.structures[sizes] = found
        return found

    def split(self, sizes: Any) -> list[Any]:
        out, start = [], 0
        for length in self.ndims:
            out.append(tuple(sizes[start : start + length]))
            start += length
        return out


def trace(static: Any, kwargs: Any, x: Any, params: Any, extra_inputs: Any) -> _Call:
    number, label, counts, training, (recipe, flags, own), _ = static
    tensors = [x, *params, *extra_inputs]
    gradients = torch.is_grad_enabled()
    requires_grad = [gradients and t.requires_grad for t in tensors]
    autocast = torch.is_autocast_enabled(x.device.type)
    shapes = [tuple(map(hint, t.shape)) for t in tensors]
    n = 1 + len(params)
    given = {
        "device": x.device,
        "input": (shapes[0], x.dtype),
        "params": [(s, p.dtype) for s, p in zip(shapes[1:n], params, strict=True)],
        "extra_inputs": [(s, e.dtype) for s, e in zip(shapes[n:], extra_inputs, strict=True)],
        "param_counts": list(counts),
        "requires_grad": requires_grad,
        "training": list(training),
        "autocast_dtype": torch.get_autocast_dtype(x.device.type) if autocast else None,
        "kwargs": list(kwargs),
        "recipe": RECIPES[recipe] if recipe else None,
        "enabled": "enabled" in flags,
        "calibrating": "calibrating" in flags,
        "own_autocast": own,
    }
    with _disable_current_modes():
        call = _C.trace_call(int(number), given)
    known = CALLS.setdefault(int(number), {})
    if call not in known:
        known[call] = _Call(
            int(number),
            call,
            label,
            x.device,
            [t.dtype for t in tensors],
            [None, *shapes[1:n], *(None for _ in extra_inputs)],
            requires_grad,
            len(params),
            [x.dim(), *(e.dim() for e in extra_inputs)],
        )
    return known[call]


def sizes_of(x: Any, extra_inputs: Any) -> tuple[int, ...]:
    """Of the input and the extra inputs, counted through."""
    return tuple(hint(s) for t in (x, *extra_inputs) for s in t.shape)


def fake_modes(*tensors: Any) -> list[FakeTensorMode]:
    """Those that are active, and those of tensors."""
    found = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, FakeTensorMode)]
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode not in found:
            found.append(tensor.fake_mode)
    return found


@contextmanager
def real_tensors_allowed(*tensors: Any) -> Iterator[None]:
    """In FakeTensorMode, too: the owner is real, and so may parameters be."""
    modes = fake_modes(*tensors)
    before = [mode.allow_non_fake_inputs for mode in modes]
    for mode in modes:
        mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        for mode, allowed in zip(modes, before, strict=True):
            mode.allow_non_fake_inputs = allowed


def _pick(sources: Any, x: Any, params: Any, extra_inputs: Any, results: Any) -> list[Any]:
    lists = {"input": [x], "param": params, "extra": extra_inputs, "result": results}
    return [lists[kind][index] if kind != "none" else None for kind, index in sources]


def _forward(
    call: _Call, state: Any, x: Any, params: Any, extra_inputs: Any
) -> tuple[Any, list[Any]]:
    owner, scales, amaxes = state
    layout = call.layout(sizes_of(x, extra_inputs))
    run = ops.pipeline_forward if layout["closed"] else ops.pipeline_forward_no_cudagraph
    with real_tensors_allowed(x):
        results = run(
            x, params, extra_inputs, scales, owner, call.fuser, call.number, layout["structure"]
        )
        if amaxes:
            ops.record_amax(amaxes, results[-1])
    return layout, results


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, state: Any, *tensors: torch.Tensor) -> Any:
        n = 1 + call.num_params
        x, params, extra_inputs = tensors[0], list(tensors[1:n]), list(tensors[n:])
        layout, results = _forward(call, state, x, params, extra_inputs)
        ctx.call = call
        ctx.num_outputs = len(layout["outputs"])
        ctx.structure = layout["structure"]
        ctx.closed = layout["closed"]
        ctx.sizes = [s for t in (x, *extra_inputs) for s in t.shape]
        ctx.save_for_backward(state[0], *_pick(layout["kept"], x, params, extra_inputs, results))
        ctx.context = None if is_compiling() else captured_context()
        ctx.set_materialize_grads(False)
        outputs = _outputs(layout, x, params, extra_inputs, results)
        written = [v for v in _pick(layout["overwritten"], x, [], [], results) if v is not None]
        written = [v for v in written if all(v is not y for y in outputs)]
        noted = results[-1:] if state[1] else []
        ctx.mark_non_differentiable(
            *written,
            *noted,
            *(y for y, d in zip(outputs, layout["differentiable"], strict=True) if not d),
        )
        return (*outputs, *written, *noted)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        given = list(grads[: ctx.num_outputs])
        run = ops.pipeline_backward if ctx.closed else ops.pipeline_backward_no_cudagraph
        # A checkpoint runs its forward again when the tensors are asked for.
        with nullcontext() if ctx.context is None else Recompute(ctx.context):
            owner, *kept = ctx.saved_tensors
        with real_tensors_allowed(*given):
            results = run(given, kept, owner, ctx.sizes, call.fuser, call.number, ctx.structure)
        there = _gradients(call, ctx.sizes, given)
        left = iter(results)
        return (None, None, *(next(left) if d else None for d in there))


def _outputs(layout: Any, x: Any, params: Any, extra_inputs: Any, results: Any) -> list[Any]:
    """Outputs in the memory of an argument, or of another output, are views of it."""
    out: list[Any] = []
    found = _pick(layout["outputs"], x, params, extra_inputs, results)
    for (kind, _), y in zip(layout["outputs"], found, strict=True):
        again = any(y is other for other in found[: len(out)])
        out.append(y.view_as(y) if kind != "result" or again else y)
    return out


def _gradients(call: _Call, sizes: Any, grads: Any) -> list[bool]:
    with without_memory(call.fuser):
        return _C.traced_gradients(
            call.fuser, call.number, list(map(hint, sizes)), [g is not None for g in grads]
        )


def pipeline(
    static: Any,
    kwargs: Any,
    owner: Any,
    scales: Any,
    amaxes: Any,
    x: Any,
    params: Any,
    extra_inputs: Any,
) -> Any:
    """One call of a fuser, as a graph holds it before it is taken apart."""
    call = trace(static, kwargs, x, params, extra_inputs)
    return run(call, static[4], owner, scales, amaxes, x, params, extra_inputs)


def run(
    call: _Call,
    scope: Any,
    owner: Any,
    scales: Any,
    amaxes: Any,
    x: Any,
    params: Any,
    extra_inputs: Any,
) -> Any:
    """A call that was traced; in an autocast of the graph's own with what delayed scaling noted."""
    state = (owner, scales, amaxes)
    noted: list[Any] = []
    if any(call.requires_grad):
        _check_overwritten(call, x, extra_inputs)
        tensors = (x, *params, *extra_inputs)
        outputs = list(_Pipeline.apply(call, state, *tensors))
        layout = call.layout(sizes_of(x, extra_inputs))
        count = len(layout["outputs"])
        if scales:
            noted = [outputs.pop()]
        outputs, written = outputs[:count], outputs[count:]
    else:
        layout, results = _forward(call, state, x, params, extra_inputs)
        noted = results[-1:] if scales else []
        outputs = _outputs(layout, x, params, extra_inputs, results)
        found = [v for v in _pick(layout["overwritten"], x, [], [], results) if v is not None]
        written = [v for v in found if all(v is not y for y in outputs)]
    outputs = _write_back(layout, extra_inputs, outputs, written)
    y = outputs[0] if len(outputs) == 1 else tuple(outputs)
    return (y, noted[0]) if scope[2] and noted else y


def _check_overwritten(call: _Call, x: Any, extra_inputs: Any) -> None:
    """A graph does not know in its later passes which of its inputs were leaves."""
    layout = call.layout(tuple(hint(s) for t in (x, *extra_inputs) for s in t.shape))
    for k, (kind, _) in enumerate(layout["overwritten"]):
        if kind != "none" and extra_inputs[k].requires_grad and extra_inputs[k].is_leaf:
            raise RuntimeError(
                f"[{call.label}] a leaf Variable that requires grad is being used in an in-place "
                f"operation: extra input {k}, which in_place=True overwrites; a compiled graph "
                "cannot do that, give it what autograd computed (extra * 1)"
            )


def _write_back(layout: Any, extra_inputs: Any, outputs: list[Any], written: Any) -> list[Any]:
    """Gives overwritten extra inputs their new values; one that is returned is the output."""
    left = iter(written)
    for extra, source in zip(extra_inputs, layout["overwritten"], strict=True):
        if source[0] == "none":
            continue
        if source in layout["outputs"]:
            k = layout["outputs"].index(source)
            extra.copy_(outputs[k])
            outputs[k] = extra
        else:
            with torch.no_grad():
                extra.copy_(next(left))
    return outputs


torch.compiler.allow_in_graph(pipeline)


def _empty(call: _Call, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=call.device)


def _known(fuser: int, call: int) -> _Call:
    found = CALLS.get(fuser, {}).get(call)
    if found is None:
        raise RuntimeError(
            "the operations of a graph are gone; they must live as long as the graph"
        )
    return found


def _forward_shapes(
    input: Any,
    params: Any,
    extra_inputs: Any,
    scales: Any,
    owner: Any,
    fuser: int,
    call: int,
    structure: int,
) -> list[torch.Tensor]:
    known = _known(fuser, call)

    def asked(sizes: tuple[int, ...]) -> Any:
        return known.layout(sizes)["results"]

    inputs = [tuple(t.shape) for t in (input, *extra_inputs)]
    shapes = result_shapes(inputs, asked, f"[{known.label}]")
    if scales:
        shapes.append(((len(scales),), torch.float32))
    return [_empty(known, shape, dtype) for shape, dtype in shapes]


def _backward_shapes(
    grads: Any, kept: Any, owner: Any, sizes: Any, fuser: int, call: int, structure: int
) -> list[torch.Tensor]:
    known = _known(fuser, call)
    there = _gradients(known, sizes, grads)
    split = known.split(sizes)
    shapes = [split[0], *known.shapes[1 : 1 + known.num_params], *split[1:]]
    return [
        _empty(known, shape, dtype)
        for shape, dtype, d in zip(shapes, known.dtypes, there, strict=True)
        if d
    ]


def _record_shapes(amaxes: Any, largest: Any) -> None:
    return None


def _update_shapes(
    scales: Any, amaxes: Any, histories: Any, noted: Any, fuser: int, recipe: str
) -> None:
    return None


for _suffix in ("", "_no_cudagraph"):
    torch.library.register_fake(f"ligature::pipeline_forward{_suffix}", _forward_shapes)
    torch.library.register_fake(f"ligature::pipeline_backward{_suffix}", _backward_shapes)
torch.library.register_fake("ligature::record_amax", _record_shapes)
torch.library.register_fake("ligature::update_delayed", _update_shapes)

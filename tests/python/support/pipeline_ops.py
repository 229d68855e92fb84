"""Operations and fusions as users write them in Python, for random pipelines.

Each operation says in ``plain`` what it computes, in terms of autograd; each fused one stands for
any operations (``Pieces``), or for a linear and a SiLU by hand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fusion_support import REGISTER
from pipeline_case import Fuse

import ligature as te
from ligature.ops._builtin import BuiltinOperation

Tensor = torch.Tensor


class ClassicScale(te.ops.BasicOperation):
    """``s x``, in the classic form."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(self.scale, input_)
        return self.scale * input_

    def op_backward(self, ctx, grad_output):
        scale, x = ctx.saved_tensors
        return scale * grad_output, ((x * grad_output).sum(),)

    def plain(self, p, x):
        return p(self.scale) * x, ()

    def dtype_after(self, dtype, cast):
        return dtype


class SplitAffine(te.ops.BasicOperation):
    """``w x + b`` over the last dimension, in the split form; computes in the wider dtype."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype))

    def op_forward_compute(self, input_, *, requires_grad, **unused):
        return self.weight * input_ + self.bias, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **unused):
        ctx.save_for_backward(self.weight, input_)

    def op_backward(self, ctx, grad_output):
        w, x = ctx.saved_tensors
        rows = tuple(range(x.dim() - 1))
        dw, db = x * grad_output, grad_output
        if rows:
            dw, db = dw.sum(rows), db.sum(rows)
        return w * grad_output, (dw, db)

    def plain(self, p, x):
        return p(self.weight) * x + p(self.bias), ()

    def dtype_after(self, dtype, cast):
        return torch.promote_types(dtype, self.weight.dtype)


class KeptSine(te.ops.BasicOperation):
    """``sin(x)``, in the split form, which keeps a fresh tensor and plain state."""

    def op_forward_compute(self, input_, *, requires_grad, **unused):
        return input_.sin(), (input_.cos(),), {"rank": input_.dim()}

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **unused):
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx, grad_output):
        (cosine,) = ctx.saved_tensors
        assert getattr(ctx, "rank", cosine.dim()) == grad_output.dim()
        return cosine * grad_output, ()

    def plain(self, p, x):
        return x.sin(), ()

    def dtype_after(self, dtype, cast):
        return dtype


class RowScales(te.ops.BasicOperation):
    """Its input, and a number for each row as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        mean = input_.mean(-1)
        basic_op_ctxs[0].save_for_backward(mean)
        return input_, [(1 + mean.sin() / 2,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ((grad_scales,),) = basic_op_grad_extra_outputs
        (mean,) = basic_op_ctxs[0].saved_tensors
        grad_mean = grad_scales * mean.cos() / (2 * grad_output.shape[-1])
        return grad_output + grad_mean.unsqueeze(-1), [()], [()]

    def plain(self, p, x):
        return x, (1 + x.mean(-1).sin() / 2,)

    def dtype_after(self, dtype, cast):
        return dtype


class TimesExtra(te.ops.BasicOperation):
    """Its input times an extra input, in the split form of operations with extra tensors."""

    num_extra_inputs = 1

    def fuser_forward_compute(self, input_, *, requires_grad, basic_op_extra_inputs, **unused):
        ((extra,),) = basic_op_extra_inputs
        return (input_ * extra).to(input_.dtype), [()], [()]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs, input_, tensors_to_save, *, basic_op_extra_inputs, **unused
    ):
        ((extra,),) = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(input_, extra)

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, extra = basic_op_ctxs[0].saved_tensors
        return extra * grad_output, [()], [(x * grad_output,)]

    def plain(self, p, x, extra):
        return x * extra, ()

    def dtype_after(self, dtype, cast):
        return dtype


class OwnSiLU(te.ops.SiLU):
    """A built-in operation whose backward is overridden in Python."""

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return silu_backward(x, grad_output.to(x.dtype)), ()

    def plain(self, p, x):
        return x * x.sigmoid(), ()

    def dtype_after(self, dtype, cast):
        return cast(dtype)


GUESTS: dict[str, type[te.ops.BasicOperation]] = {
    cls.__name__: cls
    for cls in (ClassicScale, SplitAffine, KeptSine, RowScales, TimesExtra, OwnSiLU)
}


# -- fused operations


class Base(te.ops.FusedOperation):
    def __init__(self, *ops: te.ops.FusibleOperation) -> None:
        super().__init__(ops)


def _forward(op: Any, ctx: Any, x: Tensor, extra: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
    given = {"basic_op_extra_inputs": [extra]}
    if not isinstance(op, BuiltinOperation) and op._form == "op_classic":
        return op.op_forward(ctx, x), ()
    if not isinstance(op, BuiltinOperation) and op._form == "op_split":
        out, kept, *state = op.op_forward_compute(x, requires_grad=ctx.requires_grad)
        if ctx.requires_grad:
            for name, value in dict(*state).items():
                setattr(ctx, name, value)
            op.op_forward_save_ctx(ctx, x, kept, requires_grad=True)
        return out, ()
    if not isinstance(op, BuiltinOperation) and op._form == "fuser_split":
        flags = [ctx.requires_grad]
        out, (extras,), kept = op.fuser_forward_compute(x, requires_grad=flags, **given)
        if ctx.requires_grad:
            op.fuser_forward_save_ctx([ctx], x, kept, requires_grad=flags, **given)
        return out, extras
    out, (extras,) = op.fuser_forward([ctx], x, **given)
    return out, extras


def _backward(op: Any, ctx: Any, dy: Tensor, grads: tuple[Tensor, ...]) -> Any:
    if not isinstance(op, BuiltinOperation) and op._form.startswith("op_"):
        return (*op.op_backward(ctx, dy), ())
    dx, (params,), (extras,) = op.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[grads])
    return dx, params, extras


def _num_parameters(op: Any) -> int:
    return len(op._impl.parameters if isinstance(op, BuiltinOperation) else list(op.parameters()))


def _taken_from(op: Any) -> list[str]:
    return [op._handle.extra_input_channel(i) for i in range(op.num_extra_inputs)]


def _given_to(op: Any) -> list[str]:
    return [op._handle.extra_output_channel(i) for i in range(op.num_extra_outputs)]


class Pieces(Base):
    """Runs its basic operations one after the other, whatever they are, and channels inside."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        x, outputs, inside = input_, [], {}
        for op, ctx, extra in zip(
            self.basic_ops, basic_op_ctxs, basic_op_extra_inputs, strict=True
        ):
            names = zip(_taken_from(op), extra, strict=True)
            x, extras = _forward(op, ctx, x, tuple(inside.get(name, t) for name, t in names))
            inside |= {name: t for name, t in zip(_given_to(op), extras, strict=True) if name}
            outputs.append(extras)
        return x, outputs

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        dy, param_grads, extra_grads = grad_output, [], []
        inside = {name for op in self.basic_ops for name in _given_to(op) if name}
        sums: dict[str, Tensor] = {}
        steps = zip(self.basic_ops, basic_op_ctxs, basic_op_grad_extra_outputs, strict=True)
        for op, ctx, grads in reversed(list(steps)):
            params = (None,) * _num_parameters(op)
            extras = (None,) * op.num_extra_inputs
            if ctx.requires_grad:
                names = zip(_given_to(op), grads, strict=True)
                grads = tuple(g + sums[name] if name in sums else g for name, g in names)
                dy, *given = _backward(op, ctx, dy, grads)
                params, extras = given[0] or params, given[1] or extras
            for i, name in enumerate(_taken_from(op)):
                if name in inside and extras[i] is not None:
                    sums[name] = sums[name] + extras[i] if name in sums else extras[i]
                    extras = (*extras[:i], None, *extras[i + 1 :])
            param_grads.insert(0, params)
            extra_grads.insert(0, extras)
        return dy, param_grads, extra_grads


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    if a is b or isinstance(a, te.QuantizedTensor) or isinstance(b, te.QuantizedTensor):
        return a is b
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class SplitPieces(Pieces):
    """The same with a forward in the split form: what later operations take is kept.

    What lies in the input's memory is not fresh: the second half makes such views again.
    """

    def fuser_forward_compute(self, input_, *, requires_grad, **unused):
        x, kept = input_, []
        for k, op in enumerate(self.basic_ops):
            taken = None if _shares_memory(x, input_) else x
            x, fresh = op.op_forward_compute(x, requires_grad=requires_grad[k])
            kept.append((*fresh, taken))
        return x, [() for _ in kept], kept

    def fuser_forward_save_ctx(
        self, basic_op_ctxs, input_, tensors_to_save, *, requires_grad, **unused
    ):
        x = input_
        for k, op in enumerate(self.basic_ops):
            *fresh, taken = tensors_to_save[k]
            if k and taken is None:
                x, _ = self.basic_ops[k - 1].op_forward_compute(x, requires_grad=False)
            elif k:
                x = taken
            if requires_grad[k]:
                op.op_forward_save_ctx(basic_op_ctxs[k], x, tuple(fresh), requires_grad=True)


def silu_backward(x: Tensor, grad: Tensor) -> Tensor:
    s = x.sigmoid()
    return grad * s * (1 + x * (1 - s))


class FilledLinearSiLU(Base):
    """Forward only: fills the contexts that the built-in backwards read."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        y = F.linear(input_, weight)
        basic_op_ctxs[0].save_for_backward(input_, weight)
        basic_op_ctxs[1].save_for_backward(y)
        return F.silu(y), [(), ()]


class ReadingLinearSiLU(Base):
    """Backward only: reads what the built-in forwards saved."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear_ctx, silu_ctx = basic_op_ctxs
        (y,) = silu_ctx.saved_tensors
        dy = silu_backward(y, grad_output)
        if not linear_ctx.requires_grad:
            return None, [(None,), ()], [(), ()]
        x, w = linear_ctx.saved_tensors
        dx = None if w is None else dy @ w
        dw = None
        if x is not None:
            dw = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dx, [(dw,), ()], [(), ()]


class JointLinearSiLU(Base):
    """Both directions: saves the arguments only, and computes the product again."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(input_, weight)
        return F.silu(F.linear(input_, weight)), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, w = basic_op_ctxs[1].saved_tensors
        dy = silu_backward(x @ w.t(), grad_output)
        dw = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dy @ w, [(dw,), ()], [(), ()]


STYLES: dict[str, type[Base]] = {
    cls.__name__: cls
    for cls in (Pieces, SplitPieces, FilledLinearSiLU, ReadingLinearSiLU, JointLinearSiLU)
}
#: Those written by hand: what they may be registered as.
LINEAR_SILU = {
    "forward": "FilledLinearSiLU",
    "backward": "ReadingLinearSiLU",
    "joint": "JointLinearSiLU",
}


def op_class(name: str) -> type:
    return GUESTS[name] if name in GUESTS else getattr(te.ops, name)


def as_fusion(fuse: Fuse) -> Any:
    """What to register: a Fusion, or a function that scans the list."""
    made, classes = STYLES[fuse.style], [op_class(name) for name in fuse.pattern]
    if fuse.form == "declarative":
        return te.ops.Fusion(classes, made)

    def function(ops: list[Any], recipe: Any = None) -> list[Any]:
        out, at = [], 0
        while at < len(ops):
            window = ops[at : at + len(classes)]
            matches = [type(op) for op in window] == classes
            out.append(made(*window) if matches else ops[at])
            at += len(classes) if matches else 1
        return out

    return function


def register(fuse: Fuse) -> te.ops.FusionHandle:
    return REGISTER[fuse.kind](as_fusion(fuse), prepend=fuse.prepend)

"""Plain PyTorch in float64 for a whole random pipeline, exactly and as rounding would disturb it.

How far a result in bfloat16 may be off depends on the pipeline: a norm of small values or a chain
of gates amplifies what was rounded before. So the reference runs a few times more, each time with
every value and every gradient changed by as much as its dtype may round it, and with values close
to a kink (of ReLU, of a clamp) pushed to one side of it. How far those runs are from the exact one
is the measure of how far a right result may be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import routing_reference as routing
import torch
import torch.nn.functional as F
from pipeline_case import Op
from pipeline_model import random_experts, random_splits
from pipeline_ops import GUESTS
from quantized_reference import Alpha, LinearRecipe, cached_input, keeps_fp8, rounded_through
from reference import Reference, l2_normalization, layer_norm, rms_norm, split_glu

import ligature as te
from ligature.common.recipe import Recipe

Tensor = torch.Tensor
Made = tuple[Tensor, torch.dtype]

_NORMS = (te.ops.LayerNorm, te.ops.RMSNorm)
_LINEARS = (te.ops.Linear, te.ops.BasicLinear, torch.nn.Linear)
#: Results in autocast's dtype under autocast, besides linears and norms.
_ACTIVATIONS = tuple(getattr(te.ops, name) for name in te.ops.__all__ if name.endswith("LU"))


def module_dtype(module: torch.nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.noise = noise
        return noise(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.noise(grad), None


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.noise = noise
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.noise(grad), None


class _Scale(torch.autograd.Function):
    """A constant scale. In backward it may be left to the product before it, as its alpha."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, alpha: Alpha | None, is_fused: Callable[[], bool]
    ) -> Tensor:
        ctx.scale, ctx.alpha, ctx.is_fused = scale, alpha, is_fused
        return scale * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.is_fused():
            ctx.alpha.value = ctx.scale
            return grad.clone(), None, None, None
        return ctx.scale * grad, None, None, None


def _mixed(bits: Tensor) -> Tensor:
    """64 bits, each of which depends on all that were given."""

    def shifted(count: int) -> Tensor:
        return (bits >> count) & ((1 << (64 - count)) - 1)

    for factor, count in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27)):
        bits = (bits ^ shifted(count)) * factor
    return bits ^ shifted(31)


class Rounding:
    """Disturbs values as a rounding to their dtype may; ``side`` is where values at a kink go.

    Equal values in one place of the pipeline are rounded equally: where rows repeat, their errors
    do not average out.

    ``width``: by so many roundings in float32, and by as many of the largest value. Under a recipe
    a product has that error of its own, as what was off before is rounded away.
    """

    def __init__(self, seed: int, side: int | None, width: float = 0.0) -> None:
        self.stream = seed << 32
        self.side = side
        self.width = width

    def uniform(self, x: Tensor) -> Tensor:
        self.stream += 1
        # float64 products of equal rows may differ in their last bits.
        bits = x.detach().float().contiguous().view(torch.int32).long()
        bits = _mixed(_mixed(bits) + self.stream)
        return (bits >> 11).double() * 2.0**-52

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _Round.apply(x, self._noise(dtype))

    def gradient(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` itself, whose gradient is disturbed."""
        return _RoundGradient.apply(x, self._noise(dtype))

    def _noise(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        width = self.width if self.width and dtype == torch.float32 else 1.0

        def noise(value: Tensor) -> Tensor:
            moved = value * (1 + width * info.eps / 2 * self.uniform(value))
            if self.width and value.numel():
                moved = moved + self.width * 2**-24 * value.abs().max() * self.uniform(value)
            return moved + torch.where(value == 0, 0.0, least * self.uniform(value))

        return noise

    def side_of(self, x: Tensor) -> Tensor:
        return self.uniform(x).sign() if self.side is None else torch.full_like(x, self.side)


def _kinks(module: torch.nn.Module, x: Tensor) -> Tensor | None:
    """For each value the nearest place where the derivative jumps; None for smooth functions."""
    name = type(module).__name__
    if name == "ReLU":
        return torch.zeros_like(x)
    if name not in ("ReGLU", "ClampedSwiGLU", "ScaledClampedQGeGLU"):
        return None
    clamped = isinstance(module, (te.ops.ClampedSwiGLU, te.ops.ScaledClampedQGeGLU))
    limit = module._impl.get_option("limit") if clamped else 0.0
    interleave = module._impl.get_option("glu_interleave_size") if clamped else None
    gates, linear = split_glu(torch.arange(x.shape[-1], device=x.device), interleave)
    kinks = torch.full_like(x, float("inf"))
    kinks[..., gates] = limit
    if clamped:
        kinks[..., linear] = x[..., linear].sign() * limit
    return kinks


class Largest:
    """Copies values and notes the largest. The graph holds it, so it must not hold the graph."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel():
            self.value = max(self.value, float(x.abs().max()))
        return x.clone()


class PipelineReference(Reference):
    """A model in float64: values, dtypes that its results should have, and what hooks should see.

    ``extra`` gives the next extra input of the caller: a float64 tensor and the dtype of the real
    one, given the operation and the shape. ``fused_scales`` says, when backward runs, of each
    ConstantScale whether it is fused with the linear before it: then the gradient is quantized
    before it is scaled.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: dict[int, Op],
        autocast: torch.dtype | None,
        rounding: Rounding | None = None,
        exact: PipelineReference | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(model)
        self.recipe = recipe
        self.linears: dict[int, LinearRecipe] = {}
        self.data = data
        self.autocast = autocast
        self.rounding = rounding
        self.exact = exact
        self.at_kinks: list[Tensor] = []
        self.largest = Largest()  # of the values and gradients on the way

    def run(
        self,
        x: Tensor,
        dtype: torch.dtype,
        extra: Callable[..., Made],
        fused_scales: Sequence[bool] = (),
    ) -> tuple[list[Made], dict[int, list[Tensor]]]:
        """The output and the extra outputs; and what each module returned each time."""
        self.dtype = dtype
        self.fused_scales = fused_scales
        self.scales_seen = 0
        self.alpha: Alpha | None = None  # of the linear that was computed last
        self.extra = extra
        self.kinks_seen = 0
        self.outputs: list[Made] = []
        self.returned: dict[int, list[Tensor]] = defaultdict(list)
        if self.exact is None:
            self.at_kinks = []
        x = self._walk(self.module, x, {})
        return [(x, self.dtype), *self.outputs], self.returned

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.rounding is None:
            return _Round.apply(x, self.largest)
        return self.rounding(x, dtype)

    def _parameter(self, parameter: Tensor | None) -> Tensor | None:
        copy = super()._parameter(parameter)
        if copy is None or self.rounding is None:
            return copy
        return self.rounding(copy, self._cast(parameter.dtype))

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        """What is computed in under autocast, which leaves float64 alone."""
        return dtype if dtype == torch.float64 else self.autocast or dtype

    def _walk(self, module: torch.nn.Module, x: Tensor, channels: dict[str, Made]) -> Tensor:
        if isinstance(module, (te.ops.Sequential, torch.nn.Sequential)):
            inner: dict[str, Made] = {}
            for child in module:
                x = self._walk(child, x, inner)
            x = x.clone()
        else:
            self.alpha_before, self.alpha = self.alpha, None
            x, self.dtype = self._step(module, x, channels)
            x = self._rounded(x, self.dtype)
        if x.requires_grad:
            x.retain_grad()
        self.returned[id(module)].append(x)
        return x

    def _step(
        self, module: torch.nn.Module, x: Tensor, channels: dict[str, Made]
    ) -> tuple[Tensor, torch.dtype]:
        def take(shape: Any) -> Made:
            op = self.data[id(module)]
            if op.takes:
                return channels[op.takes]
            return self.extra(op, tuple(shape), self.dtype)

        def give(made: Tensor, dtype: torch.dtype) -> None:
            op = self.data[id(module)]
            if op.gives:
                channels[op.gives] = (made, dtype)
            if not op.gives or op.to_caller:
                self.outputs.append((made.clone(), dtype))

        if isinstance(module, te.ops.GroupedLinear):
            rows = x.reshape(-1, x.shape[-1])
            sizes, _ = take((random_splits, module.num_groups, rows.shape[0]))
            return self._of_groups(module, x, rows, sizes.tolist()), self._cast(
                module_dtype(module)
            )
        if isinstance(module, te.ops.Dispatch):
            tokens, top_k = x[..., 0].numel(), self.data[id(module)].options["top_k"]
            count = module.num_experts
            experts, _ = take((random_experts, count, tokens, top_k))
            probabilities, dtype = take((tokens, top_k))
            rows, of_rows = routing.dispatch(x, experts, probabilities, count)
            routing_map = routing.routing_map_of(experts, count)
            name = self.data[id(module)].gives
            channels[f"{name}.splits"] = (routing.splits_of(experts, count), torch.int64)
            channels[f"{name}.rows"] = (of_rows, dtype)
            channels[f"{name}.map"] = (routing_map.view(2, *x.shape[:-1], top_k), torch.int32)
            return rows.view(tokens * top_k, x.shape[-1]), self.dtype
        if isinstance(module, te.ops.Combine):
            routing_map, _ = take(())
            of_slots = routing_map[1].flatten().long()
            padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
            chosen = padded[torch.where(of_slots < 0, x.shape[0], of_slots)]
            sums = chosen.reshape(*routing_map.shape[1:], x.shape[1]).sum(-2)
            return sums, self.dtype
        if isinstance(module, te.ops.AddExtraInput):
            extra, dtype = take(x.shape)
            return x + extra, dtype if module.in_place else self.dtype
        if isinstance(module, te.ops.MakeExtraOutput):
            give(x, self.dtype)
            return x, self.dtype
        if type(module).__name__ in GUESTS:
            dtype = module.dtype_after(self.dtype, self._cast)
            extras = [take(x.shape)[0]] if module.num_extra_inputs else []
            y, made = module.plain(self._parameter, x, *extras)
            for tensor in made:
                give(self._rounded(tensor, dtype), dtype)
            return y, dtype
        if type(module).__name__.startswith("Scaled"):
            scales, _ = take(x.shape[:-1])
            y = self._apply(module, self._taken(module, x))
            return y * scales.unsqueeze(-1), self._cast(self.dtype)
        if isinstance(module, te.ops.Bias) and self.rounding is not None:
            # Its parameter is cast to the dtype of what it is added to, and may cancel that.
            bias = self._parameter(module.bias)
            assert bias is not None
            return self._taken(module, x) + self.rounding(bias, self.dtype), self.dtype
        return self._apply(module, self._taken(module, x)), self._dtype_after(module)

    def _of_groups(
        self, module: te.ops.GroupedLinear, x: Tensor, rows: Tensor, sizes: list[int]
    ) -> Tensor:
        dtype = self._cast(module_dtype(module))
        round_ = self.rounding or (lambda value, dtype: value)

        def of_group(kind: str, single: bool, group: int) -> Tensor:
            whole = self._parameter(getattr(module, kind if single else f"{kind}{group}"))
            assert whole is not None
            return whole[group] if single else whole

        parts, begin = [], 0
        for group, size in enumerate(sizes):
            own = round_(rows[begin : begin + size], dtype)
            begin += size
            y = round_(own @ of_group("weight", module.single_grouped_weight, group).T, dtype)
            if module.has_bias:
                y = y + of_group("bias", module.single_grouped_bias, group)
            parts.append(y)
        parts.append(rows.new_zeros(rows.shape[0] - begin, module.out_features))
        return torch.cat(parts).reshape(*x.shape[:-1], module.out_features)

    def _dtype_after(self, module: torch.nn.Module) -> torch.dtype:
        if isinstance(module, _LINEARS):
            return self._cast(module.weight.dtype)
        if isinstance(module, (*_NORMS, *_ACTIVATIONS)):
            return self._cast(self.dtype)
        return self.dtype

    def end_forward(self) -> None:
        for linear in self.linears.values():
            linear.update("input", "weight")

    def end_backward(self) -> None:
        for linear in self.linears.values():
            linear.update("grad_output")

    def _quantized(self, module: Any, x: Tensor) -> Tensor:
        """A linear under a recipe: its operands are rounded to their formats."""
        dtype = self._dtype_after(module)
        linear = self.linears.setdefault(id(module), LinearRecipe(self.recipe))
        weight = Reference._parameter(self, module.weight)
        if self.rounding is not None:
            x = self.rounding(x, dtype)
            # A weight's gradient is made in the compute dtype, whatever the weight's is.
            weight = self.rounding.gradient(weight, dtype)
        self.alpha = Alpha()
        y = linear.product(x, weight, dtype, self.alpha)
        if self.rounding is not None:
            y = self.rounding(y, dtype)
        bias = self._parameter(getattr(module, "bias", None))
        return y if bias is None else y + bias

    def _apply(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        if isinstance(module, torch.nn.Softsign):
            return x / (1 + x.abs())
        if isinstance(module, (torch.nn.Identity, torch.nn.Dropout)):
            return x
        if isinstance(module, te.ops.Quantize):
            return x if self.recipe is None else rounded_through(module, x, self.recipe)
        if self.recipe is not None and isinstance(module, (te.ops.Linear, te.ops.BasicLinear)):
            return self._quantized(module, x)
        if self.recipe is not None and isinstance(module, te.ops.ConstantScale):
            return self._scaled(module, x)
        if keeps_fp8(module):
            plain = super()._apply
            return cached_input(lambda v: plain(module, v), x, self.dtype)
        if self.rounding is None:
            return super()._apply(module, x)
        inside = torch.promote_types(self.dtype, torch.float32)
        rounded = lambda value: self.rounding(value, inside)  # noqa: E731
        weight = self._parameter(getattr(module, "weight", None))
        bias = self._parameter(getattr(module, "bias", None))
        if isinstance(module, _LINEARS):
            dtype = self._dtype_after(module)
            y = self.rounding(F.linear(self.rounding(x, dtype), weight), dtype)
            return y if bias is None else y + bias
        if isinstance(module, te.ops.L2Normalization):
            return l2_normalization(x, eps=module.eps, rounded=rounded)
        if isinstance(module, _NORMS):
            given = {"eps": module.eps, "zero_centered_gamma": module.zero_centered_gamma}
            if isinstance(module, te.ops.RMSNorm):
                y = rms_norm(x, weight, rounded=rounded, **given)
            else:
                y = layer_norm(x, weight, bias, rounded=rounded, **given)
            # Backward takes the gradient in the input's dtype, whatever autocast made the output.
            return y if self._cast(self.dtype) == self.dtype else self.rounding(y, self.dtype)
        return super()._apply(module, x)

    def _scaled(self, module: Any, x: Tensor) -> Tensor:
        fused, at = self.fused_scales, self.scales_seen
        self.scales_seen += 1
        return _Scale.apply(x, module.scale, self.alpha_before, lambda: any(fused[at : at + 1]))

    def _taken(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        """The input of an activation, as autocast rounds it."""
        cast = self._cast(self.dtype)
        if self.rounding is not None and isinstance(module, _ACTIVATIONS) and cast != self.dtype:
            x = self.rounding(x, cast)
        return self._from_kinks(module, x)

    def _from_kinks(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        """Values that rounding may carry over a kink, carried there."""
        if self.exact is None:
            if _kinks(module, x.detach()) is not None:
                self.at_kinks.append(x.detach())
            return x
        if _kinks(module, x.detach()) is None:
            return x
        exact = self.exact.at_kinks[self.kinks_seen]
        self.kinks_seen += 1
        if x.numel() == 0:
            return x
        moved = (x.detach() - exact).abs()
        width = 4 * moved.max()
        kinks = _kinks(module, exact)
        near = ((exact - kinks).abs() < width) & (moved > 0)
        goal = kinks + self.rounding.side_of(x) * width
        return x + torch.where(near, goal - x.detach(), 0.0)

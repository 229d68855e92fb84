"""What linears compute under a recipe: float64 products of operands that format_reference rounds.

Which format a recipe gives to which tensor is stated here once more, and nothing of Ligature's
kernels is used. A product reads row-wise data of what is summed over its last dimension and
column-wise data of what is summed over the others:

    y = x w^T      x row-wise,    w row-wise
    dx = dy w      dy row-wise,   w column-wise
    dw = dy^T x    dy column-wise, x column-wise

Where both operands of dw were transformed by the same orthogonal matrix, so are the sums, and the
product of the transformed ones is taken as it is.

A recipe that overrides backward leaves dy as it is, and takes x and w as they were before they were
quantized, or as the forward product had them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from delayed_reference import Factor
from format_reference import LARGEST, SIGNS, quantize_matrix
from reference import ACTIVATIONS, Reference

import ligature as te
from ligature.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

Tensor = torch.Tensor

#: Every kind of recipe, with the fields that change what is computed.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "delayed": lambda: DelayedScaling(),
    "delayed e5m2": lambda: DelayedScaling(
        margin=1, fp8_format=Format.E5M2, amax_history_len=2, amax_compute_algo="most_recent"
    ),
    "current": lambda: Float8CurrentScaling(),
    "current 2^n": lambda: Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=True),
    "block": lambda: Float8BlockScaling(),
    "block f32": lambda: Float8BlockScaling(use_f32_scales=True),
    "block 2d x": lambda: Float8BlockScaling(
        use_f32_scales=True, x_block_scaling_dim=2, w_block_scaling_dim=1
    ),
    "mxfp8": lambda: MXFP8BlockScaling(),
    "mxfp8 2d": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "nvfp4": lambda: NVFP4BlockScaling(),
    "nvfp4 no rht": lambda: NVFP4BlockScaling(disable_rht=True),
    "nvfp4 nearest": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 1d": lambda: NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4 by row": lambda: NVFP4BlockScaling(row_scaled_activation=True),
    "nvfp4 4/6": lambda: NVFP4BlockScaling(nvfp4_4over6="all"),
    "nvfp4 4/6 mse": lambda: NVFP4BlockScaling(
        nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE", disable_stochastic_rounding=True
    ),
}
#: Those that random pipelines, whose numbers must stay what they are, do not draw.
MORE_RECIPES: dict[str, Callable[[], Recipe]] = {
    "nvfp4 4/6 to 448": lambda: NVFP4BlockScaling(
        nvfp4_4over6="all",
        nvfp4_4over6_e4m3_use_256="weights",
        disable_rht=True,
        disable_stochastic_rounding=True,
    ),
    "current, backward high": lambda: Float8CurrentScaling(backward_override="high_precision"),
    "mxfp8, backward dequantized": lambda: MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4, backward dequantized": lambda: NVFP4BlockScaling(backward_override="dequantized"),
    "block f32, backward high": lambda: Float8BlockScaling(
        use_f32_scales=True, backward_override="high_precision"
    ),
}
EVERY_RECIPE = {**RECIPES, **MORE_RECIPES}
#: One of each kind, for what does not depend on the rest.
SOME_RECIPES = ("delayed", "current", "block f32", "mxfp8", "nvfp4")


def is_stochastic(recipe: Recipe) -> bool:
    return (
        isinstance(recipe, NVFP4BlockScaling)
        and not recipe.disable_stochastic_rounding
        and recipe.backward_override is None
    )


def format_of(recipe: Recipe, role: str) -> dict[str, Any]:
    """The fields of format_reference for an "input", a "weight" or a "grad_output"."""
    f: dict[str, Any] = {
        "element": "e2m1",
        "scaling": "nv",
        "block_2d": False,
        "power_of_2_scales": False,
        "amax_epsilon": 0.0,
        "hadamard": False,
        "stochastic_rounding": False,
        "row_scaled": False,
        "four_over_six": "none",
    }
    if isinstance(recipe, NVFP4BlockScaling):
        f["block_2d"] = role == "weight" and not recipe.disable_2d_quantization
        f["hadamard"] = role != "weight" and not recipe.disable_rht
        f["stochastic_rounding"] = role == "grad_output" and is_stochastic(recipe)
        f["row_scaled"] = role == "input" and recipe.row_scaled_activation
        where = {"all": ("input", "weight"), "weights": ("weight",), "activations": ("input",)}
        if role in where.get(recipe.nvfp4_4over6, ()):
            mse = recipe.nvfp4_4over6_err_mode == "MSE"
            f["four_over_six"] = "mean_square" if mse else "mean_absolute"
            f["scales_to_448"] = role not in where.get(recipe.nvfp4_4over6_e4m3_use_256, ())
        return f
    backward = role == "grad_output" and recipe.fp8_format is Format.HYBRID
    f["element"] = "e5m2" if backward or recipe.fp8_format is Format.E5M2 else "e4m3"
    if isinstance(recipe, DelayedScaling):
        f["scaling"] = "delayed"
    elif isinstance(recipe, Float8CurrentScaling):
        f["scaling"] = "current"
        f["power_of_2_scales"] = recipe.use_power_2_scales
    elif isinstance(recipe, Float8BlockScaling):
        f["scaling"] = "block"
        f["power_of_2_scales"] = not recipe.use_f32_scales
        names = {"input": "x", "weight": "w", "grad_output": "grad"}
        f["block_2d"] = getattr(recipe, f"{names[role]}_block_scaling_dim") == 2
    else:
        assert isinstance(recipe, MXFP8BlockScaling)
        f["scaling"] = "mx"
        f["block_2d"] = role == "weight" and recipe.enable_2d_quantization
    return f


# -- operands


def butterflies(x: Tensor) -> Tensor:
    """The transform of groups of 16 along rows, filled up with zeros, in single float32 steps."""
    filled = F.pad(x, (0, -x.shape[1] % 16)).view(x.shape[0], -1, 16)
    v = filled * torch.tensor(SIGNS, dtype=torch.float32)
    for stride in (1, 2, 4, 8):
        pairs = v.view(*v.shape[:2], 16 // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), -2).view(filled.shape)
    return (v * 0.25).view(x.shape[0], -1)


def values_of(x: Tensor, f: dict[str, Any], stream: int, scale: float, seed: int) -> Tensor:
    """Rounded on the CPU, whatever the matrix is on, and in float64 where it was."""
    if x.numel() == 0:
        return x.double()
    with torch.device("cpu"):
        rows = x.detach().float().cpu()
        if stream == 1 and f["hadamard"]:
            rows, f = butterflies(rows), {**f, "hadamard": False}
        values = quantize_matrix(rows, f, stream, scale, seed).values
    return values.double().to(x.device)


def rowwise(x: Tensor, f: dict[str, Any], scale: float = 1.0, seed: int = 0) -> Tensor:
    """The values of a matrix that are left of it, in float64."""
    return values_of(x, f, 0, scale, seed)


def columnwise(x: Tensor, f: dict[str, Any], scale: float = 1.0, seed: int = 0) -> Tensor:
    """The transpose's values, of the transformed tensor where the format says so."""
    return values_of(x.t().contiguous(), f, 1, scale, seed)


def next_seed() -> int:
    """64 bits of torch's generator, as a quantizer with stochastic rounding draws them."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)) % 2**64


class Alpha:
    """What the gradients of one product are multiplied by, after it."""

    value = 1.0


class LinearRecipe:
    """What one linear has of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.formats = {
            role: format_of(recipe, role) for role in ("input", "weight", "grad_output")
        }
        self.backward_override = recipe.backward_override
        self.factors: dict[str, Factor] = {}
        if isinstance(recipe, DelayedScaling):
            assert isinstance(recipe.amax_compute_algo, str)
            for role, f in self.formats.items():
                self.factors[role] = Factor(
                    LARGEST[f["element"]],
                    recipe.amax_history_len,
                    recipe.margin,
                    recipe.amax_compute_algo,
                )
        self.met: set[str] = set()

    def scale(self, role: str) -> float:
        return float(self.factors[role].scale) if role in self.factors else 1.0

    def note(self, role: str, x: Tensor) -> None:
        if role in self.factors:
            self.met.add(role)
            if x.numel():
                self.factors[role].note(x)

    def update(self, *roles: str) -> None:
        """What delayed scaling does at the end of a context and of a backward pass."""
        for role in roles:
            if role in self.met:
                self.factors[role].update()
                self.met.remove(role)

    def product(
        self, x: Tensor, w: Tensor, dtype: torch.dtype, alpha: Alpha | None = None
    ) -> Tensor:
        """``x w^T`` in float64; ``dtype`` is what operands have before they are rounded."""
        return _Product.apply(x, w, self, dtype, alpha or Alpha())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, linear: LinearRecipe, dtype: torch.dtype, alpha: Alpha
    ) -> Tensor:
        ctx.alpha = alpha
        matrix = x.reshape(-1, x.shape[-1]).to(dtype).float()
        ctx.scales = linear.scale("input"), linear.scale("weight")
        ctx.operands, ctx.linear, ctx.dtype, ctx.sizes = (matrix, w.float()), linear, dtype, x.shape
        linear.note("input", matrix)
        linear.note("weight", w)
        f = linear.formats
        y = rowwise(matrix, f["input"], ctx.scales[0])
        y = y @ rowwise(w.float(), f["weight"], ctx.scales[1]).t()
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, w = ctx.operands
        linear, f = ctx.linear, ctx.linear.formats
        dy = grad.reshape(-1, w.shape[0]).to(ctx.dtype).float()
        if linear.backward_override is not None:
            return *overridden_gradients(ctx, dy), None, None, None
        seed = next_seed() if f["grad_output"]["stochastic_rounding"] else 0
        given = {"f": f["grad_output"], "scale": linear.scale("grad_output"), "seed": seed}
        linear.note("grad_output", dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = rowwise(dy, **given) @ columnwise(w, f["weight"], ctx.scales[1]).t()
            dx = ctx.alpha.value * dx.view(ctx.sizes)
        if ctx.needs_input_grad[1]:
            dw = columnwise(dy, **given) @ columnwise(x, f["input"], ctx.scales[0]).t()
            dw = ctx.alpha.value * dw
        return dx, dw, None, None, None


def overridden_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of a product whose backward has operands in high precision."""
    x, w = (operand.double() for operand in ctx.operands)
    if ctx.linear.backward_override == "dequantized":
        f = ctx.linear.formats
        x, w = rowwise(x, f["input"], ctx.scales[0]), rowwise(w, f["weight"], ctx.scales[1])
        x, w = x.to(ctx.dtype).double(), w.to(ctx.dtype).double()
    dy = ctx.alpha.value * dy.double()
    dx = (dy @ w).view(ctx.sizes) if ctx.needs_input_grad[0] else None
    return dx, dy.t() @ x if ctx.needs_input_grad[1] else None


# -- activations that keep their input in FP8

E4M3_CURRENT = {**format_of(Float8CurrentScaling(), "input")}


def cached_input(function: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """Its value at ``x`` and its gradient at what FP8 leaves of ``x``."""
    given = x.detach().to(dtype)
    kept = rowwise(given.reshape(-1, x.shape[-1]), E4M3_CURRENT).view(x.shape)
    # The kept values are one tensor of this dtype in backward.
    kept = kept.float().to(dtype).double()
    at_kept = function(x + (kept - x).detach())
    return at_kept + (function(x) - at_kept).detach()


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool, recipe: Recipe) -> Tensor:
        ctx.backward, ctx.recipe = backward, recipe
        return _rounded(x, format_of(recipe, "input")) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.backward and ctx.recipe.backward_override is None:
            grad = _rounded(grad, format_of(ctx.recipe, "grad_output"))
        return grad, None, None, None


def _rounded(x: Tensor, f: dict[str, Any]) -> Tensor:
    seed = next_seed() if f["stochastic_rounding"] else 0
    return rowwise(x.reshape(-1, x.shape[-1]), f, seed=seed).view(x.shape)


def rounded_through(quantize: Any, x: Tensor, recipe: Recipe) -> Tensor:
    """Roughly what a Quantize lets through: it knows nothing of neighbours or of earlier steps."""
    options = (quantize._impl.get_option(name) for name in ("forward", "backward"))
    return _Through.apply(x, *options, recipe)


# -- whole modules


class RecipeReference(Reference):
    """A ligature module under a recipe: its linears in low precision, the rest in float64.

    ``disturbed`` is applied to all that passes between operations, in both directions.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        recipe: Recipe,
        dtype: torch.dtype,
        disturbed: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__(module)
        self.recipe = recipe
        self.dtype = dtype
        self.disturbed = disturbed
        self.linears: dict[int, LinearRecipe] = {}

    def _apply(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        return self.disturbed(self._exactly(module, x))

    def _exactly(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        if isinstance(module, (te.ops.Linear, te.ops.BasicLinear)):
            linear = self.linears.setdefault(id(module), LinearRecipe(self.recipe))
            weight = self._parameter(module.weight)
            assert weight is not None
            y = linear.product(x, weight, self.dtype)
            bias = self._parameter(getattr(module, "bias", None))
            return y if bias is None else y + bias
        if isinstance(module, te.ops.Quantize):
            return x
        if keeps_fp8(module):
            plain = super()._apply
            return cached_input(lambda v: plain(module, v), x, self.dtype)
        return super()._apply(module, x)

    def end_forward(self) -> None:
        for linear in self.linears.values():
            linear.update("input", "weight")

    def end_backward(self) -> None:
        for linear in self.linears.values():
            linear.update("grad_output")


def keeps_fp8(module: torch.nn.Module) -> bool:
    """Whether an activation keeps its input in FP8 for backward."""
    if type(module).__name__ not in ACTIVATIONS or not isinstance(module, te.ops.BasicOperation):
        return False
    return bool(module._impl.get_option("cache_quantized_input"))


# -- comparisons

#: Of a sum of exact products, accumulated in float32 and rounded once or twice at the end.
PRECISION = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
#: Of the largest result: accumulated in float32, and by the FP8 units of a GPU, which cut off what
#: they add at about 14 bits of the largest term, towards zero, and with fast accumulation of the
#: sum so far.
ACCUMULATION = 4e-6
NATIVE_ACCUMULATION = 2.0**-10


def is_native(recipe: Recipe | None, device: str | torch.device) -> bool:
    """Whether a device computes with the recipe's formats itself, where sizes allow it."""
    if torch.device(device).type != "cuda":
        return False
    if isinstance(recipe, (DelayedScaling, Float8CurrentScaling)):
        return recipe.fp8_format is not Format.E5M2 and torch.cuda.get_device_capability() >= (8, 9)
    return isinstance(recipe, Float8BlockScaling) and torch.cuda.get_device_capability()[0] == 9


def flips(recipe: Recipe | None, device: str | torch.device) -> float:
    """By how many roundings in float32 to disturb a product so that what may fall to another code
    does so in some run."""
    return 2.0**13 if is_native(recipe, device) else 16.0


def assert_product(
    got: Tensor | None,
    wanted: Tensor | None,
    dtype: torch.dtype,
    what: str,
    recipe: Recipe | None = None,
) -> None:
    """As close as accumulation, of products in the formats of this recipe, and rounding allow."""
    assert (got is None) == (wanted is None), f"{what}: {got} instead of {wanted}"
    if got is None or wanted is None:
        return
    assert got.dtype == dtype, f"{what}: dtype {got.dtype} instead of {dtype}"
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if not got.numel():
        return
    accumulation = NATIVE_ACCUMULATION if is_native(recipe, got.device) else ACCUMULATION
    got, wanted = got.detach().double(), wanted.detach()
    largest = float(wanted.abs().max())
    limit = PRECISION[dtype] * wanted.abs() + accumulation * largest
    if dtype == torch.float16:
        limit = limit + 2.0**-24
    error = (got - wanted).abs()
    worst = int((error - limit).argmax())
    assert bool((error <= limit).all()), (
        f"{what}: {float(got.flatten()[worst]):.8g} instead of "
        f"{float(wanted.flatten()[worst]):.8g} at {worst} of {list(got.shape)}, "
        f"largest {largest:.3g}"
    )


def distance(got: Tensor, wanted: Tensor) -> float:
    """Of the differences, the root mean square relative to that of the values."""
    if not wanted.numel():
        return 0.0
    difference = (got.detach().double() - wanted.detach().double()).norm()
    return float(difference / wanted.detach().double().norm().clamp(min=1e-30))

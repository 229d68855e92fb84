"""Plain PyTorch in float64: what every operation should compute, and how close a dtype gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

import ligature.ops as ops

Tensor = torch.Tensor

#: dtype: (relative, absolute) tolerance against the float64 reference on values of order one.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}

FLOAT_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def assert_close(
    actual: Tensor | None,
    reference: Tensor | None,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    what: str = "",
) -> None:
    """``actual`` is ``reference`` as far as ``dtype`` (of ``actual`` too, unless None) can tell.

    ``scale`` widens the tolerances, for results that add up many rounded values.
    """
    assert (actual is None) == (reference is None), f"{what}: {actual} instead of {reference}"
    if actual is None or reference is None:
        return
    if dtype is None:
        dtype = actual.dtype
    assert actual.dtype == dtype, f"{what}: dtype {actual.dtype} instead of {dtype}"
    assert actual.shape == reference.shape, f"{what}: {actual.shape} instead of {reference.shape}"
    assert not actual.isnan().any() or reference.isnan().any(), f"{what}: NaN"
    rtol, atol = (scale * t for t in TOLERANCES[dtype])
    torch.testing.assert_close(
        actual.detach().double(),
        reference.detach().double().to(actual.device),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda message: f"{what}: {message}" if what else message,
    )


def float64_copy(tensor: Tensor) -> Tensor:
    """A leaf in float64 with the same values and the same ``requires_grad``."""
    copy = tensor.detach().double().clone()
    return copy.requires_grad_(tensor.requires_grad)


def make_input(
    *shape: int,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = True,
) -> Tensor:
    """A random leaf."""
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(requires_grad)


# -- activations


def gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + inner.tanh())


def qgelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)  # with a gradient of 0 at 0


def srelu(x: Tensor) -> Tensor:
    return relu(x) ** 2


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def split_glu(x: Tensor, interleave: int | None = None) -> tuple[Tensor, Tensor]:
    """The gates and the linear units of a GLU's input."""
    if interleave is None:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    blocks = x.unflatten(-1, (x.shape[-1] // (2 * interleave), 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def gated(act: Callable[[Tensor], Tensor], x: Tensor, interleave: int | None = None) -> Tensor:
    gate, linear = split_glu(x, interleave)
    return act(gate) * linear


def swiglu(x: Tensor, *, glu_interleave_size: int | None = None) -> Tensor:
    return gated(silu, x, glu_interleave_size)


def clamped_swiglu(
    x: Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int | None = None,
) -> Tensor:
    gate, linear = split_glu(x, glu_interleave_size)
    gate = gate.clamp(max=limit)
    linear = linear.clamp(min=-limit, max=limit) + glu_linear_offset
    return gate * (alpha * gate).sigmoid() * linear


def situ_glu(
    x: Tensor,
    *,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int | None = None,
) -> Tensor:
    gate, linear = split_glu(x, glu_interleave_size)
    return beta1 * (gate / beta1).tanh() * gate.sigmoid() * beta2 * (linear / beta2).tanh()


#: Activations without options or extra inputs, by the name of their class.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": gelu,
    "QGELU": qgelu,
    "ReLU": relu,
    "SReLU": srelu,
    "SiLU": silu,
    "GLU": lambda x: gated(torch.sigmoid, x),
    "GEGLU": lambda x: gated(gelu, x),
    "QGEGLU": lambda x: gated(qgelu, x),
    "ReGLU": lambda x: gated(relu, x),
    "SReGLU": lambda x: gated(srelu, x),
    "SwiGLU": swiglu,
    "ClampedSwiGLU": clamped_swiglu,
    "SiTUGLU": situ_glu,
}
GLU_ACTIVATIONS = [
    "GLU",
    "GEGLU",
    "QGEGLU",
    "ReGLU",
    "SReGLU",
    "SwiGLU",
    "ClampedSwiGLU",
    "SiTUGLU",
]

#: The same with options, by the name of the class; the scaled ones before their scales.
_WITH_OPTIONS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "SwiGLU": (swiglu, ()),
    "ClampedSwiGLU": (clamped_swiglu, ("limit", "alpha", "glu_linear_offset")),
    "SiTUGLU": (situ_glu, ("beta1", "beta2")),
    "ScaledSwiGLU": (swiglu, ()),
    "ScaledClampedQGeGLU": (clamped_swiglu, ("limit", "alpha", "glu_linear_offset")),
    "ScaledSiTUGLU": (situ_glu, ("beta1", "beta2")),
}


# -- norms


def _trailing(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(-weight.dim(), 0))


def _exact(x: Tensor) -> Tensor:
    return x


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    rounded: Callable[[Tensor], Tensor] = _exact,
) -> Tensor:
    """``rounded`` is applied to what a kernel would have to round on the way."""
    dims = _trailing(weight)
    centered = x - rounded(x).mean(dims, keepdim=True)
    variance = rounded(centered).square().mean(dims, keepdim=True)
    normalized = rounded(centered) / (variance + eps).sqrt()
    return normalized * (1 + weight if zero_centered_gamma else weight) + bias


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    rounded: Callable[[Tensor], Tensor] = _exact,
) -> Tensor:
    square = rounded(x).square().mean(_trailing(weight), keepdim=True)
    normalized = rounded(x) / (square + eps).sqrt()
    return normalized * (1 + weight if zero_centered_gamma else weight)


def l2_normalization(
    x: Tensor, *, eps: float = 1e-6, rounded: Callable[[Tensor], Tensor] = _exact
) -> Tensor:
    return rounded(x) / (rounded(x).square().sum(-1, keepdim=True) + eps).sqrt()


# -- whole modules


class Reference:
    """A ligature module in plain PyTorch, with float64 copies of its parameters.

    Call it as the module, with float64 tensors; ``parameters[name]`` are its leaves, tied where the
    module's are. Dropout does nothing, whatever the mode. Channels join operations of a Sequential.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._copies: dict[int, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._copies:
                self._copies[id(parameter)] = float64_copy(parameter)
            self.parameters[name] = self._copies[id(parameter)]

    def _parameter(self, parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else self._copies[id(parameter)]

    def __call__(self, x: Tensor, *extra_inputs: Tensor) -> Any:
        extras = list(extra_inputs)
        outputs: list[Tensor] = []
        x = self._run(self.module, x, extras, outputs, {})
        assert not extras, "too many extra inputs"
        return (x, *outputs) if outputs else x

    def _run(
        self,
        module: torch.nn.Module,
        x: Tensor,
        extras: list[Tensor],
        outputs: list[Tensor],
        channels: dict[str, Tensor],
    ) -> Tensor:
        if isinstance(module, (ops.Sequential, torch.nn.Sequential)):
            inner: dict[str, Tensor] = {}
            for child in module:
                x = self._run(child, x, extras, outputs, inner)
            return x
        if isinstance(module, ops.AddExtraInput):
            channel = module._handle.extra_input_channel(0)
            return x + (channels[channel] if channel else extras.pop(0))
        if isinstance(module, ops.MakeExtraOutput):
            channel = module._handle.extra_output_channel(0)
            if channel:
                channels[channel] = x
            if module._handle.extra_output_to_caller(0):
                outputs.append(x)
            return x
        if isinstance(module, ops.GroupedLinear):
            channel = module._handle.extra_input_channel(0)
            splits = channels[channel] if channel else extras.pop(0)
            scales = None
            if module.num_extra_inputs == 2:
                channel = module._handle.extra_input_channel(1)
                scales = channels[channel] if channel else extras.pop(0)
            return self._grouped_linear(module, x, splits.tolist(), scales)
        if type(module).__name__.startswith("Scaled"):
            channel = module._handle.extra_input_channel(0)
            scales = channels[channel] if channel else extras.pop(0)
            return self._apply(module, x) * scales.unsqueeze(-1)
        return self._apply(module, x)

    def _grouped_linear(
        self, module: ops.GroupedLinear, x: Tensor, splits: list[int], scales: Tensor | None
    ) -> Tensor:
        """Rows past the last group are zeros, whatever they were."""

        def of_group(kind: str, single: bool, group: int) -> Tensor:
            parameter = getattr(module, kind if single else f"{kind}{group}")
            copy = self._parameter(parameter)
            assert copy is not None
            return copy[group] if single else copy

        rows = x.reshape(-1, module.in_features)
        parts = []
        begin = 0
        for group, size in enumerate(splits):
            own = rows[begin : begin + size]
            y = own @ of_group("weight", module.single_grouped_weight, group).T
            if module.has_bias:
                bias = of_group("bias", module.single_grouped_bias, group)
                factor = 1 if scales is None else scales.flatten()[begin : begin + size, None]
                y = y + factor * bias
            parts.append(y)
            begin += size
        parts.append(x.new_zeros(rows.shape[0] - begin, module.out_features))
        return torch.cat(parts).reshape(*x.shape[:-1], module.out_features)

    def _apply(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        name = type(module).__name__
        weight = self._parameter(getattr(module, "weight", None))
        bias = self._parameter(getattr(module, "bias", None))
        if isinstance(module, (ops.Linear, torch.nn.Linear)):
            return F.linear(x, weight, bias)
        if isinstance(module, ops.BasicLinear):
            return F.linear(x, weight)
        if isinstance(module, ops.Bias):
            return x + bias
        if isinstance(module, (ops.LayerNorm, ops.RMSNorm)):
            given = {"eps": module.eps, "zero_centered_gamma": module.zero_centered_gamma}
            if isinstance(module, ops.RMSNorm):
                return rms_norm(x, weight, **given)
            return layer_norm(x, weight, bias, **given)
        if isinstance(module, ops.L2Normalization):
            return l2_normalization(x, eps=module.eps)
        if isinstance(module, ops.ScaledSReLU):
            return srelu(x)
        if name in _WITH_OPTIONS:
            function, names = _WITH_OPTIONS[name]
            names = ("glu_interleave_size", *names)
            given = {key: module._impl.get_option(key) for key in names}
            return function(x, **given)
        if name in ACTIVATIONS:
            return ACTIVATIONS[name](x)
        if isinstance(module, ops.ConstantScale):
            return x * module.scale
        if isinstance(module, ops.Reshape):
            return x.reshape(module.shape)
        alone = (ops.AllGather, ops.AllReduce, ops.ReduceScatter)  # over a group of one
        if isinstance(module, (ops.Identity, ops.Dropout, *alone)):
            return x
        raise NotImplementedError(name)


def check_against_reference(
    module: torch.nn.Module,
    *inputs: Tensor,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    grad_outputs: Iterable[Tensor] | None = None,
) -> None:
    """Runs ``module`` forward and backward and compares outputs and all gradients to the reference.

    ``dtype``: of the outputs, by default that of the first input. Gradients have the dtype of what
    they belong to. Leaves no gradients behind.
    """
    reference = Reference(module)
    copies = [float64_copy(x) if x.is_floating_point() else x for x in inputs]
    wanted = reference(*copies)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    got = module(*leaves)
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(wanted)
    dtype = dtype or inputs[0].dtype
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.requires_grad == b.requires_grad, f"output {k}: requires_grad {a.requires_grad}"
        assert_close(a, b, dtype, scale=scale, what=f"output {k}")

    if grad_outputs is None:
        grad_outputs = [torch.randn_like(y) for y in got]
    used = [k for k, y in enumerate(wanted) if y.requires_grad]
    if not used:
        return
    grads = list(grad_outputs)
    torch.autograd.backward([got[k] for k in used], [grads[k] for k in used])
    torch.autograd.backward([wanted[k] for k in used], [grads[k].double() for k in used])
    for k, (leaf, copy) in enumerate(zip(leaves, copies, strict=True)):
        assert_close(leaf.grad, copy.grad, leaf.dtype, scale=scale, what=f"gradient of input {k}")
    for name, parameter in module.named_parameters():
        wanted_grad = reference.parameters[name].grad
        what = f"gradient of {name}"
        assert_close(parameter.grad, wanted_grad, parameter.dtype, scale=scale, what=what)
        parameter.grad = None


# -- models that many tests use


def make_mlp(features: int = 8, hidden: int = 16, *, recompute: str = "none", **kwargs: Any) -> Any:
    """Norm, linear, GELU, linear; ``torch_twin`` makes the same in plain PyTorch."""
    return ops.Sequential(
        ops.LayerNorm(features, **kwargs),
        ops.Linear(features, hidden, **kwargs),
        ops.GELU(),
        ops.Linear(hidden, features, **kwargs),
        recompute=recompute,
    )


def torch_twin(mlp: torch.nn.Module) -> torch.nn.Sequential:
    """A ``torch.nn.Sequential`` with the parameters of what ``make_mlp`` made, copied."""
    linear = mlp.get_submodule("1")
    assert isinstance(linear, ops.Linear)
    twin = torch.nn.Sequential(
        torch.nn.LayerNorm(linear.in_features),
        torch.nn.Linear(linear.in_features, linear.out_features),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(linear.out_features, linear.in_features),
    ).to(device=linear.weight.device, dtype=linear.weight.dtype)
    twin.load_state_dict(mlp.state_dict())
    for (name, a), (other, b) in zip(mlp.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        b.requires_grad_(a.requires_grad)
    return twin

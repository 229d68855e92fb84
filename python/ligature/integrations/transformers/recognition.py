"""Recognizes RMSNorms and gated MLPs by what they have and what they compute.

A class is asked to compute something small, with weights of our own on the CPU: so a name says
nothing, and neither the model's weights nor its device matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ... import ops
from ...ops._hooks import has_hooks
from .modules import HALVES, JOINED

Tensor = torch.Tensor

#: Operations, and the activation of the first half of each.
ACTIVATIONS: dict[type[ops.BasicOperation], Callable[[Tensor], Tensor]] = {
    ops.SwiGLU: functional.silu,
    ops.GEGLU: lambda x: functional.gelu(x, approximate="tanh"),
    ops.QGEGLU: lambda x: x * torch.sigmoid(1.702 * x),
    ops.ReGLU: functional.relu,
    ops.SReGLU: lambda x: functional.relu(x).square(),
    ops.GLU: torch.sigmoid,
}
_ACTIVATION_NAMES = "silu, gelu_pytorch_tanh, quick_gelu, relu, relu2, sigmoid"
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OTHER_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class UnsupportedError(Exception):
    """Why a module cannot be replaced."""


@dataclass
class Norm:
    """What an RMSNorm is made of."""

    weight: torch.nn.Parameter
    eps: float
    zero_centered: bool


@dataclass
class MLP:
    """What a gated MLP is made of."""

    gate_up: list[torch.nn.Linear]  #: one that is joined already, or the gate and the other
    activation: type[ops.BasicOperation]
    down: torch.nn.Linear


def _check_plain(module: torch.nn.Module, name: str = "it") -> None:
    if has_hooks(module) or any(len(getattr(module, hooks)) for hooks in _OTHER_HOOKS):
        raise UnsupportedError(f"{name} has hooks")
    if "forward" in vars(module) or hasattr(module, "_hf_hook"):
        raise UnsupportedError(f"{name} has a forward of its own, which another package gave it")
    if module._compiled_call_impl is not None:
        raise UnsupportedError(f"{name} is compiled; replace first, then compile")


def check_parameter(parameter: Any, shape: tuple[int, ...], name: str) -> None:
    if type(parameter) is not torch.nn.Parameter or type(parameter.data) is not Tensor:
        raise UnsupportedError(f"{name} is a {type(parameter).__name__}, not a plain parameter")
    if parameter.dtype not in _DTYPES:
        raise UnsupportedError(f"{name} is quantized ({parameter.dtype})")
    if tuple(parameter.shape) != shape:
        raise UnsupportedError(f"{name} must have shape {shape}, got {tuple(parameter.shape)}")


def _computes(module: torch.nn.Module, parts: dict[str, Any], x: Tensor) -> Tensor:
    """What the class of ``module`` computes with other parameters or submodules."""
    probe = copy.copy(module)
    probe.__dict__.update(parts)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            y = type(module).forward(probe, x)
    except Exception as error:  # a forward may do anything
        reason = str(error).strip().splitlines()
        said = reason[0] if reason else repr(error)
        raise UnsupportedError(f"its forward does not take a tensor alone: {said}") from None
    if not isinstance(y, Tensor):
        raise UnsupportedError(f"its forward gives a {type(y).__name__}, not a tensor")
    return y


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, device="cpu", generator=generator)


# -- norms


def read_norm(module: torch.nn.Module) -> Norm | None:
    """The RMSNorm that a module is; None where it does not look like one."""
    named = "rmsnorm" in type(module).__name__.lower()
    weight = module._parameters.get("weight")
    if not named:
        other = isinstance(module, torch.nn.LayerNorm | torch.nn.GroupNorm)
        looks = "norm" in type(module).__name__.lower() and not other
        if not looks or module._modules or list(module._parameters) != ["weight"]:
            return None
        if weight is None or weight.dim() != 1:
            return None
    try:
        return _read_norm(module)
    except UnsupportedError:
        if named:
            raise
        return None


def _read_norm(module: torch.nn.Module) -> Norm:
    weight = module._parameters.get("weight")
    if weight is None:
        raise UnsupportedError("it has no weight")
    if len(module._parameters) != 1 or module._modules:
        raise UnsupportedError("it has more than a weight")
    if weight.dim() != 1:
        raise UnsupportedError(f"its weight must have one dimension, got {tuple(weight.shape)}")
    _check_plain(module)
    check_parameter(weight, tuple(weight.shape), "its weight")
    found = [getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)]
    if not found or not isinstance(found[0], float):
        raise UnsupportedError(f"it has no eps that is a number, got {found[0] if found else None}")
    eps = found[0]
    size = weight.shape[0]
    factor = 1 + 0.3 * _random(size, dtype=torch.float32)
    # Rows of which some are small enough for eps to count.
    x = _random(6, size, dtype=torch.float32)
    x *= torch.tensor([30.0, 1.0, 1.0, 0.1, eps**0.5, 0.1 * eps**0.5], device="cpu")[:, None]
    y = _computes(module, {"_parameters": {"weight": torch.nn.Parameter(factor)}}, x)
    wide = x.double()
    plain = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    for zero_centered in (False, True):
        if _close(y, plain * (factor.double() + zero_centered)):
            return Norm(weight, eps, zero_centered)
    raise UnsupportedError("it computes something else than an RMSNorm")


# -- MLPs and experts


def check_experts(module: torch.nn.Module) -> None:
    """Refuses a module of experts that another package has changed."""
    if module._compiled_call_impl is not None:
        raise UnsupportedError("it is compiled; replace first, then compile")
    for name, parameter in module._parameters.items():
        if parameter is not None:
            check_parameter(parameter, tuple(parameter.shape), name)


def is_mlp(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is a layer's MLP by its place or by its parts, gated or not."""
    if name.rpartition(".")[2] in _MLP_NAMES or type(module).__name__.endswith("MLP"):
        return True
    parts = set(module._modules)
    return "down_proj" in parts and (parts >= set(HALVES) or JOINED in parts)


def read_mlp(module: torch.nn.Module, hidden_act: Any) -> MLP:
    """The gated MLP that a module is."""
    parts = {name: child for name, child in module._modules.items() if child is not None}
    if "experts" in parts or "moe" in type(module).__name__.lower():
        raise UnsupportedError("it is a mixture of experts that takes no other implementation")
    names = [*HALVES, "down_proj"] if "gate_proj" in parts else [JOINED, "down_proj"]
    if not set(names) <= set(parts) or module._parameters:
        raise UnsupportedError("it is not made of gate_proj, up_proj and down_proj")
    _check_plain(module)
    linears = [_read_linear(parts.pop(name), name) for name in names]
    for name, child in parts.items():
        inert = isinstance(child, torch.nn.Dropout) and child.p == 0
        if isinstance(child, torch.nn.Dropout) and not inert:
            raise UnsupportedError(f"it has a dropout, {name}")
        if any(True for _ in child.parameters()):
            raise UnsupportedError(f"it has parameters beside its linear layers, in {name}")
        _check_plain(child, name)
    *gate_up, down = linears
    _check_sizes(gate_up, down)
    return MLP(gate_up, _activation(module, names, hidden_act), down)


def _read_linear(module: torch.nn.Module, name: str) -> torch.nn.Linear:
    if type(module) is not torch.nn.Linear:
        raise UnsupportedError(f"{name} is a {type(module).__name__}, not a torch.nn.Linear")
    _check_plain(module, name)
    check_parameter(module.weight, (module.out_features, module.in_features), f"{name}.weight")
    if module.bias is not None:
        check_parameter(module.bias, (module.out_features,), f"{name}.bias")
    return module


def _check_sizes(gate_up: list[torch.nn.Linear], down: torch.nn.Linear) -> None:
    if sum(linear.out_features for linear in gate_up) != 2 * down.in_features:
        raise UnsupportedError(
            f"its hidden sizes do not fit: {[linear.out_features for linear in gate_up]} and "
            f"{down.in_features}"
        )
    first, *rest = gate_up
    for other in rest:
        if (first.bias is None) != (other.bias is None):
            raise UnsupportedError("of gate_proj and up_proj one has a bias and the other has none")
        if first.weight.shape != other.weight.shape:
            raise UnsupportedError("gate_proj and up_proj differ in shape")
        for name in ("weight", "bias"):
            a, b = getattr(first, name), getattr(other, name)
            if a is None:
                continue
            for what in ("dtype", "device", "requires_grad"):
                if getattr(a, what) != getattr(b, what):
                    raise UnsupportedError(
                        f"the {name}s of gate_proj and up_proj differ in {what}: "
                        f"{getattr(a, what)} and {getattr(b, what)}"
                    )
            if a.grad is not None or b.grad is not None:
                raise UnsupportedError(f"gate_proj.{name} has a gradient; call zero_grad() first")


def _activation(
    module: torch.nn.Module, names: list[str], hidden_act: Any
) -> type[ops.BasicOperation]:
    """The operation that does what the class does between its linear layers."""
    size, hidden = 6, 10
    sizes = {JOINED: (2 * hidden, size), "down_proj": (size, hidden)}
    weights = {}
    small = dict(module._modules)
    for place, name in enumerate(names):
        rows, columns = sizes.get(name, (hidden, size))
        weights[name] = _random(rows + place, columns, dtype=torch.float64)[place:]
        small[name] = torch.nn.Linear(columns, rows, bias=False, device="meta")
        small[name].weight = torch.nn.Parameter(weights[name])  # type: ignore[union-attr]
    x = _random(20, size, dtype=torch.float64)
    y = _computes(module, {"_modules": small}, x)
    gate_up = [x @ weights[name].T for name in names[:-1]]
    gate, linear = gate_up if len(gate_up) == 2 else gate_up[0].chunk(2, dim=-1)
    for op, activation in ACTIVATIONS.items():
        if _close(y, (activation(gate) * linear) @ weights["down_proj"].T):
            return op
    raise UnsupportedError(
        "it computes something else than down(act(gate) * up) with one of "
        f"{_ACTIVATION_NAMES}; hidden_act is {hidden_act!r}"
    )

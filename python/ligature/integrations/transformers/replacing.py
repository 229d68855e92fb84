"""Replaces the MLPs, experts and norms of a decoder: first all is looked at, then it is changed."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ops import Linear, RMSNorm, Sequential
from ...ops.fusible import FusibleOperation
from ...quantization import checkpoint, quantized_model_init
from ...quantization.checkpointing import state_keys
from .dataflow import norm_before
from .experts import ExpertsPipeline, is_experts, is_replaced, replace_experts, state_names
from .modules import GatedMLP, NormInMLP, keep_norm_names
from .recognition import (
    MLP,
    Norm,
    UnsupportedError,
    check_experts,
    is_mlp,
    read_mlp,
    read_norm,
)
from .report import Left, Replaced, Report
from .saving import SavePretrained


def replace(model: torch.nn.Module, *, strict: bool = True, recompute: str = "none") -> Report:
    """Lets Ligature compute the MLPs, experts and RMSNorms of a decoder of transformers.

    An MLP of the form ``down(act(gate(x)) * up(x))`` becomes one pipeline with the norm in front of
    it, where nothing else takes that norm's output; other RMSNorms become operations. Modules are
    recognized by what they have and what they compute, not by their class. The experts of a mixture
    stay the modules that they are, with the implementation ``"ligature"``.

    Parameters keep their values, device, dtype and ``requires_grad``; those of ``gate_proj`` and
    ``up_proj`` are joined into new ones, so make the optimizer afterwards. ``state_dict`` and
    ``load_state_dict``, ``save_pretrained`` and ``from_pretrained`` keep the original's names.

    Args:
        model: a ``PreTrainedModel``, or a module that holds one. It is changed in place.
        strict: raise ValueError, and change nothing, when an MLP or an RMSNorm cannot be replaced.
            Otherwise it is left alone, and the report says why.
        recompute: what backward may compute again instead of keeping it, as in
            :class:`ligature.ops.Sequential`.
    """
    package = _transformers()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"[replace] model must be a torch.nn.Module, got {type(model).__name__}")
    hosts = [(n, m) for n, m in model.named_modules() if isinstance(m, package.PreTrainedModel)]
    if not hosts:
        raise TypeError(
            "[replace] model must be a transformers.PreTrainedModel or hold one, got "
            f"{type(model).__name__}"
        )
    if recompute not in ("none", "cheap"):
        raise ValueError(f"[replace] recompute must be 'none' or 'cheap', got {recompute!r}")
    plan = _Plan(model)
    if strict:
        plan.check()
    return plan.apply(recompute, hosts)


def gradient_checkpointing_enable(model: Any, **kwargs: Any) -> None:
    """``model.gradient_checkpointing_enable()``, by :func:`ligature.checkpoint`.

    So the second run of a layer has the recipe of the first, wherever backward is called. Keyword
    arguments are those of ``ligature.checkpoint``; ``use_reentrant`` is False by default.
    """
    kwargs.setdefault("use_reentrant", False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs))
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = functools.partial(checkpoint, **kwargs)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "ligature.integrations.transformers needs the package transformers, which could not be "
            f"imported ({error}); pip install transformers"
        ) from error


@dataclass
class _FoundMLP:
    parts: MLP
    norm: str | None  # the name of the norm that runs with it
    note: str = ""


@dataclass
class _Plan:
    """What there is to do in a model."""

    model: torch.nn.Module
    norms: dict[str, Norm] = field(default_factory=dict)
    mlps: dict[str, _FoundMLP] = field(default_factory=dict)
    experts: dict[str, torch.nn.Module] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)

    def __post_init__(self) -> None:
        modules = list(self.model.modules())
        self._uses = Counter(id(c) for m in modules for c in m._modules.values())
        self._owners = Counter(id(p) for m in modules for p in m._parameters.values())
        found: dict[str, MLP] = {}
        for name, module in self._candidates():
            try:
                self._read(name, module, found)
            except UnsupportedError as error:
                self.left.append(Left(name, type(module).__name__, str(error)))
        for name, parts in found.items():
            self.mlps[name] = self._with_norm(name, parts)
        self._leave_experts_together()

    def _candidates(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Everything but Ligature's own and what is inside of an MLP or of experts.

        A mixture whose experts are there for themselves is looked into."""
        passed = ""
        for name, module in self.model.named_modules():
            if not name or (passed and name.startswith(passed)):
                continue
            own = isinstance(module, FusibleOperation | Sequential | NormInMLP)
            if any(map(is_experts, module.children())):
                continue
            if own or is_experts(module) or is_mlp(name, module):
                passed = f"{name}."
            if not own:
                yield name, module

    def _leave_experts_together(self) -> None:
        """Modules of one configuration have one implementation."""
        kinds = {entry.name: self.model.get_submodule(entry.name) for entry in self.left}
        kept = {id(m.config): name for name, m in kinds.items() if is_experts(m)}
        for name in list(self.experts):
            module = self.model.get_submodule(name)
            other = kept.get(id(module.config))
            if other is not None:
                reason = f"{other}, which has the same configuration, cannot be replaced"
                self.left.append(Left(name, type(module).__name__, reason))
                del self.experts[name]

    def _read(self, name: str, module: torch.nn.Module, found: dict[str, MLP]) -> None:
        if is_experts(module):
            if not is_replaced(module):
                check_experts(module)
                self._check_single(module)
                ExpertsPipeline(module)  # or why there can be none
                self.experts[name] = module
            return
        if is_mlp(name, module):
            parts = read_mlp(module, self._hidden_act(name))
            self._check_single(module)
            if len(parts.gate_up) == 2:
                for linear in parts.gate_up:
                    for parameter in linear.parameters():
                        if self._owners[id(parameter)] > 1:
                            raise UnsupportedError("it shares a weight with another module")
            found[name] = parts
            return
        norm = read_norm(module)
        if norm is not None:
            self._check_single(module)
            self.norms[name] = norm

    def _check_single(self, module: torch.nn.Module) -> None:
        if any(self._uses[id(part)] > 1 for part in module.modules()):
            raise UnsupportedError("it is used in several places of the model")

    def _hidden_act(self, name: str) -> Any:
        """What the configuration nearest to a module says."""
        while name:
            name = name.rpartition(".")[0]
            config = getattr(self.model.get_submodule(name), "config", None)
            for key in ("hidden_act", "hidden_activation", "activation_function"):
                if getattr(config, key, None) is not None:
                    return getattr(config, key)
        return None

    def _with_norm(self, name: str, parts: MLP) -> _FoundMLP:
        parent, _, last = name.rpartition(".")
        layer = self.model.get_submodule(parent)
        if any(map(is_experts, layer.children())):
            return _FoundMLP(parts, None, "its input goes to the experts too")
        norm, reason = norm_before(layer, last)
        if norm is None:
            return _FoundMLP(parts, None, reason)
        norm = f"{parent}.{norm}" if parent else norm
        if norm not in self.norms:
            return _FoundMLP(parts, None, "its input does not come from an RMSNorm")
        weight, other = self.norms[norm].weight, parts.down.weight
        for what in ("dtype", "device"):
            a, b = getattr(weight, what), getattr(other, what)
            if a != b:
                return _FoundMLP(parts, None, f"{what} of its norm is {a}, and {b} its own")
        return _FoundMLP(parts, norm)

    def check(self) -> None:
        """Raises where something is left, or nothing found."""
        if self.left:
            lines = [f"  {left.name}: {left}" for left in self.left]
            raise ValueError(
                "[replace] these cannot be replaced; strict=False leaves them alone\n"
                + "\n".join(lines)
            )
        if not self.norms and not self.mlps and not self.experts:
            raise ValueError(
                f"[replace] {type(self.model).__name__} has no MLP and no RMSNorm that is not "
                "replaced already"
            )

    def apply(self, recompute: str, hosts: list[tuple[str, torch.nn.Module]]) -> Report:
        """Changes the model. What has been replaced is released at once."""
        report = Report(left=self.left)
        layers: set[str] = set()
        self._leave_recipes_out(hosts)
        for name in [name for name, _ in self.model.named_modules()]:
            if name in self.mlps:
                found = self.mlps.pop(name)
                norm = None if found.norm is None else self.norms.pop(found.norm)
                mlp = _make_mlp(found.parts, norm, recompute)
                self._set(name, mlp)
                operations = tuple(type(op).__name__ for op in mlp)
                report.replaced.append(Replaced(name, operations, found.norm, found.note))
                if found.norm is not None:
                    layer, _, last = name.rpartition(".")
                    self._set(found.norm, NormInMLP(last, mlp))
                    layers.add(layer)
            elif name in self.experts:
                pipeline = replace_experts(self.experts[name], recompute)
                note = pipeline.gate.note
                report.replaced.append(Replaced(name, pipeline.operations, note=note))
            elif name in self.norms and name not in {f.norm for f in self.mlps.values()}:
                self._set(name, _make_norm(self.norms.pop(name)))
                report.replaced.append(Replaced(name, ("RMSNorm",)))
        for layer in layers:
            keep_norm_names(self.model.get_submodule(layer))
        return report

    def _set(self, name: str, module: torch.nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        owner = self.model.get_submodule(parent)
        setattr(owner, last, module.train(getattr(owner, last).training))

    def _leave_recipes_out(self, hosts: list[tuple[str, torch.nn.Module]]) -> None:
        """What ``save_pretrained`` writes is for the original, which knows no recipes."""
        for host_name, host in hosts:
            start = f"{host_name}." if host_name else ""
            keys = set(getattr(host, "_keys_to_ignore_on_save", None) or ())
            for name in self.mlps:
                if name.startswith(start):
                    for linear in ("gate_up_proj", "down_proj"):
                        keys |= set(state_keys(f"{name[len(start) :]}.{linear}."))
            for name in self.experts:
                if name.startswith(start):
                    keys |= set(state_names(f"{name[len(start) :]}."))
            host._keys_to_ignore_on_save = keys  # type: ignore[assignment]
            host.save_pretrained = SavePretrained(host)  # type: ignore[assignment]


# -- modules


def _make_norm(found: Norm) -> RMSNorm:
    norm = RMSNorm(
        found.weight.shape[0],
        eps=found.eps,
        zero_centered_gamma=found.zero_centered,
        device="meta",
        dtype=found.weight.dtype,
    )
    norm.weight = found.weight
    return norm


def _make_linear(parts: list[torch.nn.Linear]) -> Linear:
    first = parts[0]
    bias = first.bias is not None
    with quantized_model_init(enabled=False):
        linear = Linear(
            first.in_features,
            sum(part.out_features for part in parts),
            bias=bias,
            device="meta",
            dtype=first.weight.dtype,
        )
    linear.weight = _join([part.weight for part in parts])
    if bias:
        linear.bias = _join([part.bias for part in parts])
    return linear


def _join(parameters: list[Any]) -> torch.nn.Parameter:
    """One parameter is kept as it is."""
    if len(parameters) == 1:
        kept: torch.nn.Parameter = parameters[0]
        return kept
    with torch.no_grad():
        return torch.nn.Parameter(torch.cat(parameters), parameters[0].requires_grad)


def _make_mlp(parts: MLP, norm: Norm | None, recompute: str) -> GatedMLP:
    return GatedMLP(
        None if norm is None else _make_norm(norm),
        _make_linear(parts.gate_up),
        parts.activation(),
        _make_linear([parts.down]),
        halves=len(parts.gate_up) == 2,
        recompute=recompute,
    )

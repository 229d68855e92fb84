"""A random pipeline as modules: the model, the hooks on it, and the tensors it is called with."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pipeline_case import Case, Nest, Op
from pipeline_ops import GUESTS

import ligature as te

Tensor = torch.Tensor


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _make(op: Op) -> torch.nn.Module:
    options = dict(op.options)
    if "dtype" in options:
        options["dtype"] = torch_dtype(options["dtype"])
    if op.kind.startswith("torch."):
        return getattr(torch.nn, op.kind.removeprefix("torch."))(**options)
    options.pop("top_k", None)
    module = (GUESTS[op.kind] if op.kind in GUESTS else getattr(te.ops, op.kind))(**options)
    if op.kind == "Dispatch":
        for slot, name in enumerate(("splits", "rows", "map")):
            channel = f"{op.gives}.{name}"
            module.set_extra_output_channel(slot, channel, output_to_caller=False)
        return module
    if op.takes:
        module.set_extra_input_channel(0, op.takes)
    if op.gives:
        module.set_extra_output_channel(0, op.gives, output_to_caller=op.to_caller)
    return module


@torch.no_grad()
def _fill(module: torch.nn.Module, op: Op, seed: int) -> None:
    """Values of order one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
        if name.startswith("weight") and "in_features" in op.options:
            noise = noise / parameter.shape[-1] ** 0.5
        elif name in ("weight", "scale") and not op.options.get("zero_centered_gamma"):
            noise = 1 + 0.3 * noise
        else:
            noise = 0.3 * noise
        if op.strided and noise.dim() == 2:
            parameter.data = torch.empty_like(parameter.t(), memory_format=torch.contiguous_format)
            parameter.data = parameter.data.t()
        parameter.copy_(noise)


class Model:
    """The modules of a case, and the data that each was made from."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tied: dict[int, torch.nn.Module] = {}
        self.made: list[tuple[torch.nn.Module, Op]] = []
        self.root = te.ops.Sequential(*self._modules(case.ops), recompute=case.recompute)
        if case.copied:
            self.root = copy.deepcopy(self.root)
        self.data: dict[int, Op | Nest] = {}
        self._describe(self.root, case.ops)
        self.root.train(case.training)
        for parameter in self.main_grads():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.zeros_like(parameter, dtype=wide).detach()
        self.call = self.root
        if case.fuser:
            self.call = te.ops.OperationFuser(list(self.root), recompute=case.recompute)

    def _modules(self, ops: tuple[Any, ...]) -> Iterator[torch.nn.Module]:
        for op in ops:
            if isinstance(op, Nest):
                if op.kind == "torch":
                    yield torch.nn.Sequential(*self._modules(op.ops))
                else:
                    yield te.ops.Sequential(*self._modules(op.ops), recompute=op.recompute)
            elif op.tied in self.tied:
                yield self.tied[op.tied]
            else:
                module = _make(op)
                _fill(module, op, len(self.made))
                self.made.append((module, op))
                if op.tied:
                    self.tied[op.tied] = module
                yield module

    def _describe(self, container: Any, ops: tuple[Any, ...]) -> None:
        for module, op in zip(container, ops, strict=True):
            self.data[id(module)] = op
            if isinstance(op, Nest):
                self._describe(module, op.ops)

    def main_grads(self) -> list[torch.nn.Parameter]:
        modules = self.root.modules()
        given = [m for m in modules if id(m) in self.data and isinstance(self.data[id(m)], Op)]
        key = "accumulate_into_main_grad"
        return [m.weight for m in given if self.data[id(m)].options.get(key)]

    def fused_scales(self) -> list[bool]:
        """Of each ConstantScale, in order: was it fused with the linear before it for backward?"""

        def of_fuser(fuser: te.ops.OperationFuser) -> Iterator[bool]:
            fused = [(op, at) for op, at in fuser._backward_ops if op.is_fused_op]
            scaled = [at for op, at in fused if isinstance(op, te.ops.fused.BackwardLinearScale)]
            for at, op in enumerate(fuser._basic_ops):
                if isinstance(op, te.ops.ConstantScale):
                    yield any(at in covered for covered in scaled)

        def walk(module: Any) -> Iterator[bool]:
            if isinstance(module, te.ops.OperationFuser):
                yield from of_fuser(module)
            elif isinstance(module, te.ops.ConstantScale):
                yield False
            elif isinstance(module, (te.ops.Sequential, torch.nn.Sequential)):
                for part in getattr(module, "_module_groups", None) or module:
                    yield from walk(part)

        return list(walk(self.call))

    def freeze(self, how: str) -> None:
        self.root.requires_grad_(how != "all")
        if how != "as said":
            return
        for module in self.root.modules():
            op = self.data.get(id(module))
            for name in op.frozen if isinstance(op, Op) else ():
                parameter = getattr(module, name, None)
                if isinstance(parameter, torch.nn.Parameter):
                    parameter.requires_grad_(False)


class Hooks:
    """Counts and keeps what the hooks of a case are shown."""

    def __init__(self, model: Model) -> None:
        self.seen: dict[tuple[int, str], list[Tensor | None]] = {}
        self.handles = []
        for module in model.root.modules():
            for kind in getattr(model.data.get(id(module)), "hooks", ()):
                self.seen[id(module), kind] = []
                self.handles.append(self._add(module, kind))

    def _add(self, module: torch.nn.Module, kind: str) -> Any:
        seen = self.seen[id(module), kind]

        def keep(values: Any) -> None:
            first = values[0] if isinstance(values, tuple) else values
            seen.append(None if first is None else first.detach().clone())

        if kind == "forward":
            return module.register_forward_hook(lambda m, args, out: keep(out))
        if kind == "forward_pre":
            return module.register_forward_pre_hook(lambda m, args: keep(args))
        if kind == "backward":
            return module.register_full_backward_hook(lambda m, gi, go: keep(go))
        return module.register_full_backward_pre_hook(lambda m, go: keep(go))

    def clear(self) -> None:
        for values in self.seen.values():
            values.clear()


# -- tensors


def random_values(seed: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, *shape[1:]) if layout == "expanded" and shape and shape[0] else shape
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(dtype).to(torch.get_default_device())


def laid_out(values: Tensor, layout: str, shape: tuple[int, ...]) -> Tensor:
    """The same values, contiguous or not."""
    if layout == "expanded" and shape:
        return values.expand(shape)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(-1, 0).contiguous().transpose(-1, 0)
    if layout == "every second" and values.dim() > 0:
        return values.repeat_interleave(2, -1)[..., ::2]
    if layout == "offset" and values.dim() > 0:
        return torch.nn.functional.pad(values, (1, 0))[..., 1:]
    return values.clone()


def random_splits(rng: random.Random, groups: int, rows: int) -> Tensor:
    """Sizes of groups, some of them empty, with or without rows behind them."""
    cuts = sorted(rng.randrange(rows + 1) for _ in range(groups))
    if rng.randrange(2):
        cuts[-1] = rows
    return torch.tensor([end - begin for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)])


def random_experts(rng: random.Random, experts: int, tokens: int, top_k: int) -> Tensor:
    """An expert for each slot, or one that there is not."""
    lowest = -1 if rng.randrange(3) == 0 else 0
    table = [[rng.randrange(lowest, experts) for _ in range(top_k)] for _ in range(tokens)]
    return torch.tensor(table, dtype=torch.int64).view(tokens, top_k)


@dataclass
class GivenIntegers:
    """Sizes or indices that the caller gives."""

    make: Callable[..., Tensor]
    sizes: tuple[int, ...]
    seed: int
    grad: str = "none"
    dtype: torch.dtype = torch.int64
    in_place: bool = False

    def __post_init__(self) -> None:
        self.leaf = self.passed = self.make(random.Random(self.seed), *self.sizes)

    def copy(self) -> Tensor:
        return self.leaf

    def check_unchanged(self, what: str) -> None:
        assert self.passed._version == 0, f"{what} was changed"


@dataclass
class Given:
    """One tensor that the caller gives: the leaf, and what is passed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    grad: str
    seed: int
    in_place: bool = False

    def __post_init__(self) -> None:
        values = random_values(self.seed, self.shape, self.dtype, self.layout)
        self.leaf = laid_out(values, self.layout, self.shape).requires_grad_(self.grad != "none")
        self.passed = self.leaf
        if self.grad == "computed":
            self.passed = self.leaf * 1
        self.before = self.leaf.detach().clone()
        self.passed_version = self.passed._version

    def copy(self) -> Tensor:
        return self.before.double().clone().requires_grad_(self.grad != "none")

    def check_unchanged(self, what: str) -> None:
        assert torch.equal(self.passed, self.before), f"{what} was changed"
        assert self.passed._version == self.passed_version, f"{what} counts as changed"

"""Sequential: a container like ``torch.nn.Sequential`` that fuses neighbouring operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, overload

import torch
from torch import compiler
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C
from .._arguments import default_device, listed
from ..explanation import Explanation, example_tensors, strict, strict_names
from ._explainer import Explainer, explain_last
from ._hooks import GLOBAL_HOOKS, REPLACED, hook_dicts
from .fuser import OperationFuser
from .fusible import FusibleOperation, refuse_script, refuse_tracers
from .grouping import CachedFusers, Group, group_run
from .op import FusedOperation, basic_ops_of


def _times(times: Any) -> int:
    if not isinstance(times, int) or isinstance(times, bool):
        raise TypeError(f"[Sequential] it can be multiplied by an int, got {type(times).__name__}")
    if times <= 0:
        raise ValueError(f"[Sequential] it can be multiplied by a positive int, got {times}")
    return times


class Sequential(torch.nn.Module):
    """Runs modules one after the other; neighbouring operations are fused.

    Args:
        *args: modules, or one ``OrderedDict`` of named modules.
        recompute: ``"cheap"`` lets joint fusions recompute norms and activations in backward
            instead of saving them. Default ``"none"``.
        strict: names of fusions that must fire (in one of its fusers, where it has several);
            otherwise the call that makes the plan fails and says why.

    Extra inputs of its operations are passed after the input, extra outputs are returned after the
    output, both in order. Keyword arguments of single operations:
    ``op_kwargs={op_or_index: {...}}``.
    """

    def __init__(
        self,
        *args: torch.nn.Module | Mapping[str, torch.nn.Module],
        recompute: str = "none",
        strict: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._module_groups: list[OperationFuser | torch.nn.Module] | None = None
        self._groups: list[Group] = []
        self._watch: _C.ModuleWatch | None = None
        self._only: OperationFuser | None = None
        self._run: Callable[..., Any] | None = None
        self._exported = CachedFusers()
        self._edits = "0"  # a compiler guards it; a string, lest it makes a variable of it
        self._recompute = "none"
        self._strict: list[str] = []
        self.recompute = recompute
        self.strict = strict
        if len(args) == 1 and isinstance(args[0], Mapping):
            for key, named in args[0].items():
                self.add_module(key, named)
        else:
            for module in args:
                self.append(cast(torch.nn.Module, module))

    # -- container

    @property
    def recompute(self) -> str:
        """What backward may recompute instead of saving: "none" or "cheap"."""
        return self._recompute

    @recompute.setter
    def recompute(self, value: str) -> None:
        if value not in ("none", "cheap"):
            raise ValueError(f"[Sequential] recompute must be 'none' or 'cheap', got {value!r}")
        self._recompute = value
        self._changed()

    @property
    def strict(self) -> Sequence[str]:
        """Names of fusions that must fire."""
        return tuple(self._strict)

    @strict.setter
    def strict(self, fusions: Sequence[str]) -> None:
        self._strict = strict_names(fusions)
        self._changed()

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"[Sequential] module '{name}' must be a torch.nn.Module, got "
                f"{'None' if module is None else type(module).__name__}"
            )
        self._changed()
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_modules":
            self._changed()

    def _changed(self) -> None:
        self._module_groups = None
        self._run = None
        self._edits = str(int(self._edits) + 1)

    def _key(self, idx: int) -> str:
        keys = list(self._modules)
        if not -len(keys) <= idx < len(keys):
            raise IndexError(f"[Sequential] there is no module {idx} among {len(keys)}")
        return keys[idx]

    def _next_key(self) -> str:
        numbers = [int(key) for key in self._modules if key.isdigit()]
        return str(max(numbers, default=-1) + 1)

    @overload
    def __getitem__(self, idx: slice) -> Sequential: ...
    @overload
    def __getitem__(self, idx: int) -> torch.nn.Module: ...
    def __getitem__(self, idx: slice | int) -> Sequential | torch.nn.Module:
        if isinstance(idx, slice):
            return Sequential(*list(self)[idx], recompute=self.recompute)
        module = self._modules[self._key(idx)]
        assert module is not None
        return module

    def __setitem__(self, idx: int, module: torch.nn.Module) -> None:
        self.add_module(self._key(idx), module)

    def __delitem__(self, idx: slice | int) -> None:
        self._changed()
        keys = list(self._modules)[idx] if isinstance(idx, slice) else [self._key(idx)]
        for key in keys:
            del self._modules[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def append(self, module: torch.nn.Module) -> Sequential:
        """Adds a module at the end."""
        self.add_module(self._next_key(), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Adds modules at the end."""
        for module in listed("Sequential", "what it is extended by", "modules", modules):
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> Sequential:
        """Adds a module before position ``idx``."""
        modules = list(self)
        if not -len(modules) <= idx <= len(modules):
            raise IndexError(
                f"[Sequential] there is no position {idx} among {len(modules)} modules"
            )
        modules.insert(idx, module)
        keys = [*self._modules, self._next_key()]
        for key, value in zip(keys, modules, strict=True):
            self.add_module(key, value)
        return self

    def pop(self, idx: slice | int = -1) -> torch.nn.Module:
        """Takes a module (or several) out and returns it."""
        out = self[idx]
        del self[idx]
        return out

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        more = listed("Sequential", "what is added", "modules", modules)
        return Sequential(*self, *more, recompute=self.recompute, strict=self.strict)

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(modules)

    def __mul__(self, times: int) -> Sequential:
        """Its modules so many times over: the same ones, as in ``torch.nn.Sequential``."""
        modules = list(self) * _times(times)
        return Sequential(*modules, recompute=self.recompute, strict=self.strict)

    __rmul__ = __mul__

    def __imul__(self, times: int) -> Sequential:
        return self.extend(list(self) * (_times(times) - 1))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_module_groups=None, _groups=[], _watch=None, _only=None)
        state.update(_run=None)
        state.update(_exported=CachedFusers())
        return state

    # -- grouping

    def _update_groups(self) -> None:
        if self._module_groups is None or self._watch is None or self._watch.changed():
            self._regroup()

    def _regroup(self) -> None:
        groups: list[Group] = []
        run: list[FusibleOperation] = []
        runs = 0

        def close_run() -> None:
            nonlocal run, runs
            if run:
                strict = self._strict if len(run) == len(self) else ()
                groups.extend(group_run(run, runs, self.recompute, strict))
            run, runs = [], runs + 1

        watched: list[torch.nn.Module] = []
        for module in self:
            if isinstance(module, FusibleOperation):
                run.append(module)
                watched.extend([module, *basic_ops_of(module)])
            else:
                close_run()
                groups.append(Group(module))
        close_run()

        dicts = [*GLOBAL_HOOKS, REPLACED]
        dicts += [hooks for module in watched for hooks in hook_dicts(module)]
        self._watch = _C.ModuleWatch(self._modules, dicts)
        self._groups = groups
        self._module_groups = [group.module for group in groups]
        only = groups[0].module if len(groups) == 1 else None
        self._only = only if isinstance(only, OperationFuser) else None
        self._run = _C.runner(only, self._watch) if isinstance(only, OperationFuser) else None

    # -- forward

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs it takes after its input."""
        self._update_groups()
        return self._count_extra_inputs()

    def _count_nested(self) -> int:
        if is_compiling():
            self._prepare_traced()
        else:
            self._update_groups()
        return self._count_extra_inputs()

    def _count_extra_inputs(self) -> int:
        count = 0
        for group in self._groups:
            if isinstance(group.module, Sequential):
                count += group.module._count_nested()
            else:
                count += sum(1 for name in group.inputs if not name)
        return count

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
    ) -> Any:
        """The output, or a tuple of the output and the extra outputs."""
        if is_dynamo_compiling() or compiler._is_compiling_flag:  # cheaper than is_compiling()
            return self._forward_traced(input, extra_inputs, op_kwargs)
        run = self._run
        if run is not None and op_kwargs is None:
            # Without a tuple to take apart a call is cheaper.
            result = run(input, *extra_inputs) if extra_inputs else run(input)
            if result is not NotImplemented:
                return result
        self._update_groups()
        if self._run is not None and op_kwargs is None:
            return self._run(input, *extra_inputs)
        kwargs = self._resolve_kwargs(op_kwargs)
        if self._only is not None or not self._strict:
            return self._forward_groups(input, list(extra_inputs), kwargs)
        with strict(*self._strict, where="any"):
            return self._forward_groups(input, list(extra_inputs), kwargs)

    def _prepare_traced(self) -> str:
        from ._traced.group import traced

        self._update_groups()
        for group in self._groups:
            if isinstance(group.module, OperationFuser) and group.traced is None:
                group.traced = traced(group.module)
                if is_exporting():
                    self._exported.fusers.append(group.module)
        return "ready"

    # A compiler runs it once, while it traces.
    _prepare_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _forward_traced(self, input: Any, extra_inputs: Any, op_kwargs: Any) -> Any:
        assert self._edits  # read, so that a compiler guards it
        self._prepare_traced()
        if self._strict and self._only is None:
            raise RuntimeError(
                "[Sequential] strict cannot be checked in a compiled graph where the container "
                "does not consist of operations alone; call it in eager mode, or set strict=()"
            )
        kwargs = {} if op_kwargs is None else self._resolve_kwargs(op_kwargs)
        return self._forward_groups(input, list(extra_inputs), kwargs)

    def __prepare_scriptable__(self) -> Any:
        refuse_script(self)

    # -- explaining

    def _was_called(self) -> bool:
        if self._module_groups is None or self._watch is None or self._watch.changed():
            return False
        fusers = [g.module for g in self._groups if isinstance(g.module, OperationFuser)]
        return all(fuser._forward_ops is not None for fuser in fusers)

    def explain(self, *example: torch.Tensor | Sequence[int]) -> Explanation:
        """What the last call did, or what a call with ``example`` would do.

        An example is a tensor or a shape, for the input and for each extra input; a shape stands
        for a tensor in the parameters' dtype that needs gradients. Nothing is computed; only
        operations written in Python run once (on zeros for a shape). ::

            print(mlp.explain((64, 256)))
        """
        self._update_groups()
        named: list[tuple[str, _C.Explanation]] = []
        if not example:
            for group, name in zip(self._groups, self._group_names(), strict=True):
                named.append((name, explain_last(group.module)))
            return Explanation(_C.join_explanations(named))
        with _disable_current_modes():
            tensors = example_tensors(self, example)
            device = tensors[0].device
            if device.type == "meta":
                places = [p.device for p in self.parameters() if p.device.type != "meta"]
                device = places[0] if places else default_device(None)
            runner = Explainer(
                dict(zip(map(id, self._groups), self._group_names(), strict=True)), device
            )
            self._forward_groups(tensors[0], tensors[1:], {}, runner)
        return Explanation(_C.join_explanations(runner.named))

    def _group_names(self) -> list[str]:
        """Where each group begins, by the key of its first module; nothing for the only group."""
        if len(self._groups) == 1:
            return [""]
        keys = {id(module): key for key, module in self._modules.items()}
        return [keys[id(g.ops[0] if g.ops else g.module)] for g in self._groups]

    def _resolve_kwargs(self, op_kwargs: Mapping[Any, dict[str, Any]] | None) -> dict[int, Any]:
        """Keyword arguments by identity of the operation or module they are for."""
        refuse_tracers(self, op_kwargs)
        if op_kwargs is not None and not isinstance(op_kwargs, Mapping):
            raise TypeError(
                "[Sequential] op_kwargs must map operations or their indices to dicts, got "
                f"{type(op_kwargs).__name__}"
            )
        out: dict[int, Any] = {}
        known = {id(m) for m in self}
        known |= {id(p) for m in self if isinstance(m, FusibleOperation) for p in basic_ops_of(m)}
        for key, kwargs in (op_kwargs or {}).items():
            target = self[key] if isinstance(key, int) else key
            if id(target) not in known:
                raise ValueError(
                    f"[Sequential] op_kwargs are for {type(target).__name__}, which is not one of "
                    "its operations"
                )
            if isinstance(target, FusedOperation):
                target = target.basic_ops[0]
            out[id(target)] = kwargs
        return out

    def _forward_groups(
        self,
        x: Any,
        extra_inputs: list[torch.Tensor],
        kwargs: dict[int, Any],
        explainer: Explainer | None = None,
    ) -> Any:
        wanted = self._count_extra_inputs()
        if len(extra_inputs) != wanted:
            refuse_tracers(self, extra_inputs)
            raise ValueError(f"[Sequential] takes {wanted} extra inputs, got {len(extra_inputs)}")
        extra_outputs: list[torch.Tensor] = []
        channels: dict[tuple[int, str], torch.Tensor] = {}
        for group in self._groups:
            if isinstance(group.module, Sequential):
                count = group.module._count_extra_inputs()
                taken, extra_inputs = extra_inputs[:count], extra_inputs[count:]
                if explainer is not None:
                    x = explainer.nested(group, x, taken)
                else:
                    x = group.module(x, *taken, **kwargs.get(id(group.module), {}))
                if isinstance(x, tuple):
                    x, extra_outputs = x[0], [*extra_outputs, *x[1:]]
                continue
            if not group.ops:
                if explainer is not None:
                    x = explainer.module(group, x)
                else:
                    x = group.module(x, **kwargs.get(id(group.module), {}))
                continue
            inputs = [
                channels[group.run, name] if name else extra_inputs.pop(0) for name in group.inputs
            ]
            part_kwargs: list[dict[str, Any]] = [{}]
            if kwargs:
                parts = [part for op in group.ops for part in basic_ops_of(op)]
                part_kwargs = [kwargs.get(id(part), {}) for part in parts]
            if explainer is not None:
                x = explainer.operations(group, x, inputs)
            else:
                x = group.call(x, inputs, part_kwargs)
            if isinstance(x, tuple):
                x, results = x[0], x[1:]
                for name, to_user, result in zip(
                    group.outputs, group.output_to_user, results, strict=True
                ):
                    if name:
                        channels[group.run, name] = result
                    if to_user:
                        extra_outputs.append(result)
        return (x, *extra_outputs) if extra_outputs else x

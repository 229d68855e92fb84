"""Which norm's output is the input of a layer's MLP, read from the layer's forward itself.

The forward is traced with its submodules as they are: nothing is computed, and no class is known by
its name.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.fx


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def keys(self, obj: torch.fx.Proxy) -> Any:
        return iter(())  # what a layer passes on as **kwargs


def norm_before(layer: torch.nn.Module, mlp: str) -> tuple[str | None, str]:
    """The child whose output goes to the child ``mlp`` and nowhere else; or None, and why."""
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    others = {p.name: None for p in parameters if p.kind in named}
    try:
        graph = _Tracer().trace(layer, concrete_args=others)
    except Exception as error:  # a forward may do anything
        reason = str(error).strip().splitlines()
        return None, f"the layer's forward cannot be traced: {reason[0] if reason else error!r}"
    calls = [node for node in graph.nodes if node.op == "call_module"]
    found = [node for node in calls if node.target == mlp]
    if len(found) != 1:
        return None, f"the layer calls it {len(found)} times"
    (call,) = found
    source = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if not isinstance(source, torch.fx.Node) or source.op != "call_module":
        return None, "its input does not come from a norm"
    name = str(source.target)
    if "." in name or len(source.args) != 1 or source.kwargs:
        return None, "its input does not come from a norm"
    if len(source.users) != 1 or sum(node.target == name for node in calls) != 1:
        return None, f"{name} is used elsewhere too"
    return name, ""

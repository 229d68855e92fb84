"""Explains the groups of a ``Sequential`` one after the other, on tensors without memory."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from .fuser import OperationFuser
from .fusible import FusibleOperation


def _without_memory(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def explain_last(module: Any) -> _C.Explanation:
    """The last call of a group."""
    if isinstance(module, OperationFuser):
        return module._explain(None, None)[0]
    if isinstance(module, FusibleOperation):
        fuser: OperationFuser = module._alone()
        return fuser._explain(None, None)[0]
    if hasattr(module, "explain"):
        explanation: _C.Explanation = module.explain()._explanation
        return explanation
    return _C.explain_module(type(module).__name__, "")


class Explainer:
    """Takes the place of the calls in a forward pass and collects what each group explains."""

    def __init__(self, names: dict[int, str], device: torch.device) -> None:
        self.named: list[tuple[str, _C.Explanation]] = []
        self._names = names
        self._device = device

    def operations(self, group: Any, x: Any, inputs: list[torch.Tensor]) -> Any:
        """Operations that are fused, or one that is called by itself."""
        module = group.module
        fuser = module if isinstance(module, OperationFuser) else module._alone()
        explanation, outputs = fuser._explain([x, *inputs], self._device)
        self.named.append((self._names[id(group)], explanation))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def nested(self, group: Any, x: Any, extra_inputs: list[torch.Tensor]) -> Any:
        """A Sequential inside."""
        inner = group.module
        inner._update_groups()
        names = dict(zip(map(id, inner._groups), inner._group_names(), strict=True))
        explainer = Explainer(names, self._device)
        out = inner._forward_groups(x, list(extra_inputs), {}, explainer)
        joined = _C.join_explanations(explainer.named)
        self.named.append((self._names[id(group)], joined))
        return out

    def module(self, group: Any, x: Any) -> Any:
        """Any other module: it runs on copies without memory of everything it holds."""
        module = group.module
        self.named.append((self._names[id(group)], _C.explain_module(type(module).__name__, "")))
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        twins = {name: _without_memory(tensor) for name, tensor in state.items()}
        try:
            return torch.func.functional_call(module, twins, (_without_memory(x),))
        except Exception as error:
            raise RuntimeError(
                f"explain: {type(module).__name__} does not run on tensors without memory "
                f"({error}); call the model once, then explain it"
            ) from error

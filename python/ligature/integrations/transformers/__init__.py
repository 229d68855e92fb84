"""Decoders of the transformers package with their MLPs, experts and norms computed by Ligature.

:func:`replace` changes a model in place; its checkpoints stay what they were::

    from transformers import AutoModelForCausalLM
    from ligature.integrations.transformers import replace

    model = AutoModelForCausalLM.from_pretrained(...)
    print(replace(model))

With this module imported, transformers has an implementation of experts named ``"ligature"``::

    model.set_experts_implementation("ligature")
"""

from .experts import register as _register
from .modules import GatedMLP, NormInMLP
from .optimizer_state import convert_optimizer_state
from .replacing import gradient_checkpointing_enable, replace
from .report import Left, Replaced, Report

__all__ = [
    "GatedMLP",
    "Left",
    "NormInMLP",
    "Replaced",
    "Report",
    "convert_optimizer_state",
    "gradient_checkpointing_enable",
    "replace",
]

_register()

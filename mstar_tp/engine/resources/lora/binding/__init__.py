"""Binds adapters to a model's own modules.

``walk`` builds a stage's spec from its modules, ``bind`` swaps them to their twins, ``families``
says what kinds there are.
"""

from mstar_tp.engine.resources.lora.binding.bind import bind, check_bound
from mstar_tp.engine.resources.lora.binding.walk import module_lora_spec

__all__ = ["bind", "check_bound", "module_lora_spec"]

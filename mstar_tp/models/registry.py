"""Architecture name, as config.json gives it, to the class that runs it."""

from __future__ import annotations

from collections.abc import Callable

from mstar_tp.common.module_names import AS_BUILT, CheckpointRules
from mstar_tp.layers.weights import Placement
from mstar_tp.models import llava, mixtral
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import ModelConfig
from mstar_tp.models.gemma3 import Gemma3ForCausalLM
from mstar_tp.models.llama import LlamaForCausalLM
from mstar_tp.models.llava import LlavaForConditionalGeneration
from mstar_tp.models.mistral import MistralForCausalLM
from mstar_tp.models.mixtral import MixtralForCausalLM
from mstar_tp.models.qwen2 import Qwen2ForCausalLM
from mstar_tp.models.qwen3 import Qwen3ForCausalLM
from mstar_tp.models.qwen3_moe import Qwen3MoeForCausalLM

MODELS: dict[str, Callable[[ModelConfig, Placement, int], CausalLM]] = {
    model.__name__: model
    for model in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        MixtralForCausalLM,
        Gemma3ForCausalLM,
        LlavaForConditionalGeneration,
    )
}

RULES: dict[str, CheckpointRules] = {
    LlavaForConditionalGeneration.__name__: llava.RULES,
    MixtralForCausalLM.__name__: mixtral.RULES,
}
"""Architecture -> how files spell its modules, where they spell them otherwise than the model."""
MODULES: dict[str, CheckpointRules] = {LlavaForConditionalGeneration.__name__: llava.MODULES}
"""Architecture -> what transformers calls its modules, where PEFT does not find them under ours."""


def rules_of(architecture: str) -> CheckpointRules:
    """The spellings of modules in files of this architecture, checkpoints and adapters."""
    return RULES.get(architecture, AS_BUILT)


def modules_of(architecture: str) -> CheckpointRules:
    """The name that PEFT finds a module under, by the module's own name."""
    return MODULES.get(architecture, AS_BUILT)

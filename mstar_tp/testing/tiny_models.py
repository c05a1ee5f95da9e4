"""Small random models and adapters on disk, made through transformers and PEFT.

Every family is covered with what makes it differ (biases, head norms, windows, two rotary bases)
set to values that matter: a weight that is dropped, transposed or scaled wrongly changes the
logits. Sizes are awkward on purpose: a vocabulary no rank count divides, and fewer key/value heads
than four ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe", "mixtral"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
MOE_FAMILIES: tuple[Family, ...] = ("qwen3_moe", "mixtral")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOE_TARGETS = (*TARGETS, "gate", "w1", "w2", "w3")
"""The targets with router and experts, as either family calls them.

PEFT adapts the stacked experts instead, and gate and up together with twice the rank."""

_COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN: dict[Family, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma3": {
        "tie_word_embeddings": True,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "tie_word_embeddings": False,
        "sliding_window": 8,
        "intermediate_size": 40,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}


def make_tiny_model(
    folder: str | Path,
    family: Family,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random model of ``family`` as a Hugging Face folder, no tokenizer; returns it.

    ``overrides`` are keys of the family's transformers config. The same arguments give the same
    weights. Greedy choices have clear margins: the head is wide enough for its top logits to stand
    apart.
    """
    model = build_tiny_model(family, seed, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def build_tiny_model(family: Family, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model that ``make_tiny_model`` saves, in float32 and eval mode."""
    import transformers

    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    }[family]
    config_class, model_class = (getattr(transformers, name) for name in names)
    config = config_class(**{**_COMMON, **_OWN[family], **overrides})
    model = model_class(config).eval()
    fill_parameters(model, seed)
    return model


def fill_parameters(model: Any, seed: int) -> None:
    """Draw every parameter in name order: none keeps a value that would hide its loss."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        with torch.no_grad():
            parameter.copy_(_value(name, noise, model.config))


def _value(name: str, noise: torch.Tensor, config: Any) -> torch.Tensor:
    if name.endswith("norm.weight"):
        # Gemma adds one to its norm weights itself. A tied head is narrow: the last norm makes up
        # for it.
        centre = 0.0 if config.model_type == "gemma3_text" else 1.0
        last = name == "model.norm.weight" and config.tie_word_embeddings
        return centre + 0.3 * noise + (12.0 if last else 0.0)
    if name.endswith(("layer_norm1.weight", "layer_norm2.weight")):
        return 1.0 + 0.3 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    if noise.dim() == 4:
        return noise / math.sqrt(math.prod(noise.shape[1:]))
    if "embed_tokens" in name or "lm_head" in name:
        # Small where tied: else the input token's own row wins every time and a text repeats one
        # token.
        return noise * (0.05 if config.tie_word_embeddings else 1.0)
    if "q_proj" in name or "k_proj" in name:
        # Sharp attention: what a token sees must matter.
        return 2 * noise / math.sqrt(noise.shape[-1])
    return noise / math.sqrt(noise.shape[-1])


def make_adapter(
    folder: str | Path,
    model_folder: str | Path,
    rank: int = 4,
    targets: tuple[str, ...] = TARGETS,
    seed: int = 0,
    *,
    strength: float = 0.5,
    **overrides: Any,
) -> Path:
    """Write a random PEFT LoRA adapter, A and B non-zero, of ``model_folder``'s model; returns it.

    ``strength`` is about the size of a delta against the output it is added to. ``overrides`` are
    keys of peft.LoraConfig (lora_alpha, use_rslora, rank_pattern …).
    """
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    settings = {"lora_alpha": 2 * rank, "task_type": "CAUSAL_LM", **overrides}
    config = peft.LoraConfig(r=rank, target_modules=list(targets), **settings)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" not in name and "lora_B" not in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        size = 1.0 if "lora_A" in name else strength / 2
        with torch.no_grad():
            parameter.copy_(size * noise / math.sqrt(parameter.shape[-1]))
    model.save_pretrained(str(folder))
    return Path(folder)

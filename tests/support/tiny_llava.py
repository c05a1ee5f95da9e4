"""A small random LLaVA on disk, with tokenizer, chat template and image processor, and adapters.

Sizes are awkward on purpose: pixels at the edges fill no patch, an inner layer of the tower is read
rather than its last, and a vocabulary no rank count divides.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from mstar_tp.testing.tiny_models import fill_parameters

IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", 3
IMAGE_SIZE, PATCH_SIZE = 30, 14
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
SPECIAL = ("<pad>", "<s>", "</s>", IMAGE_TOKEN)
VOCAB_SIZE = 263
"""Special tokens, one a byte, and three that no text makes."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""The chat template, as LLaVA's own: a message's images first, then its text."""
TARGETS = (
    *("patch_embedding", "out_proj", "fc1", "fc2", "linear_1", "linear_2"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Every linear of the tower, the projector and the decoder, and the patch convolution."""


def make_tiny_llava(
    folder: str | Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random LLaVA as a Hugging Face folder, ready to be served; returns it.

    ``overrides`` are keys of LlavaConfig. The same arguments give the same weights.
    """
    folder = Path(folder)
    build_tiny_llava(seed, **overrides).to(dtype).save_pretrained(folder)
    _write_tokenizer(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": IMAGE_SIZE},
        "crop_size": size,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def build_tiny_llava(seed: int = 0, **overrides: Any) -> Any:
    """The transformers model that ``make_tiny_llava`` saves, in float32 and eval mode."""
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    text = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    settings = {"image_token_index": IMAGE_TOKEN_ID, "tie_word_embeddings": False, **overrides}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **settings)
    model: Any = transformers.LlavaForConditionalGeneration(config)
    fill_parameters(model.eval(), seed)
    return model


def make_llava_adapter(
    folder: str | Path,
    model_folder: str | Path,
    rank: int = 4,
    targets: tuple[str, ...] = TARGETS,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random PEFT LoRA adapter, A and B non-zero, of a LLaVA; returns its folder.

    ``targets`` are ends of module names. ``overrides`` are keys of peft.LoraConfig.
    """
    import peft
    import transformers

    base = transformers.LlavaForConditionalGeneration.from_pretrained(
        model_folder, dtype=torch.float32
    )
    settings = {"lora_alpha": 2 * rank, **overrides}
    config = peft.LoraConfig(r=rank, target_modules=list(targets), **settings)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" not in name and "lora_B" not in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        size = 1.0 if "lora_A" in name else 0.25
        with torch.no_grad():
            parameter.copy_(size * noise / math.sqrt(math.prod(parameter.shape[1:])))
    model.save_pretrained(str(folder))
    return Path(folder)


def _write_tokenizer(folder: Path) -> None:
    """One token a byte: any text can be written and read."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

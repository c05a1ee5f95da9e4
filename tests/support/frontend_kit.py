"""Two small tokenizer folders, of the two kinds that models ship.

They are byte-level BPE, and pieces with byte fallback.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from mstar_tp.frontend.text.tokenizer import TextTokenizer

TEXT = [
    "The slot table is a plain data structure, and a test can run it ten thousand times.",
    "Über Straßen, naïve cafés, 東京の天気 and 🌍🌎🌏 cost more bytes than letters do.",
    "a,b,c d e f, stop! stopping stops; 12345 67890\n\n\tindented  twice",
]
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'tool' %}\n"
    "        {{- raise_exception('no tools here') }}\n"
    "    {% endif %}\n"
    "{{ bos_token }}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{% generation %}{{ eos_token }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    "{{ {'a': '<é>'} | tojson }}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level_folder(folder: Path, **config: Any) -> Path:
    """Byte-level BPE without any normalisation; ``config`` adds to tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _write(folder, tokenizer, config)


def byte_fallback_folder(folder: Path, **config: Any) -> Path:
    """Pieces with spaces as U+2581, bytes for what has no piece, and a start token."""
    letters = sorted({char for char in "".join(TEXT) if char.isascii() and char not in " \n\t"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    merges = [("t", "h"), ("▁", "a"), ("s", "t"), ("o", "p"), ("st", "op"), (",", "b")]
    vocab = {piece: id_ for id_, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _write(folder, tokenizer, config)


def encode_chat(
    tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]], **fields: Any
) -> tuple[int, ...]:
    """A chat's ids."""
    return tokenizer.encode(tokenizer.render_chat(messages, **fields), add_special_tokens=False)


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder

#!/usr/bin/env python3
"""Make the demo's model: a byte-level BPE tokenizer, a small Llama and four LoRA adapters.

    python scripts/make_demo_model.py OUT_DIR    (about 15 minutes on one core)

The adapters are trained with PEFT on the base as it is saved. OUT_DIR gets model/ (config, bfloat16
weights, tokenizer with its chat template), adapters/NAME/ and MANIFEST.json, which holds every
file's SHA-256 (demo_check.py reads it). Seeded: the same machine, packages and thread count give
the same files. The text is demo_corpus.py's, beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_corpus as corpus
from demo_check import write_manifest

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

SEED = 20
BASE_STEPS = 1400
VOCAB_SIZE = 1024
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IGNORE = -100
"""The label of a position that training does not score."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

ADAPTER_PLANS = {"pirate": (8, 130), "shouting": (8, 350), "rhyme": (6, 130), "robot": (4, 330)}
"""The rank and steps of each adapter.

Ranks differ on purpose: one batch then mixes them. Shouting has the most to learn (capitals share
no token with small letters), robot the smallest rank to do it with."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The length and learning rate of training."""

    steps: int
    peak_rate: float
    batch_tokens: int = 1600

    def rate(self, step: int) -> float:
        """Learning rate at ``step``: a short warm-up, then half a cosine down to a twentieth."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.peak_rate * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.peak_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


# ---- tokenizer


def train_tokenizer(out: Path) -> Tokenizer:
    """Train the BPE on text in every voice; write it as transformers lays a tokenizer out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(SEED)
    samplers = [corpus.Sampler(voice) for voice in corpus.VOICES]
    text: list[str] = []
    for _ in range(3000):
        example = rng.choice(samplers).draw(rng)
        text += [example.question, example.answer]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


# ---- examples


class ExampleStream:
    """Token ids and labels of examples in one voice, drawn for ever.

    Some are written as ``Question: … Answer: …``, and with ``plain`` some are running text in any
    voice, so that the completions route has something to continue.
    """

    def __init__(self, tokenizer: Tokenizer, voice: str, *, plain: bool) -> None:
        self._tokenizer = tokenizer
        self._sampler = corpus.Sampler(voice)
        self._plain = plain
        end = tokenizer.token_to_id(END)
        assert end is not None, "the tokenizer was trained with its special tokens"
        self._end = end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _passage(self, rng: random.Random) -> tuple[list[int], list[int]]:
        ids = [*self._ids(corpus.passage(rng)), self._end]
        return ids, list(ids)

    def _asked(self, form: str, space: str, rng: random.Random) -> tuple[list[int], list[int]]:
        """One or (rarely) two turns; only answers are scored."""
        ids: list[int] = []
        labels: list[int] = []
        for _ in range(2 if rng.random() < 0.1 else 1):
            example = self._sampler.draw(rng)
            lead = "\n" if ids else ""
            prompt = self._ids(lead + form.format(example.question))
            answer = [*self._ids(space + example.answer), self._end]
            ids += prompt + answer
            labels += [IGNORE] * len(prompt) + answer
        return ids, labels

    def draw(self, rng: random.Random) -> tuple[list[int], list[int]]:
        roll = rng.random()
        if self._plain and roll < 0.15:
            return self._passage(rng)
        if rng.random() < 0.15:
            return self._asked("Question: {}\nAnswer:", " ", rng)
        system = f"{START}system\nYou are helpful.{END}\n" if rng.random() < 0.1 else ""
        return self._asked(f"{system}{START}user\n{{}}{END}\n{START}assistant\n", "", rng)


def batches(
    stream: ExampleStream, schedule: Schedule, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``schedule.steps`` pairs of int64 ``[rows, length]``: ids and labels, right-padded.

    Examples are drawn in lots and sorted by length, so that little of a batch is padding. Padding
    needs no attention mask: it stands on the right, where causal attention never looks.
    """
    import torch

    rng = random.Random(seed)
    done = 0
    while done < schedule.steps:
        lot = sorted((stream.draw(rng) for _ in range(1024)), key=lambda pair: len(pair[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in lot:
            if len(pair[0]) * (len(groups[-1]) + 1) > schedule.batch_tokens:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in groups[: schedule.steps - done]:
            width = max(len(ids) for ids, _ in group)
            rows = [ids + [0] * (width - len(ids)) for ids, _ in group]
            marks = [labels + [IGNORE] * (width - len(labels)) for _, labels in group]
            yield torch.tensor(rows), torch.tensor(marks)
            done += 1


# ---- training


def fit(model: Any, stream: ExampleStream, schedule: Schedule, *, seed: int, label: str) -> None:
    """Train every parameter that wants a gradient, in float32 on the CPU, showing progress."""
    import torch
    from rich.progress import Progress

    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.97), weight_decay=0.01)
    model.train()
    loss_shown = float("nan")
    with Progress() as progress:
        task = progress.add_task(label, total=schedule.steps)
        for step, (ids, labels) in enumerate(batches(stream, schedule, seed)):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 20 == 0 or step == schedule.steps - 1:
                loss_shown = float(loss)
                progress.update(task, description=f"{label}  loss {loss_shown:.3f}")
            if not progress.console.is_terminal and step % 100 == 0:
                print(
                    f"{label}: step {step} of {schedule.steps}, loss {loss_shown:.3f}", flush=True
                )
            progress.advance(task)
    model.eval()
    print(f"{label}: {schedule.steps} steps, last loss {loss_shown:.4f}", flush=True)


def train_base(out: Path, tokenizer: Tokenizer, schedule: Schedule) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model: Any = LlamaForCausalLM(config)
    print(f"base: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    fit(model, ExampleStream(tokenizer, "base", plain=True), schedule, seed=SEED, label="base")
    model.to(torch.bfloat16).save_pretrained(out)


def train_adapter(
    out: Path, model_dir: Path, tokenizer: Tokenizer, name: str, rank: int, schedule: Schedule
) -> None:
    """Train an adapter on the base as saved, in bfloat16; save it in bfloat16 too."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    torch.manual_seed(SEED)
    base = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    stream = ExampleStream(tokenizer, name, plain=False)
    fit(model, stream, schedule, seed=SEED + 1, label=name)
    model.save_pretrained(str(out))
    weights = {
        key: w.to(torch.bfloat16) for key, w in load_file(out / "adapter_model.safetensors").items()
    }
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = json.loads((out / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = (
        "demo"  # the training folder's own path means nothing elsewhere
    )
    settings["target_modules"] = sorted(
        settings["target_modules"]
    )  # PEFT writes a set in any order
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (out / "README.md").unlink(missing_ok=True)


def train_all(out: Path, base: Schedule, adapter_share: float) -> None:
    """Train in a scratch folder; put it at ``out`` when whole, so nothing is left half made."""
    import torch

    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".demo-") as scratch:
        made = Path(scratch) / "made"
        tokenizer = train_tokenizer(made / "model")
        train_base(made / "model", tokenizer, base)
        for name, (rank, steps) in ADAPTER_PLANS.items():
            schedule = Schedule(steps=max(1, int(adapter_share * steps)), peak_rate=4e-3)
            folder = made / "adapters" / name
            train_adapter(folder, made / "model", tokenizer, name, rank, schedule)
        for path in made.rglob("*.safetensors"):
            path.chmod(0o644)  # safetensors writes files that only their owner may read
        write_manifest(made)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)


# ---- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write; what it held is replaced")
    parser.add_argument(
        "--steps", type=float, default=1.0, help="share of the usual steps to train"
    )
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    base = Schedule(steps=max(1, int(args.steps * BASE_STEPS)), peak_rate=3e-3)
    train_all(args.out, base, args.steps)
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

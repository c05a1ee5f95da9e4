"""The world of a chaos run: a tiny model, weights for its adapters, and the right answers.

The answers come from transformers and PEFT, which share nothing with the server. A prompt is used
only where every token's lead over the next best is clear, so that the order in which floats are
added can change no text.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar_tp.testing.tiny_models import TARGETS, make_adapter, make_tiny_model

if TYPE_CHECKING:
    import torch

VOCABULARY = 211
PROMPT_LENGTHS = (5, 17, 41)
MAX_TOKENS = 24
"""The most tokens of an answer."""
CLEAR_LEAD = 2e-3
"""Between the two best logits; sums in another order differ by some 1e-5."""
WEIGHTS_NAME = "adapter_model.safetensors"
NUM_CONFIGURED = 3
"""Adapters that the server starts with; the others are loaded while it runs."""
BASE = "base"
"""The base model's name, and the name of its weights."""
KINDS = (
    (2, TARGETS), (4, ("q_proj", "v_proj")), (8, TARGETS), (3, ("down_proj", "k_proj")),
)  # fmt: skip
"""The rank and modules of the adapters' weights, in turn.

Those of one kind have files of one size and header. Modules that the small ones leave out must not
be left over from others in their slot."""


@dataclass(frozen=True, slots=True)
class World:
    """``answers[weights][prompt]`` are the ids of a greedy answer of MAX_TOKENS tokens."""

    folder: Path
    model: Path
    prompts: tuple[tuple[int, ...], ...]
    answers: dict[str, tuple[tuple[int, ...], ...]]

    @property
    def weights(self) -> list[str]:
        """Names of the adapters' weights, without the base's."""
        return [name for name in self.answers if name != BASE]

    @property
    def live(self) -> Path:
        """Folder of the adapters that are served, and damaged."""
        return self.folder / "live"

    def text(self, weights: str, prompt: int, num_tokens: int) -> str:
        return "".join(word(id_) for id_ in self.answers[weights][prompt][:num_tokens])

    def library(self, weights: str) -> Path:
        """The adapter as it was made; nothing ever harms it."""
        return self.folder / "library" / weights

    def like(self, weights: str) -> str:
        """Other weights whose file has the same size and header."""
        names = self.weights
        return names[(names.index(weights) + len(KINDS)) % len(names)]

    def copy(self, weights: str, folder: Path) -> Path:
        """A fresh copy of ``weights`` in ``folder``, in place of what is there."""
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(self.library(weights), folder))


def word(id_: int) -> str:
    """The text of one token: none is part of another."""
    return f" w{id_:03}"


def make_files(folder: Path, *, num_weights: int, seed: int) -> Path:
    """Write model, tokenizer and adapters below ``folder``; the model's folder."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # No end token: every answer has the length it was asked for.
    model = make_tiny_model(
        folder / "model", "llama", seed=seed, vocab_size=VOCABULARY, eos_token_id=None
    )
    _write_tokenizer(model)
    for i in range(num_weights):
        path = folder / "library" / f"weights-{i}"
        rank, targets = KINDS[i % len(KINDS)]
        make_adapter(path, model, rank, targets, seed=seed + i, strength=2.0)
    (folder / "live").mkdir()
    for i in range(NUM_CONFIGURED):
        shutil.copytree(folder / "library" / f"weights-{i}", folder / "live" / f"configured-{i}")
    return model


def configured(folder: Path) -> dict[Path, str]:
    """Folders of the adapters that the server starts with -> the weights there."""
    return {folder / "live" / f"configured-{i}": f"weights-{i}" for i in range(NUM_CONFIGURED)}


def make_world(folder: Path, *, num_prompts: int, seed: int) -> World:
    """Work out every answer to ``num_prompts`` prompts, of the files that ``make_files`` wrote."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    groups = [
        torch.randint(3, VOCABULARY, (num_prompts, length), generator=generator)
        for length in PROMPT_LENGTHS
    ]
    # Prompts begin alike by threes, so that kept pages are leased all the time.
    _, middle, long = groups
    for group, length in ((middle, PROMPT_LENGTHS[0]), (long, PROMPT_LENGTHS[1] + 13)):
        group[:, :length] = group[torch.arange(num_prompts) // 3 * 3, :length]
    candidates = [tuple(ids) for group in groups for ids in group.tolist()]
    clear = torch.ones(len(candidates), dtype=torch.bool)
    found: dict[str, list[list[int]]] = {}
    for name, network in _networks(folder):
        results = [_greedy(network, group) for group in groups]
        found[name] = torch.cat([ids for ids, _ in results]).tolist()
        clear &= torch.cat([lead for _, lead in results]) > CLEAR_LEAD
    kept = [i for i in range(len(candidates)) if clear[i]]
    kept = sorted(kept, key=lambda i: (i % num_prompts, i))[:num_prompts]
    if len(kept) < num_prompts:
        raise RuntimeError(f"only {len(kept)} of {len(candidates)} prompts have clear answers")
    answers = {name: tuple(tuple(ids[i]) for i in kept) for name, ids in found.items()}
    return World(folder, folder / "model", tuple(candidates[i] for i in kept), answers)


def _write_tokenizer(model: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    words = {word(i): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=word(0)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))


def _networks(folder: Path) -> Iterator[tuple[str, Any]]:
    """The base and every adapter on it, as transformers and PEFT run them."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    ).eval()
    yield BASE, base
    network = None
    for path in sorted((folder / "library").iterdir(), key=lambda p: int(p.name.split("-")[1])):
        if network is None:
            network = peft.PeftModel.from_pretrained(base, str(path), adapter_name=path.name)
            network.eval()
        else:
            network.load_adapter(str(path), adapter_name=path.name)
        network.set_adapter(path.name)
        yield path.name, network


def _greedy(network: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy answers [prompts, MAX_TOKENS] to prompts of one length, and each one's least lead."""
    import torch

    start, leads = ids.shape[1], []
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            best = network(input_ids=ids, use_cache=False).logits[:, -1].topk(2)
            leads.append(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, start:], torch.stack(leads).amin(dim=0)

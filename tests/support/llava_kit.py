"""Prompts with images, and what transformers + PEFT say to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from mstar_tp.models.config.families import load_model_config
from mstar_tp.wire.values import ImageInput, SamplingParams
from support.tiny_llava import IMAGE_SIZE, IMAGE_TOKEN_ID, TOKENS_PER_IMAGE

TOLERANCE = 1e-4
"""The tolerance as a part of the largest logit: float32 sums in another order on each side."""
NUM_DECODED = 3
PARAMS = SamplingParams(max_tokens=NUM_DECODED + 1, temperature=0, logprobs=1 << 20)

Part = int | str
"""A part of a prompt: so many tokens of text, or an image by its name."""


def pixels_of(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    shape = (3, IMAGE_SIZE, IMAGE_SIZE)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@dataclass
class Case:
    """One row: its adapter, its prompt, the tokens fed after it and the logits after each."""

    parts: Sequence[Part]
    name: str | None = None
    prompt: list[int] = field(default_factory=list)
    images: list[ImageInput] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.parts))
        for part in self.parts:
            if isinstance(part, int):
                drawn = torch.randint(4, 260, (part,), generator=generator)
                self.prompt += drawn.tolist()
                continue
            image = ImageInput(
                start=len(self.prompt),
                num_tokens=TOKENS_PER_IMAGE,
                pixels=pixels_of(part).numpy().tobytes(),
            )
            self.images.append(image)
            self.prompt += [IMAGE_TOKEN_ID] * TOKENS_PER_IMAGE

    @property
    def pixels(self) -> torch.Tensor | None:
        names = [part for part in self.parts if isinstance(part, str)]
        return torch.stack([pixels_of(name) for name in names]) if names else None


def base_model(folder: Path) -> Any:
    return transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def expect(cases: Sequence[Case], model: Any, folder: Path) -> None:
    """Fill in what ``model`` answers to each case."""
    vision = load_model_config(folder).vision
    assert vision is not None
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (vision.pixels.mean, vision.pixels.std))
    for case in cases:
        given = {}
        if case.pixels is not None:
            given["pixel_values"] = (case.pixels / 255 - mean) / std
        with torch.no_grad():
            for _ in range(NUM_DECODED):
                ids = torch.tensor([[*case.prompt, *case.fed]])
                logits = model(input_ids=ids, **given).logits[0, -1]
                case.logits.append(logits)
                case.fed.append(int(logits.argmax()))


def assert_close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    worst = float((got - wanted).abs().max() / wanted.abs().max())
    assert worst < TOLERANCE, f"{what}: off by {worst:.2e}"

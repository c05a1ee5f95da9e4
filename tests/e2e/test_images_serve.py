"""Promise: a client of OpenAI's API sends images and gets the answers that transformers gives; one
that cannot be read is refused, and nobody else notices.

One real server of two ranks for all of it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_llava import IMAGE_SIZE, make_tiny_llava

NUM_TOKENS = 5
FLAGS = ("--tp", "2", "--device", "cpu", "--threads", "1", "--dtype", "float32")
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llava(tmp_path_factory.mktemp("llava"), 6)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with Server(str(folder), *FLAGS, "--served-model-name", "base") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def picture(seed: int, width: int = 50, height: int = 40) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def part(image: Image.Image) -> dict[str, Any]:
    out = io.BytesIO()
    image.save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


class Reference:
    """transformers' own processor and model."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.processor = transformers.LlavaProcessor(
            image_processor=CLIPImageProcessorPil(
                size={"shortest_edge": IMAGE_SIZE}, crop_size=SQUARE
            ),
            tokenizer=self.tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=self.tokenizer.chat_template,
        )
        self.model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()

    def answer(self, images: list[Image.Image]) -> str:
        content = [TEXT, *({"type": "image"} for _ in images)]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        given = self.processor(
            text=[prompt], images=images or None, add_special_tokens=False, return_tensors="pt"
        )
        with torch.no_grad():
            out = self.model.generate(
                **given, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        text: str = self.tokenizer.decode(out[0, -NUM_TOKENS:], skip_special_tokens=True)
        return text


def ask(client: openai.OpenAI, parts: list[Any], **how: Any) -> Any:
    messages: Any = [{"role": "user", "content": parts}]
    settings = {
        "model": "base",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "extra_body": {"min_tokens": NUM_TOKENS},
    }
    return client.chat.completions.create(messages=messages, **{**settings, **how})


def test_images_are_answered_as_transformers_does_and_bad_ones_refused(
    client: openai.OpenAI, folder: Path
) -> None:
    reference = Reference(folder)
    first, second = picture(1), picture(2, 9, 200)
    wanted = {count: reference.answer([first, second][:count]) for count in (0, 1, 2)}
    assert len(set(wanted.values())) == 3
    parts = [TEXT, part(first), part(second)]
    for count, text in wanted.items():
        assert ask(client, parts[: count + 1]).choices[0].message.content == text
    choices = ask(client, parts, n=3).choices
    assert [choice.message.content for choice in choices] == [wanted[2]] * 3
    events = ask(client, parts[:2], stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == wanted[1]
    for url, said in (
        ("https://example.com/a.png", "fetches nothing"),
        ("data:image/png;base64,AAAA", "is not one of"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"image 2: .*{said}"):
            ask(client, [part(first), {"type": "image_url", "image_url": {"url": url}}])
    with pytest.raises(openai.BadRequestError, match="name 2 images once they are laid out"):
        ask(client, [{"type": "text", "text": "an <image>"}, part(first)])
    assert ask(client, [TEXT]).choices[0].message.content == wanted[0]

"""Promise: a client of OpenAI's API sends images and gets the answers that transformers and PEFT
give; one that cannot be read is refused, and nobody else notices; a request with images outlives
the ranks that ran it.

One real server of two ranks for all of it.
"""

from __future__ import annotations

import base64
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import peft
import pytest
import torch
import transformers
from PIL import Image
from support.tiny_llava import IMAGE_SIZE, make_llava_adapter, make_tiny_llava
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mstar_tp.testing.server import Server

NUM_TOKENS = 5
FLAGS = ("--tp", "2", "--device", "cpu", "--threads", "1", "--dtype", "float32")
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llava(tmp_path_factory.mktemp("llava"), 6)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava_adapter(tmp_path_factory.mktemp("adapters") / "all", folder, seed=1)


@pytest.fixture(scope="module")
def server(folder: Path, adapter: Path) -> Iterator[Server]:
    names = ("--served-model-name", "base", "--lora", f"tuned={adapter}", "--max-loras", "2")
    with Server(str(folder), *FLAGS, *names) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def picture(seed: int, width: int = 50, height: int = 40) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def part(image: Image.Image) -> dict[str, Any]:
    out = io.BytesIO()
    image.save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


class Reference:
    """transformers' own processor and model, with PEFT's adapter where one is given."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
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
        if adapter is not None:
            self.model = peft.PeftModel.from_pretrained(self.model, str(adapter)).eval()

    def answer(self, images: list[Image.Image], num_tokens: int = NUM_TOKENS) -> str:
        content = [TEXT, *({"type": "image"} for _ in images)]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        given = self.processor(
            text=[prompt], images=images or None, add_special_tokens=False, return_tensors="pt"
        )
        with torch.no_grad():
            out = self.model.generate(
                **given, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        text: str = self.tokenizer.decode(out[0, -num_tokens:], skip_special_tokens=True)
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
    with pytest.raises(openai.BadRequestError, match="that a request may send: lower n"):
        ask(client, [part(Image.new("RGB", (2, 2)))] * 98, n=128)
    for count in (1, 0):
        with pytest.raises(openai.BadRequestError, match=f"name {count + 1} images once they are"):
            ask(client, [{"type": "text", "text": "an <image>"}, part(first)][: count + 1])
    assert ask(client, [TEXT]).choices[0].message.content == wanted[0]


def test_an_adapter_of_both_nodes_answers_as_peft_does_and_figures_name_the_nodes(
    server: Server, client: openai.OpenAI, folder: Path, adapter: Path
) -> None:
    reference = Reference(folder, adapter)
    image = picture(1)
    for parts, images in (([TEXT, part(image)], [image]), ([TEXT], [])):
        answer = ask(client, parts, model="tuned").choices[0].message.content
        assert answer == reference.answer(images)
    digest = client.models.retrieve("tuned").to_dict()["digest"]
    assert re.fullmatch("language=[0-9a-f]{32},vision=[0-9a-f]{32}", str(digest))
    stats = httpx.get(f"{server.url}/metrics").text
    for stage in ("vision", "language"):
        assert f'mstar_tp_cpu_cache_adapters{{rank="1",stage="{stage}"}} 1.0' in stats
    state = httpx.get(f"{server.url}/debug/state").json()["ranks"][0]
    (other,) = state["other_stages"]
    assert other["stage"] == "vision"
    for slots in (state["slots"], other["slots"]):
        assert slots[0]["adapter"]["name"] == "tuned"


def test_a_request_with_images_goes_on_when_a_rank_is_killed(
    server: Server, client: openai.OpenAI, folder: Path, adapter: Path
) -> None:
    image, count = picture(4), 80
    wanted = Reference(folder, adapter).answer([image], count)
    how: dict[str, Any] = {"max_tokens": count, "extra_body": {"min_tokens": count}}
    events = ask(client, [TEXT, part(image)], model="tuned", stream=True, **how)
    texts = [next(events).choices[0].delta.content or ""]
    os.kill(_rank(1, server), signal.SIGKILL)
    texts += [event.choices[0].delta.content or "" for event in events]
    assert "".join(texts) == wanted


def _rank(rank: int, server: Server) -> int:
    """The process of one of the server's ranks, a child of a child of its own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            name = (place / "comm").read_text().strip()
            parents = [_parent(place), _parent(Path("/proc") / str(_parent(place)))]
        except OSError:
            continue
        if name == f"mstar-rank{rank}" and server.process.pid in parents:
            found.append(int(place.name))
    (pid,) = found
    return pid


def _parent(place: Path) -> int:
    return int((place / "stat").read_text().rpartition(")")[2].split()[1])

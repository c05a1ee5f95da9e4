"""Promise: prompts are the ids that transformers would make of them, without transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import TEMPLATE, TEXT, byte_fallback_folder, byte_level_folder

from mstar_tp.errors import CheckpointError, RequestError
from mstar_tp.frontend.tokenizer import load_tokenizer

TEXTS = [*TEXT, "", " leading", "trailing ", "<s>written</s> out <|user|>", "\x00 and é\u0301"]
CHAT = [
    {"role": "user", "content": "  Hello, world "},
    {"role": "assistant", "content": "stop <é>"},
]
Make = Callable[..., Path]


def _theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"extra_special_tokens": ["e", ","]},
    ],
)
def test_ids_and_texts_are_those_of_transformers(
    tmp_path: Path, make: Make, config: dict[str, Any]
) -> None:
    folder = make(tmp_path, **config)
    ours, theirs = load_tokenizer(folder), _theirs(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert list(ours.encode(text)) == ids
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert list(ours.encode(text, add_special_tokens=False)) == bare
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("how", ["file", "config", "named"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_render_as_transformers_renders_them(tmp_path: Path, how: str, prompt: bool) -> None:
    config: dict[str, Any] = {}
    if how == "config":
        config = {"chat_template": TEMPLATE}
    elif how == "named":
        named = {"default": TEMPLATE, "tool_use": "wrong"}
        config = {"chat_template": [{"name": k, "template": v} for k, v in named.items()]}
    folder = byte_level_folder(tmp_path, **config)
    if how == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours, theirs = load_tokenizer(folder), _theirs(folder)
    wanted = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(CHAT, add_generation_prompt=prompt) == wanted
    ids = theirs(wanted, add_special_tokens=False)["input_ids"]
    assert list(ours.encode_chat(CHAT, add_generation_prompt=prompt)) == ids


@pytest.mark.parametrize("last", ["stop here", "spaces at the end  ", "  before"])
@pytest.mark.parametrize("trim", [True, False])
def test_a_continued_message_ends_where_transformers_ends_it(
    tmp_path: Path, last: str, trim: bool
) -> None:
    template = TEMPLATE if trim else TEMPLATE.replace(" | trim", "")
    folder = byte_level_folder(tmp_path, chat_template=template)
    chat = [*CHAT, {"role": "assistant", "content": last}]
    wanted = _theirs(folder).apply_chat_template(
        chat, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    ours = load_tokenizer(folder)
    text = ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == wanted


def test_a_model_without_a_template_refuses_chats_and_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path))
    with pytest.raises(RequestError, match="chat_template"):
        tokenizer.encode_chat(CHAT)


def test_what_a_template_refuses_names_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(RequestError, match="no tools here") as caught:
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
    ],
)
def test_templates_reach_no_python_and_change_nothing(tmp_path: Path, attack: str) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, chat_template=attack))
    with pytest.raises(RequestError, match="messages"):
        tokenizer.encode_chat(CHAT)


def test_a_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_the_frontend_imports_no_torch() -> None:
    code = (
        "import pkgutil, importlib, sys, mstar_tp.frontend as frontend, mstar_tp.wire.channels\n"
        "for module in pkgutil.iter_modules(frontend.__path__):\n"
        "    importlib.import_module(f'mstar_tp.frontend.{module.name}')\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr

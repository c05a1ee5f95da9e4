"""Promise: prompts are the ids that transformers would make of them, without transformers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.frontend_kit import (
    TEMPLATE,
    TEXT,
    byte_fallback_folder,
    byte_level_folder,
    encode_chat,
)
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from mstar_tp.common.errors import CheckpointError, RequestError
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.text.tokenizer import load_tokenizer

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
    assert list(encode_chat(ours, CHAT, add_generation_prompt=prompt)) == ids


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
        encode_chat(tokenizer, CHAT)


def test_what_a_template_refuses_names_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(RequestError, match="no tools here") as caught:
        encode_chat(tokenizer, [{"role": "tool", "content": "x"}])
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
        encode_chat(tokenizer, CHAT)


def test_a_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_the_frontend_imports_no_torch() -> None:
    code = (
        "import pkgutil, importlib, sys, mstar_tp.frontend as frontend, mstar_tp.wire.channels\n"
        "for module in pkgutil.walk_packages(frontend.__path__, 'mstar_tp.frontend.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_a_long_text_gets_the_ids_of_the_plain_call(
    tmp_path: Path, make: Make, config: dict[str, Any]
) -> None:
    folder = make(tmp_path, **config)
    ours = load_tokenizer(folder)
    text = " ".join(TEXTS) * 40
    for add in (True, False):
        plain = ours._tokenizer.encode(text, add_special_tokens=add).ids
        assert list(ours.encode(text, add)) == plain


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path))
    text, ticks, stop = " ".join(TEXTS) * 1000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)  # gives the interpreter away

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    # Nobody loses the interpreter by force: the other thread runs only when it is given away.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        moved = False
        for _ in range(20):
            before = ticks
            tokenizer.encode(text)
            moved = ticks > before
            if moved:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert moved


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_a_text_that_no_context_holds_is_refused_untokenized(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, chat_template=TEMPLATE)
    tokenizer = load_tokenizer(folder)
    longest = max(map(len, tokenizer._tokenizer.get_vocab()))
    just = "x" * (64 * longest)
    with pytest.raises(ApiError, match=r"prompt: has [0-9]+ tokens, and the model's context is 64"):
        tokenizer.encode(just, max_tokens=64)
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    with pytest.raises(ApiError, match=f"{len(just) + 1} characters.* 64 tokens") as caught:
        tokenizer.encode(just + "x", max_tokens=64)
    assert caught.value.status == 400 and caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match="context of 64 tokens") as caught:
        tokenizer.encode(just + "x", max_tokens=64, param="messages")
    assert caught.value.param == "messages"


def _steps(**changes: Any) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        for name, value in changes.items():
            setattr(tokenizer, name, value)

    return change


DENSE = {
    "composed": (_steps(normalizer=normalizers.NFC()), "\u03b1\u0313\u0300\u0345"),
    "collapsed": (_steps(normalizer=normalizers.Replace(Regex(" +"), " ")), " " * 500),
    "shortened": (_steps(normalizer=normalizers.Replace("abcdefgh" * 8, "x")), "abcdefgh" * 8),
    "stripped": (_steps(normalizer=normalizers.Strip()), " "),
    "removed": (
        _steps(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        ),
        " " * 500,
    ),
    "unknown bytes": (_steps(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "東" * 500),
    "beside an added token": (
        lambda tokenizer: tokenizer.add_special_tokens(
            [AddedToken("<|sep|>", lstrip=True, normalized=False)]
        ),
        " " * 500 + "<|sep|>",
    ),
    "a long added token": (
        lambda tokenizer: tokenizer.add_tokens([AddedToken("long" * 40, normalized=False)]),
        "long" * 40,
    ),
    "an added token that normalizing lengthens": (
        lambda tokenizer: (
            _steps(normalizer=normalizers.Replace("q", "qqqqqqqqqq"))(tokenizer),
            tokenizer.add_tokens([AddedToken("q" * 20, normalized=True)]),
        ),
        "q" * 20,
    ),
}


@pytest.mark.parametrize("how", DENSE)
def test_no_text_that_fits_is_refused_for_its_length(tmp_path: Path, how: str) -> None:
    change, unit = DENSE[how]
    folder = byte_level_folder(tmp_path)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(raw)
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    text = unit * 200
    count = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, max_tokens=count)) == count

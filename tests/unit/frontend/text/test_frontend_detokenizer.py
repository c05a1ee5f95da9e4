"""Promise: an answer's pieces, however its tokens fall, join to the whole text cut at its first
stop string, and no piece shows half a character (cases D05 and D07)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.frontend_kit import TEXT, byte_fallback_folder, byte_level_folder

from mstar_tp.frontend.api.answers import Answer, AnswerOptions
from mstar_tp.frontend.text.detokenizer import REPLACEMENT
from mstar_tp.frontend.text.stop_strings import StopStrings
from mstar_tp.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from mstar_tp.wire.reports import Token

KINDS = {"bytes": byte_level_folder, "fallback": byte_fallback_folder}


@functools.cache
def _tokenizer(kind: str) -> TextTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(KINDS[kind](Path(folder)))


def _byte_token(kind: str, byte: int) -> int:
    """The token that is this one byte."""
    tokenizer = _tokenizer(kind)
    first = range(tokenizer.vocab_size)
    found = [token for token in first if tokenizer.token_bytes(token) == bytes([byte])]
    return found[0]


def _pieces(kind: str, tokens: list[int], **options: object) -> tuple[list[str], str | None]:
    """What each token adds; the last comes with the length limit unless a stop string is first."""
    prompt = _tokenizer(kind).encode("Say:")
    answer = Answer(
        _tokenizer(kind).detokenizer(prompt),
        AnswerOptions(**options),  # type: ignore[arg-type]
    )
    pieces = []
    for place, token in enumerate(tokens):
        finish = "length" if place == len(tokens) - 1 else None
        pieces.append(answer.push(Token(rid=0, token=token, finish=finish)).text)
        if answer.finish is not None:
            break
    return pieces, answer.finish


def _cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """By trying every end: the first stop string to be complete, the longest of those."""
    for end in range(len(text) + 1):
        fitting = [stop for stop in stops if text[:end].endswith(stop)]
        if fitting:
            return text[: end if include else end - max(map(len, fitting))], True
    return text, False


@given(
    kind=st.sampled_from(sorted(KINDS)),
    text=st.one_of(st.text(max_size=12), st.sampled_from(TEXT)),
    stops=st.lists(
        st.one_of(st.text("abc,", min_size=1, max_size=4), st.text(min_size=1, max_size=3)),
        max_size=3,
    ),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_text_cut_at_its_first_stop_string(
    kind: str, text: str, stops: list[str], include: bool
) -> None:
    tokenizer = _tokenizer(kind)
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    prompt = tokenizer.encode("Say:")
    whole = tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
    wanted, stopped = _cut(whole, tuple(stops), include)
    pieces, finish = _pieces(kind, tokens, stops=tuple(stops), include_stop=include)
    assert "".join(pieces) == wanted
    if tokens:
        assert finish == ("stop" if stopped else "length")
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_tokens_at_all_decode_as_the_tokenizer_decodes_them(data: st.DataObject) -> None:
    tokenizer = _tokenizer("bytes")
    ids = st.integers(min_value=0, max_value=tokenizer.vocab_size + 2)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=20))
    assert "".join(_pieces("bytes", tokens)[0]) == tokenizer.decode(tokens)


@given(
    text=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_where_text_is_split_never_changes_the_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cutter = StopStrings(tuple(stops))
    shown, rest, stopped = "", text, False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = cutter.push(rest[:size])
        shown, rest = shown + piece, rest[size:]
    if not stopped:
        shown += cutter.finish()
    assert (shown, stopped) == _cut(text, tuple(stops), False)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_stop_string_over_token_borders_leaks_nothing(kind: str) -> None:
    tokens = [_byte_token(kind, byte) for byte in b"a,b,cd"]
    assert _pieces(kind, tokens, stops=("b,c",)) == (["a", ",", "", "", ""], "stop")
    assert "".join(_pieces(kind, tokens, stops=("b,c",), include_stop=True)[0]) == "a,b,c"
    # The start of a stop string that never ends is shown at the end.
    assert "".join(_pieces(kind, tokens[:4], stops=("b,c",))[0]) == "a,b,"
    assert _pieces(kind, tokens[:4], stops=("b,c" * 9,))[1] == "length"


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    ("raw", "pieces"),
    [
        (b"\xc4\x8f", ["", "\u010f"]),
        (b"\xf0\x9f\x8c", ["", "", REPLACEMENT]),
        (b"\xc4 x", ["", REPLACEMENT + " ", "x"]),
        (b"a\xff!", ["a", REPLACEMENT, "!"]),
    ],
)
def test_characters_wait_for_their_last_byte(kind: str, raw: bytes, pieces: list[str]) -> None:
    if kind == "fallback" and b" " in raw:
        raw = raw.replace(b" ", b"!")
        pieces = [piece.replace(" ", "!") for piece in pieces]
    assert _pieces(kind, [_byte_token(kind, byte) for byte in raw])[0] == pieces


def test_stop_strings_wait_until_the_least_number_of_tokens_is_out() -> None:
    tokens = [_byte_token("bytes", byte) for byte in b"abab"]
    assert "".join(_pieces("bytes", tokens, stops=("b",), min_tokens=2)[0]) == "aba"


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    tokenizer = _tokenizer("bytes")
    tokens = tokenizer.encode("<s>a</s>b")
    for skip, wanted in ((True, "ab"), (False, "<s>a</s>b")):
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip)
        assert "".join(map(detokenizer.push, tokens)) + detokenizer.finish() == wanted

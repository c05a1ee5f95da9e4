"""The model folder's tokenizer and chat template, without transformers (and so without torch).

Encoding may run on any thread; the rest is read-only after construction.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken

from mstar_tp.common.confined_files import read_file
from mstar_tp.common.env import tokenize_on_own_thread
from mstar_tp.common.errors import CheckpointError
from mstar_tp.frontend.api.api_errors import ApiError, bad_request, prompt_too_long
from mstar_tp.frontend.text.chat_template import ChatTemplate, find_chat_template
from mstar_tp.frontend.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
)
from mstar_tp.frontend.text.template_process import BoundedTemplate
from mstar_tp.frontend.text.text_bound import longest_token
from mstar_tp.frontend.text.tool_forms import ToolForm, form_of_template

logger = logging.getLogger(__name__)

TOOL_TOKENS = frozenset(
    {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"}
)
"""Tokens that models write around tool calls, special or not.

They are part of an answer that may call tools.
"""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class TextTokenizer:
    """Text to ids and back, and chats to text."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        extra_eos: Sequence[int] = (),
        template_type: type[ChatTemplate] = ChatTemplate,
    ) -> None:
        """``special_tokens``: name -> text, as chat templates know them.

        Raises:
            TemplateError: the chat template does not compile.
        """
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._bytes = TokenBytes(tokenizer)
        self._longest = longest_token(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(id_ for id_, token in added.items() if token.special)
        self._tool_ids = frozenset(
            id_ for id_, token in added.items() if token.content in TOOL_TOKENS
        )
        self._template = (
            None if chat_template is None else template_type(chat_template, self._special_tokens)
        )
        self.eos_ids = tuple(dict.fromkeys([*self._own_eos(), *extra_eos]))
        """Ids that end an answer, beyond those of the model's own config."""

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        max_tokens: int | None = None,
        param: str = "prompt",
    ) -> tuple[int, ...]:
        """A prompt's ids, with the start token where the tokenizer adds one.

        It leaves other threads the interpreter meanwhile.

        Raises:
            ApiError: ``text`` (the request's ``param``) has more characters than ``max_tokens``
                tokens can stand for, or makes more tokens than that.
        """
        if max_tokens is not None:
            self._check_length(text, max_tokens, param)
        # ``encode`` would hold the interpreter, whatever the text's length.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        if max_tokens is not None and len(encoding) > max_tokens:
            raise prompt_too_long(param, len(encoding), max_tokens)
        return tuple(encoding.ids)

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        if self._longest is None or len(text) <= max_tokens * self._longest:
            return
        raise bad_request(
            f"{param}: {len(text)} characters are more than the model's context of {max_tokens} "
            f"tokens can hold, at most {self._longest} characters a token: shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A chat as the text that the model reads.

        Raises:
            ApiError: there is no chat template, or it refuses these messages.
        """
        if self._template is None:
            raise ApiError.bad_request(
                "this model has no chat_template: use /v1/completions", param="messages"
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
            tools=tools,
        )

    @property
    def renders_apart(self) -> bool:
        """Return whether rendering waits for another process, and so for no event loop."""
        return isinstance(self._template, BoundedTemplate)

    @property
    def template_takes_tools(self) -> bool:
        """Return whether the chat template tells the model of tools."""
        return self._template is not None and self._template.takes_tools

    @property
    def template_form(self) -> ToolForm | None:
        """Return how the chat template tells the model to write tool calls, where that is known."""
        return None if self._template is None else form_of_template(self._template.source)

    @property
    def template_takes_parts(self) -> bool:
        """Return whether the chat template reads contents as lists of parts, not as strings."""
        return self._template is not None and self._template.takes_parts

    def token_text(self, token: int) -> str:
        """Return how one token is written in a text; empty for an id that no token has."""
        return self._tokenizer.id_to_token(token) or ""

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        show_calls: bool = False,
    ) -> Detokenizer:
        """Return the detokenizer of one answer to ``prompt``.

        ``show_calls``: special tokens around tool calls are written in any case.
        """
        hidden = self._hidden if skip_special_tokens else frozenset()
        if show_calls:
            hidden -= self._tool_ids
        if self._bytes.exact:
            return ByteDetokenizer(self._bytes, hidden)
        return WindowDetokenizer(self._tokenizer, prompt, hidden)

    def token_bytes(self, token: int) -> bytes:
        """One token's own bytes, special tokens as they are written."""
        return self._bytes[token]

    def written(self, count: int) -> list[bytes]:
        """Return the bytes that each of the first ``count`` ids writes, for grammars.

        An id writes nothing where it is a special token that opens no tool call, or none at all.

        Raises:
            CheckpointError: the bytes of one token depend on those beside it.
        """
        if not self._bytes.exact:
            raise CheckpointError(
                "the model's tokenizer does not say what one token writes, so no answer can be "
                "held to a grammar"
            )
        return [
            b""
            if id_ in self._hidden and self.token_text(id_) not in TOOL_TOKENS
            else self._bytes[id_]
            for id_ in range(count)
        ]

    def vocabulary(self) -> dict[str, int]:
        """Every token's id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Each special token's text, by the name that chat templates know it by."""
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._template is None else self._template.source

    def with_template(self, source: str) -> TextTokenizer:
        """The same tokenizer with another chat template, which runs apart and with bounds.

        Raises:
            CheckpointError: the template does not compile.
        """
        other = copy.copy(self)
        try:
            other._template = BoundedTemplate(source, self._special_tokens)
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from None
        return other

    def _own_eos(self) -> list[int]:
        text = self._special_tokens.get("eos_token")
        found = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        return [] if found is None else [found]


def read_special_tokens(folder: str | Path) -> dict[str, Any]:
    """Return what the chat templates of ``folder`` may name: each special token's text.

    Raises:
        CheckpointError: a file cannot be read.
    """
    folder = Path(folder)
    config = _read_json(folder / "tokenizer_config.json")
    return _special_tokens(_read_json(folder / "special_tokens_map.json") | config)


def read_chat_template(folder: str | Path) -> str | None:
    """The source of the chat template that ``folder`` ships.

    Raises:
        CheckpointError: a file cannot be read.
    """
    folder = Path(folder)
    return find_chat_template(folder, _read_json(folder / "tokenizer_config.json"))


def load_tokenizer(
    folder: str | Path,
    *,
    default_template: str | None = None,
    template_type: type[ChatTemplate] = ChatTemplate,
) -> TextTokenizer:
    """The tokenizer of a Hugging Face model folder.

    ``default_template``: where it ships no chat template; ``template_type``: what renders its own.

    Raises:
        CheckpointError: there is no tokenizer.json, or a file cannot be read.
    """
    tokenize_on_own_thread()
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file}: not found: save the model's fast tokenizer beside its weights"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(read_file(file))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    # Truncation or padding that was saved with a tokenizer would change prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = read_special_tokens(folder)
    _mark_special_tokens(tokenizer, special, config)
    template = find_chat_template(folder, config) or default_template
    eos = _generation_eos(folder)
    try:
        return TextTokenizer(
            tokenizer,
            special_tokens=special,
            chat_template=template,
            extra_eos=eos,
            template_type=template_type,
        )
    except TemplateError as error:
        logger.warning("%s: its chat template does not compile, so no chats: %s", folder, error)
        return TextTokenizer(tokenizer, special_tokens=special, extra_eos=eos)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wanted a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what templates may name: each special token's text, and the list of further ones."""
    found: dict[str, Any] = {}
    own_names = config.get("model_specific_special_tokens") or {}
    for name in (*_SPECIAL_NAMES, "mask_token", *own_names):
        text = _token_text(config.get(name, own_names.get(name)))
        if text is not None:
            found[name] = text
    return found


def _mark_special_tokens(
    tokenizer: tokenizers.Tokenizer, special: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Tokens that only the config calls special are kept whole in prompts and left out of answers.

    One that the vocabulary lacks has no row in the model: it stays plain text.
    """
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    texts = [*special.values(), *map(_token_text, further)]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(texts)
            if text and text not in known and tokenizer.token_to_id(text) is not None
        ]
    )


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _generation_eos(folder: Path) -> list[int]:
    """generation_config.json often names more ends than config.json (a chat's end of turn)."""
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return [id_ for id_ in ids if isinstance(id_, int)]

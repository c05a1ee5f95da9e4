"""Chat templates, rendered in jinja2's sandbox as transformers renders them, without transformers.

Templates are code from a model folder: they run with no access to Python internals and cannot
change what they are given. Stateless once built; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mstar_tp.common.confined_files import read_file
from mstar_tp.common.errors import CheckpointError, RequestError

_FAILURES = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip
"""The errors that a template raises over messages, or over itself."""
_MARK = "\ue000the last message ends here\ue000 "
"""Written after the last message's content, and cut off again with all that follows it."""


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """Raises TemplateError when ``source`` does not compile."""
        self.source = source
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    @cached_property
    def takes_tools(self) -> bool:
        """Return whether it reads the tools it is given at all."""
        return "tools" in find_undeclared_variables(_environment().parse(self.source))

    @cached_property
    def takes_parts(self) -> bool:
        """Return whether it reads a message's content as a list of parts, not as one string."""
        part = {"type": "text", "text": _MARK}
        try:
            text = self.render([{"role": "user", "content": [part]}])
        except RequestError:
            return False
        return _MARK.strip() in text and "'type'" not in text and '"type"' not in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a chat; ``extra`` are further variables the template may read.

        ``continue_final_message`` ends it inside the last message, for the model to go on from.

        Raises:
            RequestError: the template refuses these messages, or fails on them.
        """
        if continue_final_message:
            messages = _with_mark(messages)
        variables = {
            **self._special_tokens,
            "documents": None,
            **(extra or {}),
            "tools": tools,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(**variables)
            return _before_mark(text) if continue_final_message else text
        except _FAILURES as error:
            raise RequestError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from None


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = messages[-1]
    content = last["content"]
    if isinstance(content, list):
        marked: Any = [*content, {"type": "text", "text": _MARK}]
    else:
        marked = f"{content}{_MARK}"
    return [*messages[:-1], {**last, "content": marked}]


def _before_mark(text: str) -> str:
    """A template that trims contents trims the mark's space too: then the text's own ends too."""
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        raise ValueError("it does not show the last message, so nothing can continue it")
    whole = text.startswith(_MARK, place)
    return text[:place] if whole else text[:place].rstrip()


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of ``folder``'s default chat template, or None when it ships none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        file = folder / "chat_template.jinja"
        if file.is_file():
            return read_file(file).decode("utf-8")
        found = tokenizer_config.get("chat_template")
        if found is None and (folder / "chat_template.json").is_file():
            found = json.loads(read_file(folder / "chat_template.json")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its chat template cannot be read: {error}") from None
    if isinstance(found, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default")
    return found if isinstance(found, str) else None


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training: here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - the name and type jinja2 wants

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

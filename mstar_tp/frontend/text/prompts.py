"""Prompts from a request's texts, messages and images: the work that is worth a thread.

Pure functions of their arguments: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mstar_tp.common.errors import RequestError
from mstar_tp.frontend.api.answers import Echo
from mstar_tp.frontend.api.api_errors import ApiError, bad_request
from mstar_tp.frontend.api.protocol import ChatRequest, CompletionRequest
from mstar_tp.frontend.text.images import ImageReader, shaped
from mstar_tp.frontend.text.request_params import Body, Limits, check_prompt
from mstar_tp.frontend.text.tokenizer import TextTokenizer
from mstar_tp.wire.values import ImageInput


class Prompt(NamedTuple):
    """A prompt's checked ids, the images that stand in it, and how its answers show it."""

    ids: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()
    echo: Echo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPrompts:
    """The prompts of a completion request."""

    body: CompletionRequest
    tokenizer: TextTokenizer
    limits: Limits

    @property
    def is_quick(self) -> bool:
        """Return whether there is nothing to tokenize or to write out."""
        body = self.body
        return not body.echoes and all(isinstance(text, tuple) for text in body.prompt)

    def make(self) -> list[Prompt]:
        """Raises ApiError: a prompt is refused."""
        return [self._one(sent) for sent in self.body.prompt]

    def _one(self, sent: str | tuple[int, ...]) -> Prompt:
        special = self.body.add_special_tokens is not False
        context = self.limits.max_model_len
        if isinstance(sent, str):
            ids = self.tokenizer.encode(sent, special, max_tokens=context)
        else:
            ids = sent
        check_prompt(ids, self.limits, "prompt")
        return Prompt(ids, echo=self._echo(ids, sent) if self.body.echoes else None)

    def _echo(self, ids: tuple[int, ...], sent: str | tuple[int, ...]) -> Echo:
        """Return the prompt to echo as it was sent, or as the text of its ids."""
        skip = self.body.skip_special_tokens is not False
        detokenizer = self.tokenizer.detokenizer((), skip_special_tokens=skip)
        text, offsets = "", []
        for token in ids:
            offsets.append(len(text))
            text += detokenizer.push(token)
        text += detokenizer.finish()
        if isinstance(sent, str):
            text = sent
        alone = self.body.max_tokens == 0
        return Echo(ids, tuple(min(offset, len(text)) for offset in offsets), text, alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompts:
    """The one prompt of a chat request."""

    body: ChatRequest
    tokenizer: TextTokenizer
    limits: Limits
    images: ImageReader | None

    def check(self) -> None:
        """Raises ApiError: there are images, and the model reads none."""
        if self.images is None and self.body.image_urls:
            raise bad_request(
                "messages: hold images, and this model reads text alone", param="messages"
            )

    def render(self) -> str:
        """The chat as one text.

        Raises:
            RequestError: the chat template refuses it.
        """
        return self.tokenizer.render_chat(
            self._messages(),
            add_generation_prompt=self.body.opens_turn,
            continue_final_message=bool(self.body.continue_final_message),
            extra=self.body.chat_template_kwargs,
            tools=self.body.template_tools(),
        )

    def make(self, text: str | None = None) -> list[Prompt]:
        """``text``: the rendered chat, where it was rendered before.

        Raises:
            RequestError: the chat or an image is refused.
        """
        context = self.limits.max_model_len
        pixels = [] if self.images is None else self.images.read(self.body.image_urls, context)
        ids = self.tokenizer.encode(
            self.render() if text is None else text,
            add_special_tokens=False,
            max_tokens=context,
            param="messages",
        )
        prompt = Prompt(ids) if self.images is None else Prompt(*self.images.place(ids, pixels))
        check_prompt(prompt.ids, self.limits, "messages")
        return [prompt]

    def _messages(self) -> Sequence[Mapping[str, Any]]:
        if self.images is None:
            return self.body.messages
        return shaped(
            self.body.messages,
            as_parts=self.tokenizer.template_takes_parts,
            image_token=self.tokenizer.token_text(self.images.config.image_token_id),
        )


def has_images(body: Body) -> bool:
    """Return whether there are images to decode."""
    return isinstance(body, ChatRequest) and bool(body.image_urls)


def for_client(work: Callable[[], list[Prompt]]) -> Callable[[], list[Prompt]]:
    """``work`` whose refusals are the client's fault."""

    def run() -> list[Prompt]:
        try:
            return work()
        except ApiError:
            raise
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None

    return run

"""The routes of text that generate nothing: /tokenize, /detokenize and, refused, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mstar_tp.common.errors import RequestError
from mstar_tp.frontend.api.access import Access
from mstar_tp.frontend.api.api_errors import ApiError, bad_request
from mstar_tp.frontend.api.body import checked, parse, read_body
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.api.protocol import ChatRequest
from mstar_tp.frontend.text.prepare import INLINE_BYTES
from mstar_tp.frontend.text.tokenizer import TextTokenizer

MAX_IDS = 1_000_000
MAX_CHARS = 4 * MAX_IDS
"""The most characters of a text that is tokenized for its own sake."""


class TokenizeBody(BaseModel):
    """A prompt, or a chat's messages with the fields that its template reads."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    """The model whose tokenizer is used; unset: the base model."""
    prompt: str | None = None
    """A text; or give ``messages``."""
    messages: list[dict[str, Any]] | None = None
    """A chat, as in /v1/chat/completions."""
    add_special_tokens: bool | None = None
    """Begin as the tokenizer does; unset: true for a prompt, false for messages."""
    return_token_strs: bool | None = None
    """Tell each token's text too."""


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    """The model whose tokenizer is used; unset: the base model."""
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=MAX_IDS)]
    """Token ids."""


class TextRoutes:
    """Handlers that share one frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: as vLLM's."""
        access = self._frontend.client(request)
        frontend = self._frontend
        with frontend.body_budget.hold() as held:
            data = await read_body(request, held)
            quick = len(data) <= INLINE_BYTES
            body, chat = await frontend.parsed(data, self._tokenize_body)
            del data
            tokenizer = await self._tokenizer(body.model, access)
            context = frontend.limits().max_model_len

            def encoded(text: str, special: bool, param: str) -> bytes:
                _check_text(text, param)
                ids = tokenizer.encode(text, special, param=param)
                strings = list(map(tokenizer.token_text, ids)) if body.return_token_strs else None
                counts = {"count": len(ids), "max_model_len": context}
                return msgspec.json.encode({**counts, "tokens": ids, "token_strs": strings})

            if chat is not None:
                special = bool(body.add_special_tokens)
                made = await self._chat(
                    chat, tokenizer, lambda text: encoded(text, special, "messages")
                )
            else:
                text, special = body.prompt or "", body.add_special_tokens is not False
                made = await frontend.prepare.apart(
                    lambda: encoded(text, special, "prompt"), inline=quick
                )
        return _json(made)

    def _tokenize_body(self, data: bytes) -> tuple[TokenizeBody, ChatRequest | None]:
        """The body, and the chat in it. Any thread."""
        body = parse(TokenizeBody, data)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt: give either prompt or messages", param="prompt")
        if body.messages is None:
            return body, None
        fields = {**(body.model_extra or {}), "messages": body.messages}
        fields["model"] = body.model or self._frontend.served.base_names[0]
        return body, checked(ChatRequest, fields)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: as vLLM's."""
        access = self._frontend.client(request)
        frontend = self._frontend
        with frontend.body_budget.hold() as held:
            data = await read_body(request, held)
            body = await frontend.parsed(data, partial(parse, DetokenizeBody))
            del data
            tokenizer = await self._tokenizer(body.model, access)

            def decoded() -> bytes:
                text = tokenizer.decode(body.tokens, skip_special_tokens=False)
                return msgspec.json.encode({"prompt": text})

            quick = 4 * len(body.tokens) <= INLINE_BYTES
            return _json(await frontend.prepare.apart(decoded, inline=quick))

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings: this server has none to give."""
        self._frontend.client(request)
        raise ApiError(
            400,
            "embeddings are not served: this server generates text",
            type="invalid_request_error",
            code="not_supported",
        )

    async def _chat(
        self, body: ChatRequest, tokenizer: TextTokenizer, encode: Callable[[str], bytes]
    ) -> bytes:
        if body.image_urls:
            raise bad_request("messages: images are not tokenized", param="messages")

        def render() -> str:
            return tokenizer.render_chat(
                body.messages,
                add_generation_prompt=body.opens_turn,
                continue_final_message=bool(body.continue_final_message),
                extra=body.chat_template_kwargs,
                tools=body.template_tools(),
            )

        frontend = self._frontend
        try:
            if tokenizer.renders_apart:
                text = await frontend.render_apart(render)
                return await frontend.prepare.apart(lambda: encode(text))
            return await frontend.prepare.apart(lambda: encode(render()))
        except ApiError:
            raise
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None

    async def _tokenizer(self, name: str | None, access: Access) -> TextTokenizer:
        """Return the tokenizer of the model called ``name``; the base's without one."""
        # What the ranks serve must be known: the limits are theirs.
        self._frontend.conductor.state.check_open()
        key = await self._frontend.resolve(name or self._frontend.served.base_names[0], access)
        return await self._frontend.tokenizer_of(key)


def _check_text(text: str, param: str) -> None:
    if len(text) > MAX_CHARS:
        raise bad_request(
            f"{param}: {len(text)} characters are more than the {MAX_CHARS} that are tokenized at "
            "once: send it in parts",
            param=param,
        )


def _json(value: bytes) -> Response:
    return Response(value, media_type="application/json")

"""The routes of text that generate nothing: /tokenize, /detokenize and, refused, embeddings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mstar_tp.errors import RequestError
from mstar_tp.frontend.access import Access
from mstar_tp.frontend.body import parse, read_body
from mstar_tp.frontend.context import Frontend
from mstar_tp.frontend.errors import ApiError, bad_request
from mstar_tp.frontend.prepare import INLINE_BYTES
from mstar_tp.frontend.protocol import ChatRequest
from mstar_tp.frontend.tokenizer import TextTokenizer

MAX_IDS = 1_000_000


class TokenizeBody(BaseModel):
    """A prompt, or a chat's messages with the fields that its template reads."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    """Whose tokenizer; unset: the base model's."""
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
    """Whose tokenizer; unset: the base model's."""
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=MAX_IDS)]
    """Token ids."""


class TextRoutes:
    """Handlers that share one frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: as vLLM's."""
        access = self._frontend.client(request)
        data = await read_body(request)
        body = parse(TokenizeBody, data)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt: give either prompt or messages", param="prompt")
        tokenizer = await self._tokenizer(body.model, access)
        if body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens is not False
            ids = await self._frontend.prepare.apart(
                lambda: tokenizer.encode(text, special), inline=len(data) <= INLINE_BYTES
            )
        else:
            fields = {"model": body.model or self._frontend.served.base_names[0]}
            ids = await self._chat(
                parse(ChatRequest, msgspec.json.encode({**msgspec.json.decode(data), **fields})),
                tokenizer,
                bool(body.add_special_tokens),
            )
        strings = [tokenizer.token_text(id_) for id_ in ids] if body.return_token_strs else None
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._frontend.limits().max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: as vLLM's."""
        access = self._frontend.client(request)
        body = parse(DetokenizeBody, await read_body(request))
        tokenizer = await self._tokenizer(body.model, access)
        tokens = body.tokens
        text = await self._frontend.prepare.apart(
            lambda: tokenizer.decode(tokens, skip_special_tokens=False),
            inline=4 * len(tokens) <= INLINE_BYTES,
        )
        return _json({"prompt": text})

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
        self, body: ChatRequest, tokenizer: TextTokenizer, special: bool
    ) -> tuple[int, ...]:
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

        def encode(text: str) -> tuple[int, ...]:
            return tokenizer.encode(text, special, param="messages")

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
        """That of the model called ``name``; the base's without one."""
        # What the ranks serve must be known: the limits are theirs.
        self._frontend.conductor.check_open()
        key = await self._frontend.resolve(name or self._frontend.served.base_names[0], access)
        return await self._frontend.tokenizer_of(key)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

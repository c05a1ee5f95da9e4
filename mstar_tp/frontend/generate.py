"""The routes that generate: completions, chats and responses, from bytes in to the last event out.

Written straight against ASGI: a streamed token costs one wake, one encoded chunk and one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mstar_tp.errors import RequestError
from mstar_tp.frontend.access import Access
from mstar_tp.frontend.answers import Answer, AnswerOptions, Delta, Echo, Gathered
from mstar_tp.frontend.body import ClientDisconnect, parse, read_body
from mstar_tp.frontend.context import Frontend
from mstar_tp.frontend.errors import ApiError, bad_request, warning_header
from mstar_tp.frontend.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    usage,
)
from mstar_tp.frontend.images import MAX_REQUEST_BYTES, shaped
from mstar_tp.frontend.params import Body, check_prompt, derive_seed, sampling_params
from mstar_tp.frontend.protocol import ChatRequest, CompletionRequest
from mstar_tp.frontend.request_ids import origin_of
from mstar_tp.frontend.responses import ResponsesChat, ResponsesFormat, ResponsesRequest
from mstar_tp.frontend.tickets import (
    STILL_WAITING,
    Arrival,
    ClientGoneError,
    Origin,
    Submission,
    Ticket,
)
from mstar_tp.frontend.tokenizer import INLINE_CHARS, TextTokenizer
from mstar_tp.frontend.tool_calls import ToolCallReader
from mstar_tp.frontend.tool_forms import ToolForm
from mstar_tp.wire.messages import AdapterKey, ImageInput, Token

logger = logging.getLogger(__name__)

SLOT_HEADER = b"x-mstar-slot"
WAIT_COMMENT = b": the ranks are being started again\n\n"
"""Clients skip it; it tells them, and proxies between, that the stream is alive."""
OFFLOADED_CHARS = INLINE_CHARS + 1
"""Stands for what is not text and takes as long as a long one."""


class Prompt(NamedTuple):
    """A prompt's ids, and the images that stand in it."""

    ids: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Job:
    """One API request: its ticket and the answers in the making, in the order of their indices."""

    ticket: Ticket
    answers: list[Answer]
    format: Format
    body: Body
    prompt_tokens: int

    def best(self, answers: Sequence[Gathered]) -> list[Gathered]:
        """Those to be given of what was generated: each prompt's likeliest."""
        attempts, choices = self.body.attempts, self.body.choices
        if attempts == choices:
            return list(answers)
        groups = (answers[at : at + attempts] for at in range(0, len(answers), attempts))
        ranked = (sorted(group, key=lambda answer: -answer.mean_logprob) for group in groups)
        return [answer for group in ranked for answer in group[:choices]]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Beside those of the answer's type."""
        warning = warning_header(self.body.unknown_fields)
        return [(SLOT_HEADER, self.slots()), *([(b"warning", warning)] if warning else [])]

    def counts(self) -> dict[str, Any]:
        attempts = self.body.attempts
        # Of a prompt's answers, what none had to compute.
        cached = [answer.cached for answer in self.answers]
        groups = (cached[at : at + attempts] for at in range(0, len(cached), attempts))
        return usage(
            self.prompt_tokens,
            sum(answer.num_tokens for answer in self.answers),
            sum(map(min, groups)),
        )

    def slots(self) -> bytes:
        used = sorted({answer.slot for answer in self.answers if answer.num_tokens})
        return b",".join(b"%d" % slot for slot in used)

    @property
    def finished(self) -> bool:
        return all(answer.finish is not None for answer in self.answers)


class GenerateEndpoint:
    """An ASGI application for one of the three routes."""

    def __init__(
        self,
        frontend: Frontend,
        model: type[CompletionRequest] | type[ChatRequest] | type[ResponsesRequest],
    ):
        self._frontend = frontend
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with contextlib.suppress(ClientGoneError, ClientDisconnect):
            with self._frontend.conductor.requests.tally.prepares():
                access = self._frontend.client(request)
                data = await read_body(request)
                # Once more, since the body was waited for: a server with too much to do must
                # refuse before it looks at it.
                self._frontend.conductor.check_room()
                parsed = parse(self._model, data)
                body = parsed.chat() if isinstance(parsed, ResponsesRequest) else parsed
                job = await self._open(body, access, origin_of(scope))
            watcher = asyncio.ensure_future(_watch(receive, job.ticket))
            try:
                if body.stream:
                    await self._stream(job, send)
                else:
                    await self._whole(job, send)
            finally:
                watcher.cancel()
                self._frontend.conductor.abort(job.ticket)

    # ------------------------------------------------------------------ opening

    async def _open(self, body: Body, access: Access, origin: Origin) -> _Job:
        frontend = self._frontend
        key = await self._resolve(body, access)
        with frontend.conductor.loads.pinned(key):
            tokenizer = await frontend.tokenizer_of(key)
            form = self._tool_form(body, tokenizer)
            prompts = await self._prompts(body, tokenizer)
            submissions = self._submissions(body, key, prompts, form, tokenizer, origin)
            ticket = frontend.conductor.submit(submissions)
        options = AnswerOptions(
            stops=body.stop,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens or 0,
        )
        skip = body.skip_special_tokens is not False
        echoes = [
            self._echo(prompt.ids, body, number, tokenizer) if body.echoes else None
            for number, prompt in enumerate(prompts)
            for _ in range(body.attempts)
        ]
        answers = [
            Answer(
                tokenizer.detokenizer(
                    submission.prompt, skip_special_tokens=skip, show_calls=form is not None
                ),
                options,
                echo,
                self._call_reader(body, form),
            )
            for submission, echo in zip(submissions, echoes, strict=True)
        ]
        return _Job(
            ticket=ticket,
            answers=answers,
            format=self._format(body, tokenizer),
            body=body,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        )

    def _tool_form(self, body: Body, tokenizer: TextTokenizer) -> ToolForm | None:
        """How the answer may call tools; None where none are offered."""
        if not isinstance(body, ChatRequest) or not body.offers_tools:
            return None
        if not tokenizer.template_takes_tools:
            raise bad_request("tools: this model's chat template takes none", param="tools")
        form = self._frontend.tool_form(tokenizer)
        if form is None:
            raise bad_request(
                "tools: how this model writes tool calls is not known here: name the form with "
                "--tool-call-parser",
                param="tools",
            )
        return form

    def _call_reader(self, body: Body, form: ToolForm | None) -> ToolCallReader | None:
        if form is None or not isinstance(body, ChatRequest):
            return None
        return ToolCallReader(form, several=body.several_calls)

    def _echo(
        self, ids: tuple[int, ...], body: Body, number: int, tokenizer: TextTokenizer
    ) -> Echo:
        """Prompt ``number`` as its answers show it: as it was sent, or the text of its ids."""
        assert isinstance(body, CompletionRequest), "only completions echo"
        skip = body.skip_special_tokens is not False
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip)
        text, offsets = "", []
        for token in ids:
            offsets.append(len(text))
            text += detokenizer.push(token)
        text += detokenizer.finish()
        sent = body.prompt[number]
        if isinstance(sent, str):
            text = sent
        alone = body.max_tokens == 0
        return Echo(ids, tuple(min(offset, len(text)) for offset in offsets), text, alone)

    async def _resolve(self, body: Body, access: Access) -> AdapterKey | None:
        key = await self._frontend.resolve(body.model, access)
        if body.lora_adapter is None:
            return key
        return await self._frontend.resolve(body.lora_adapter, access, "lora_adapter")

    async def _prompts(self, body: Body, tokenizer: TextTokenizer) -> list[Prompt]:
        """Every prompt as checked ids, with its images."""
        context = self._frontend.limits().max_model_len
        try:
            if isinstance(body, ChatRequest):
                field, urls = "messages", body.image_urls
                chars = sum(len(message["content"]) for message in body.messages)
                prompts = [
                    await self._frontend.offload(
                        lambda: self._chat(body, tokenizer, urls, context),
                        OFFLOADED_CHARS if urls else chars,
                        tokenizer,
                    )
                ]
            else:
                field = "prompt"
                add = body.add_special_tokens is not False
                prompts = [
                    Prompt(await self._ids(text, tokenizer, add, context)) for text in body.prompt
                ]
        except ApiError:
            raise
        except RequestError as error:
            raise bad_request(str(error), param=error.param) from None
        # Only now: the limits are the ranks' own, and they may have gone meanwhile.
        self._frontend.conductor.check_open()
        limits = self._frontend.limits()
        for prompt in prompts:
            check_prompt(prompt.ids, limits, field)
        return prompts

    def _chat(
        self, body: ChatRequest, tokenizer: TextTokenizer, urls: Sequence[str], context: int
    ) -> Prompt:
        """A chat's prompt. With images, on a thread: decoding one takes a while."""
        images = self._frontend.images
        messages: Sequence[Mapping[str, Any]] = body.messages
        if images is None and urls:
            raise bad_request(
                "messages: hold images, and this model reads text alone", param="messages"
            )
        pixels = []
        if images is not None:
            pixels = images.read(urls, context)
            messages = shaped(
                messages,
                as_parts=tokenizer.template_takes_parts,
                image_token=tokenizer.token_text(images.config.image_token_id),
            )
        ids = tokenizer.encode_chat(
            messages,
            add_generation_prompt=body.opens_turn,
            continue_final_message=bool(body.continue_final_message),
            extra=body.chat_template_kwargs,
            tools=body.template_tools(),
            max_tokens=context,
        )
        return Prompt(ids) if images is None else Prompt(*images.place(ids, pixels))

    async def _ids(
        self,
        prompt: str | tuple[int, ...],
        tokenizer: TextTokenizer,
        add_special_tokens: bool,
        context: int,
    ) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        return await self._frontend.offload(
            lambda: tokenizer.encode(prompt, add_special_tokens, max_tokens=context), len(prompt)
        )

    def _submissions(
        self,
        body: Body,
        key: AdapterKey | None,
        prompts: list[Prompt],
        form: ToolForm | None,
        tokenizer: TextTokenizer,
        origin: Origin,
    ) -> list[Submission]:
        """``attempts`` answers a prompt; indices count answers of the first prompt first."""
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        total, bound = len(prompts) * body.attempts, self._frontend.config.server.max_queue
        if total > bound:
            raise bad_request(
                f"{field}: asks for {total} answers at once, and this server holds at most {bound}",
                param=field,
            )
        pixels = sum(len(image.pixels) for prompt in prompts for image in prompt.images)
        if pixels * body.attempts > MAX_REQUEST_BYTES:
            raise bad_request(
                f"n: {body.choices} answers about {pixels} bytes of images come to more than the "
                f"{MAX_REQUEST_BYTES} that a request may send: lower n or send fewer images",
                param="n",
            )
        limits = self._frontend.limits(tokenizer)
        grammar = body.grammar(form) if isinstance(body, ChatRequest) else None
        seed = secrets.randbits(62) if body.seed is None else body.seed
        submissions = []
        for number, prompt in enumerate(prompts):
            # With a seed, a prompt's answers do not depend on what else is in the request.
            first = number * body.attempts if body.seed is None else 0
            for choice in range(body.attempts):
                own_seed = derive_seed(seed, first + choice)
                params = sampling_params(body, len(prompt.ids), limits, own_seed, field, grammar)
                submissions.append(
                    Submission(
                        prompt=prompt.ids,
                        images=prompt.images,
                        params=params,
                        adapter=key,
                        priority=body.priority or 0,
                        origin=origin,
                    )
                )
        return submissions

    def _format(self, body: Body, tokenizer: TextTokenizer) -> Format:
        if isinstance(body, ResponsesChat):
            return ResponsesFormat(body, tokenizer)
        kind = ChatFormat if isinstance(body, ChatRequest) else CompletionFormat
        return kind(
            body.requested,
            tokenizer,
            include_usage=body.include_usage,
            logprobs=body.num_logprobs is not None,
        )

    # ------------------------------------------------------------------ answering

    def _take(self, job: _Job, arrival: Arrival) -> Delta | None:
        """Push an arrival into its answer; None for a token that came after a stop string, and
        while the ranks are down.

        Raises:
            ApiError: the answer failed.
        """
        index, item = arrival
        if isinstance(item, ApiError):
            raise item
        if item is STILL_WAITING:
            return None
        assert isinstance(item, Token)
        answer = job.answers[index]
        if answer.finish is not None:
            return None
        delta = answer.push(item)
        if answer.stopped:
            self._frontend.conductor.abort(job.ticket, index)
        return delta

    async def _whole(self, job: _Job, send: Send) -> None:
        answers = [Gathered() for _ in job.answers]
        while not job.finished:
            for arrival in await job.ticket.next():
                delta = self._take(job, arrival)
                if delta is not None:
                    answers[arrival.place].add(delta)
        content = job.format.body(job.best(answers), job.counts())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            *job.headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, job: _Job, send: Send) -> None:
        events = self._events(job)
        # The status waits for the first token: what fails before it is still a plain HTTP error.
        first = await anext(events)
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *job.headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            last = job.format.end(job.counts())
        except ApiError as error:
            last = job.format.failed(error)
        await send({"type": "http.response.body", "body": last})

    async def _events(self, job: _Job) -> AsyncIterator[bytes]:
        """All chunks that one wake brings, as one write; none when all text is held back."""
        started: set[int] = set()
        while not job.finished:
            chunks: list[bytes] = []
            try:
                for arrival in await job.ticket.next():
                    delta = self._take(job, arrival)
                    if arrival.item is STILL_WAITING:
                        chunks.append(WAIT_COMMENT)
                    if delta is None:
                        continue
                    if arrival.place not in started:
                        started.add(arrival.place)
                        chunks.append(job.format.first_chunk(arrival.place))
                    if delta.shows:
                        chunks.append(job.format.chunk(arrival.place, delta))
            except ApiError:
                if written := b"".join(chunks):
                    yield written
                raise
            if written := b"".join(chunks):
                yield written


async def _watch(receive: Receive, ticket: Ticket) -> None:
    """Tell the ticket when its client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.leave()

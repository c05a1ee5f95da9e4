"""The routes that generate: completions, chats and responses, from bytes in to the last event out.

Written straight against ASGI: a streamed token costs one wake, one encoded chunk and one write.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mstar_tp.frontend.api.access import Access
from mstar_tp.frontend.api.answers import Answer, AnswerOptions, Delta, Gathered
from mstar_tp.frontend.api.api_errors import ApiError, bad_request, warning_header
from mstar_tp.frontend.api.body import ClientDisconnect, parse, read_body
from mstar_tp.frontend.api.client_connection import Client, reader_of
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.frontend.api.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    usage,
)
from mstar_tp.frontend.api.protocol import ChatRequest, CompletionRequest
from mstar_tp.frontend.api.request_ids import origin_of
from mstar_tp.frontend.api.responses import ResponsesChat, ResponsesFormat, ResponsesRequest
from mstar_tp.frontend.ranks.request_handle import (
    STILL_WAITING,
    Arrival,
    ClientGoneError,
    Origin,
    RequestHandle,
    Submission,
)
from mstar_tp.frontend.text.images import MAX_REQUEST_BYTES
from mstar_tp.frontend.text.prepare import INLINE_BYTES
from mstar_tp.frontend.text.prompts import (
    ChatPrompts,
    CompletionPrompts,
    Prompt,
    for_client,
    has_images,
)
from mstar_tp.frontend.text.request_params import Body, derive_seed, sampling_params
from mstar_tp.frontend.text.tokenizer import TextTokenizer
from mstar_tp.frontend.text.tool_calls import ToolCallReader
from mstar_tp.frontend.text.tool_forms import ToolForm
from mstar_tp.wire.reports import Token
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)

SLOT_HEADER = b"x-mstar-slot"
WAIT_COMMENT = b": the ranks are being started again\n\n"
"""Clients skip it; it tells them, and proxies between, that the stream is alive."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """One API request: its handle and the answers in the making, in the order of their indices."""

    handle: RequestHandle
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
        frontend, request = self._frontend, Request(scope, receive)
        with (
            contextlib.suppress(ClientGoneError, ClientDisconnect),
            contextlib.ExitStack() as watching,
        ):
            client = Client(origin_of(scope), reader_of(scope))
            watching.callback(client.end, frontend.conductor)
            with (
                frontend.conductor.requests.request_counters.prepares(),
                frontend.body_budget.hold() as held,
            ):
                access = frontend.client(request)
                data = await read_body(request, held)
                # Once more, since the body was waited for: a server with too much to do must
                # refuse before it looks at it.
                frontend.conductor.check_capacity()
                client.sent_little = len(data) <= INLINE_BYTES
                body = await frontend.parsed(data, self._parse)
                del data
                client.watch(receive)
                job = await self._open(body, access, client)
            if body.stream:
                await self._stream(job, send)
            else:
                await self._whole(job, send)

    def _parse(self, data: bytes) -> Body:
        """Any thread. Raises ApiError: it is refused."""
        parsed = parse(self._model, data)
        return parsed.chat() if isinstance(parsed, ResponsesRequest) else parsed

    # ------------------------------------------------------------------ opening

    async def _open(self, body: Body, access: Access, client: Client) -> _Job:
        """Prepare it and tell the ranks of it, in its turn.

        Raises:
            ClientGoneError: its client left first: the ranks never hear of it.
        """
        frontend = self._frontend
        key = await self._resolve(body, access)
        count = self._count(body)
        with frontend.conductor.reserve(count, key) as reservation:
            tokenizer = await frontend.tokenizer_of(key)
            form = self._tool_form(body, tokenizer)
            work, quick = await self._work(body, tokenizer)

            def release(prompts: list[Prompt]) -> _Job:
                reservation.give_back()
                job = self._submit(body, key, prompts, form, tokenizer, client.origin)
                client.take(job.handle, frontend.conductor)
                return job

            # A small file may hold a large image.
            inline = (client.sent_little or quick) and not has_images(body)
            place = frontend.prepare.enter(work, release, inline=inline)
            client.wait_at(place)
            return await place.result()

    async def _work(
        self, body: Body, tokenizer: TextTokenizer
    ) -> tuple[Callable[[], list[Prompt]], bool]:
        """Return what makes the prompts, and whether that takes no time.

        A chat template that an adapter brings is rendered first: its request has no place in the
        line yet, and holds nobody up.
        """
        limits, frontend = self._frontend.limits(), self._frontend
        if not isinstance(body, ChatRequest):
            completion = CompletionPrompts(body=body, tokenizer=tokenizer, limits=limits)
            return for_client(completion.make), completion.is_quick
        images = frontend.images
        chat = ChatPrompts(body=body, tokenizer=tokenizer, limits=limits, images=images)
        chat.check()
        if not tokenizer.renders_apart:
            return for_client(chat.make), False
        text = await frontend.render_apart(chat.render)
        return for_client(lambda: chat.make(text)), False

    def _submit(
        self,
        body: Body,
        key: AdapterKey | None,
        prompts: list[Prompt],
        form: ToolForm | None,
        tokenizer: TextTokenizer,
        origin: Origin,
    ) -> _Job:
        """Raises ApiError: it asks for what the ranks do not serve, or they take no request."""
        submissions = self._submissions(body, key, prompts, form, tokenizer, origin)
        options = AnswerOptions(
            stops=body.stop,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens or 0,
        )
        skip = body.skip_special_tokens is not False
        echoes = [prompt.echo for prompt in prompts for _ in range(body.attempts)]
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
        format_ = self._format(body, tokenizer)
        return _Job(
            handle=self._frontend.conductor.submit(submissions),
            answers=answers,
            format=format_,
            body=body,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        )

    def _tool_form(self, body: Body, tokenizer: TextTokenizer) -> ToolForm | None:
        """Return how the answer may call tools; None where none are offered."""
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

    async def _resolve(self, body: Body, access: Access) -> AdapterKey | None:
        key = await self._frontend.resolve(body.model, access)
        if body.lora_adapter is None:
            return key
        return await self._frontend.resolve(body.lora_adapter, access, "lora_adapter")

    def _count(self, body: Body) -> int:
        """Return how many answers it asks for.

        Raises:
            ApiError: more than the server holds.
        """
        field, num_prompts = _prompts_of(body)
        total, bound = num_prompts * body.attempts, self._frontend.config.server.max_queue
        if total > bound:
            raise bad_request(
                f"{field}: asks for {total} answers at once, and this server holds at most {bound}",
                param=field,
            )
        return total

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
        field, _ = _prompts_of(body)
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
        """Push an arrival into its answer.

        Returns None for a token that came after a stop string, and while the ranks are down.

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
            self._frontend.conductor.abort(job.handle, index)
        return delta

    async def _whole(self, job: _Job, send: Send) -> None:
        answers = [Gathered() for _ in job.answers]
        while not job.finished:
            for arrival in await job.handle.next():
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
                for arrival in await job.handle.next():
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


def _prompts_of(body: Body) -> tuple[str, int]:
    """The field of the prompts, and their number."""
    return ("messages", 1) if isinstance(body, ChatRequest) else ("prompt", len(body.prompt))

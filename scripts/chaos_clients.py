"""The clients of a chaos run: they ask, stream, stop and leave, and check every answer."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import aiohttp
from chaos_names import Name
from chaos_report import Report
from chaos_world import BASE, MAX_TOKENS, World, word

PATIENCE_S = 120.0
"""A request that takes longer hangs."""
STATUS_NOT_SERVED = 404


@dataclass(slots=True)
class Answer:
    """An answer, and when it came."""

    sent: float
    resolved: float = 0.0
    """The time at which the server had surely decided which weights to use."""
    ended: float = 0.0
    text: str = ""
    finish: str | None = None
    error: str | None = None
    status: int = 200
    left: bool = False
    """The client went away before the end."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and how its client behaves."""

    name: str
    prompt: int
    num_tokens: int
    stream: bool = False
    stop: str | None = None
    by_field: bool = False
    """Name the adapter in ``lora_adapter`` rather than in ``model``."""
    leave_after: int | None = None
    """Leave when this many pieces of the answer have come."""
    leave_within_s: float | None = None
    """Leave after this time, whatever came."""

    def body(self, world: World) -> dict[str, object]:
        body: dict[str, object] = {
            "model": BASE if self.by_field else self.name,
            "prompt": list(world.prompts[self.prompt]),
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "stream": self.stream,
        }
        if self.by_field:
            body["lora_adapter"] = self.name
        if self.stop is not None:
            body["stop"] = [self.stop]
        return body

    def wanted(self, world: World, weights: str) -> tuple[str, str]:
        """The whole answer of these weights, and how it ends."""
        text = world.text(weights, self.prompt, self.num_tokens)
        cut = text.find(self.stop) if self.stop is not None else -1
        return (text[:cut], "stop") if cut >= 0 else (text, "length")


class Clients:
    """Asks and checks. ``names``: every name an adapter may be served under."""

    def __init__(
        self,
        world: World,
        names: dict[str, Name],
        session: aiohttp.ClientSession,
        report: Report,
        rng: random.Random,
    ) -> None:
        self._world = world
        self._names = names
        self._session = session
        self._report = report
        self._rng = rng
        self._clock = asyncio.get_running_loop().time

    async def run(self, stop: asyncio.Event) -> None:
        """One client: asks until ``stop``."""
        while not stop.is_set():
            await self.ask(self.think())

    async def burst(self, size: int) -> None:
        """Many at once on every name."""
        await asyncio.gather(*(self.ask(self.think()) for _ in range(size)))

    def think(self) -> Question:
        """A random question."""
        rng = self._rng
        names = [BASE, *self._names]
        # A few names are asked for all the time, the last ones seldom.
        name = rng.choices(names, [1.5 / (1 + i) for i in range(len(names))])[0]
        num_tokens = rng.randint(1, MAX_TOKENS)
        prompt = rng.randrange(len(self._world.prompts))
        kind = rng.random()
        question = Question(
            name=name,
            prompt=prompt,
            num_tokens=num_tokens,
            stream=rng.random() < 0.5,
            by_field=name != BASE and rng.random() < 0.1,
        )
        if kind < 0.1:
            weights = name if name == BASE else self._names[name].weights
            ids = self._world.answers[weights or BASE][prompt]
            return _with(question, stop=word(ids[rng.randrange(num_tokens)]))
        if kind < 0.2:
            return _with(question, stream=True, leave_after=rng.randint(1, num_tokens))
        if kind < 0.3:
            return _with(question, leave_within_s=rng.choice((0.0, 0.001, 0.005, 0.05, 0.5)))
        return question

    async def ask(self, question: Question) -> Answer:
        """Send one question, and check what comes of it."""
        answer = Answer(sent=self._clock())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._send(question, answer)
        except TimeoutError:
            self._report.violation("hang", f"{question} has no end after {PATIENCE_S:g} s")
            self._report.ends["hung"] += 1
            return answer
        except (aiohttp.ClientError, ConnectionError) as error:
            self._report.violation("failure", f"{question}: the connection broke: {error!r}")
            self._report.ends["broken"] += 1
            return answer
        answer.ended = self._clock()
        answer.resolved = answer.resolved or answer.ended
        self._report.ends[self._check(question, answer)] += 1
        return answer

    # ------------------------------------------------------------------ one request

    async def _send(self, question: Question, answer: Answer) -> None:
        work = asyncio.ensure_future(self._exchange(question, answer))
        try:
            done, _ = await asyncio.wait({work}, timeout=question.leave_within_s)
        finally:
            # Cancelling closes the connection: that is how a client leaves.
            work.cancel()
        if not done:
            answer.left = True
            await asyncio.gather(work, return_exceptions=True)
            return
        await work

    async def _exchange(self, question: Question, answer: Answer) -> None:
        body = question.body(self._world)
        async with self._session.post("/v1/completions", json=body) as response:
            answer.resolved = self._clock()
            answer.status = response.status
            if response.status != 200 or not question.stream:
                await self._take_whole(response, answer)
                return
            pieces = 0
            async for line in response.content:
                if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                    continue
                pieces += 1
                self._take_piece(json.loads(line[6:]), answer)
                if pieces == question.leave_after:
                    answer.left = True
                    response.close()
                    return

    async def _take_whole(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        tree = await response.json(content_type=None)
        if response.status != 200:
            answer.error = tree["error"]["message"]
            return
        answer.text = tree["choices"][0]["text"]
        answer.finish = tree["choices"][0]["finish_reason"]

    def _take_piece(self, tree: dict[str, object], answer: Answer) -> None:
        if "error" in tree:
            answer.error = tree["error"]["message"]  # type: ignore[index]
            return
        for choice in tree["choices"]:  # type: ignore[attr-defined]
            answer.text += choice["text"]
            answer.finish = choice["finish_reason"] or answer.finish

    # ------------------------------------------------------------------ checking

    def _check(self, question: Question, answer: Answer) -> str:
        """Check the end of a request; an end that must not be is a violation."""
        weights = self._could_serve(question, answer)
        if answer.error is not None:
            return self._check_error(question, answer, weights)
        wanted = [question.wanted(self._world, one) for one in weights if one is not None]
        if answer.left:
            if not any(text.startswith(answer.text) for text, _ in wanted) and answer.text:
                self._wrong(question, answer, weights)
            return "left"
        if (answer.text, answer.finish) not in wanted:
            self._wrong(question, answer, weights)
            return "wrong"
        if question.name == BASE:
            self._report.latencies_s.append(answer.ended - answer.sent)
        return "stopped" if answer.finish == "stop" else "right"

    def _could_serve(self, question: Question, answer: Answer) -> set[str | None]:
        if question.name == BASE:
            return {BASE}
        return self._names[question.name].could_serve(answer.sent, answer.resolved)

    def _check_error(self, question: Question, answer: Answer, weights: set[str | None]) -> str:
        error = answer.error or ""
        if "the ranks are gone" in error:
            self._report.ranks_gone(error)
            return "lost"
        if answer.status == STATUS_NOT_SERVED:
            if None not in weights:
                self._report.violation("failure", f"{question} got 404, but it served {weights}")
            return "not served"
        name = self._names.get(question.name)
        if name is None or not name.could_fail(answer.sent, answer.ended):
            self._report.violation(
                "failure", f"{question} failed for no reason ({answer.status}): {error}"
            )
        elif f"'{name.name}'" not in error or "rank" not in error:
            self._report.violation(
                "failure", f"{question} failed without naming adapter and rank: {error}"
            )
        elif not any(
            text.startswith(answer.text)
            for text, _ in (question.wanted(self._world, one) for one in weights if one)
        ):
            self._wrong(question, answer, weights)
        return "failed"

    def _wrong(self, question: Question, answer: Answer, weights: set[str | None]) -> None:
        named = [
            name
            for name in self._world.answers
            if question.wanted(self._world, name)[0].startswith(answer.text)
        ]
        self._report.violation(
            "wrong text",
            f"{question} said {answer.text!r} ({answer.finish}); wanted that of {weights}; it is "
            f"that of {named}",
        )


def _with(question: Question, **changes: object) -> Question:
    from dataclasses import replace

    return replace(question, **changes)  # type: ignore[arg-type]

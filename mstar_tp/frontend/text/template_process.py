"""Chat templates that adapters ship, rendered in a process of their own with bounds.

The sandbox keeps a template from Python's internals, not from loops without an end or texts without
a bound, and those would stop every stream. The process ends by its own limit of processor time over
a render that takes too much of it, and is killed where one takes long; the next render starts
another. It ends with its standard input, so none is left behind.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from mstar_tp.common.env import child_environment
from mstar_tp.common.errors import RequestError
from mstar_tp.frontend.text.chat_template import ChatTemplate

CPU_S = 2
"""The processor time that a render may take, in whole seconds, since limits are."""
WALL_S = 5.0
"""The seconds that an answer is waited for, where the processor is busy with others."""
MEMORY_BYTES = 1 << 30
MAX_TEXT_CHARS = 32 << 20


class BoundedTemplate(ChatTemplate):
    """A ``ChatTemplate`` of which nothing runs in this process. Any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """Raises TemplateError: ``source`` does not compile, or not within the bounds."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._check()

    def _check(self) -> None:
        try:
            answer = _RENDERER.ask({"source": self.source, "tokens": self._special_tokens})
        except RequestError as error:
            raise TemplateError(str(error)) from None
        if "error" in answer:
            raise TemplateError(str(answer["error"]))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render as ``ChatTemplate.render`` does.

        Raises:
            RequestError: the template refuses these messages, fails on them, or takes too long.
        """
        fields = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "extra": extra,
            "tools": tools,
        }
        answer = _RENDERER.ask(
            {
                "source": self.source,
                "tokens": self._special_tokens,
                "messages": messages,
                "fields": fields,
            }
        )
        if "error" in answer:
            raise RequestError(str(answer["error"]), param="messages")
        return str(answer["text"])


class _Renderer:
    """The process, started with the first question; ``_lock`` holds it for one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RequestError: the process ended over it."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
            # It writes nothing before its answer is whole.
            ready, _, _ = select.select([process.stdout], [], [], WALL_S)
            answer = process.stdout.readline() if ready else b""
            if not answer.endswith(b"\n"):
                self._end()
                raise RequestError(
                    f"the chat template takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB",
                    param="messages",
                )
        found: dict[str, Any] = json.loads(answer)
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mstar_tp.frontend.text.template_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_RENDERER = _Renderer()


def _limit_time() -> None:
    """The kernel ends this process when it has used ``CPU_S`` more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


@lru_cache(maxsize=64)
def _compiled(source: str, tokens: str) -> ChatTemplate:
    return ChatTemplate(source, json.loads(tokens))


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(question["source"], json.dumps(question["tokens"]))
        if "messages" not in question:
            return {}
        text = template.render(question["messages"], **question["fields"])
    except MemoryError:
        return {"error": f"the chat template takes more than {MEMORY_BYTES >> 20} MiB"}
    except Exception as error:
        return {"error": str(error)[:1000]}
    if len(text) > MAX_TEXT_CHARS:
        return {"error": f"the chat template writes more than {MAX_TEXT_CHARS} characters"}
    return {"text": text}


def main() -> None:
    """Answers one line of JSON with one, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the server's to answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        _limit_time()
        sys.stdout.buffer.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

"""A server that things are done to while clients stream from it, and what each stream must say."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mstar_tp.testing.faults import AnyFault, write_faults
from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_models import make_adapter
from support.processes import Process, family, ranks

MODEL = str(Path(__file__).parents[2] / "launch" / "demo" / "model")
GUARD_S = 180.0
"""Seconds after which anything counts as hanging."""
TOKENS = 120
ASKED: tuple[dict[str, Any], ...] = (
    {"model": "base", "temperature": 0},
    {"model": "base", "temperature": 0.8, "seed": 7},
    {"model": "configured", "temperature": 0},
    {"model": "configured", "temperature": 0.8, "seed": 8, "presence_penalty": 0.5},
    {"model": "loaded", "temperature": 0},
    {"model": "loaded", "temperature": 0.8, "seed": 9, "n": 2},
)
"""The requests that clients send at once, each for TOKENS tokens."""


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {
            "prompt": list(range(20, 40)),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        self.pieces = 0
        self.moved = threading.Condition()
        self.texts: dict[int, str] = {}
        self.usage: Any = None
        self.error: str | None = None
        self.status = 0
        self.last = ""
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except httpx.HTTPError as error:
            self.error = f"the connection broke: {error!r}"
        with self.moved:
            self.pieces = 1 << 30
            self.moved.notify_all()

    def at(self, pieces: int) -> None:
        """Until it has got so many pieces, or has ended."""
        with self.moved:
            assert self.moved.wait_for(lambda: self.pieces >= pieces, GUARD_S), "it hangs"

    def ended(self) -> Self:
        self.join(GUARD_S)
        assert not self.is_alive(), f"it hangs after {self.pieces} pieces"
        return self

    def outcome(self) -> tuple[Any, ...]:
        """Everything it was told, once it has ended."""
        self.ended()
        return self.texts, self.usage, self.error, self.last

    def _read(self) -> None:
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=self._body, timeout=GUARD_S
        ) as answer:
            self.status = answer.status_code
            if self.status != 200:
                self.error = json.loads(answer.read())["error"]["message"]
                return
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.last = line.removeprefix("data: ")
                    self._take(self.last)

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            return
        tree = json.loads(data)
        if "error" in tree:
            self.error = tree["error"]["message"]
            return
        if tree.get("usage"):
            # What of the prompt was kept depends on what was asked before.
            del tree["usage"]["prompt_tokens_details"]
            self.usage = tree["usage"]
        for choice in tree["choices"]:
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
        with self.moved:
            self.pieces += 1
            self.moved.notify_all()


class World:
    """One folder: adapters, faults, the state file, and what the server puts into TMPDIR."""

    def __init__(self) -> None:
        # A short path, for the sockets in it.
        self.folder = Path(tempfile.mkdtemp(prefix="ft-"))
        self.fresh_tmp()
        self.faults = self.folder / "faults.json"
        self.set_faults()
        for seed, name in enumerate(("configured", "loaded", "spare", "other")):
            make_adapter(self.folder / name, MODEL, rank=4, seed=seed, strength=2.0)

    def fresh_tmp(self) -> None:
        """Servers started from now on put what is temporary where no other server does."""
        self.tmp = Path(tempfile.mkdtemp(prefix="t", dir=self.folder))
        self.state = self.tmp.with_suffix(".json")

    def set_faults(self, *faults: AnyFault) -> None:
        write_faults(self.faults, faults)

    def server(self, *more: str) -> Server:
        return Server(
            *(MODEL, "--served-model-name", "base", "--tp", "2", "--dtype", "float32"),
            *("--max-model-len", "256", "--max-num-seqs", "12", "--block-size", "8"),
            *("--lora", f"configured={self.folder / 'configured'}", "--max-loras", "3"),
            *("--lora-root", str(self.folder), "--state-file", str(self.state)),
            *more,
            env={
                "TMPDIR": str(self.tmp),
                "MSTAR_TP_TEST_MODE": "1",
                "MSTAR_TP_FAULTS": str(self.faults),
            },
        )

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Victim:
    """A server that serves, and the undisturbed answers to ASKED."""

    def __init__(self, world: World, *more: str) -> None:
        self.world = world
        self.server = world.server(*more)
        self.wanted: list[tuple[Any, ...]] = []

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.__exit__(kind, error, trace)

    def prepare(self) -> None:
        """Load an adapter, and note what ASKED answers while nothing happens."""
        assert self.load("loaded").status_code == 200
        self.wanted = [stream.outcome() for stream in self.ask()]
        assert all(error is None and last == "[DONE]" for _, _, error, last in self.wanted)
        assert len({str(texts) for texts, _, _, _ in self.wanted}) == len(ASKED)

    def ask(self) -> list[Stream]:
        return [Stream(self.server.url, **body) for body in ASKED]

    def streams_equal(self, happens: Callable[[], object], at: int = 10) -> None:
        """Every stream says what it says undisturbed, though ``happens`` happens amid it."""
        streams = self.ask()
        for stream in streams:
            stream.at(at)
        happens()
        for stream, wanted in zip(streams, self.wanted, strict=True):
            assert stream.outcome() == wanted, self.server.log[-4000:]

    # ------------------------------------------------------------------ looking

    @property
    def processes(self) -> list[Process]:
        return family(self.server.process.pid)

    def rank(self, number: int) -> Process:
        return ranks(self.server.process.pid)[number]

    def named(self, name: str) -> Process:
        (found,) = [process for process in self.processes if process.name == name]
        return found

    @property
    def epoch(self) -> int:
        """The number of times that the ranks were started again."""
        text = self.get("/metrics").text
        found = re.findall(r"^mstar_tp_restarts_total\{.*\} (\d+)", text, re.M)
        assert found
        return sum(map(int, found))

    def get(self, route: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}{route}", timeout=GUARD_S)

    def load(self, name: str, folder: str | None = None) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(self.world.folder / (folder or name))}
        url = f"{self.server.url}/v1/load_lora_adapter"
        return httpx.post(url, json=body, timeout=GUARD_S)

    def unload(self, name: str) -> httpx.Response:
        url = f"{self.server.url}/v1/unload_lora_adapter"
        return httpx.post(url, json={"lora_name": name}, timeout=GUARD_S)

    def until_ready(self) -> None:
        until(lambda: self.get("/health").status_code == 200)

    def is_clean(self) -> None:
        """Ranks serve, alike, and hold nothing of any request."""
        self.until_ready()
        until(lambda: all(not rank["requests"] for rank in self.state()["ranks"]))
        leader, follower = self.state()["ranks"]
        for table in ("checks", "slots", "cpu_cache", "served", "pages_used", "kv_host"):
            assert leader[table] == follower[table], table
        assert leader["pages_used"] == leader["kv_host"]["pages_used"] == 0
        assert not any(slot["holders"] for slot in leader["slots"])

    def state(self) -> Any:
        return self.get("/debug/state").json()


def until(reached: Callable[[], bool], timeout_s: float = GUARD_S) -> None:
    """Raises AssertionError: it is not within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.01)


def all_gone(processes: Sequence[Process], within_s: float) -> None:
    """None of them lives on."""
    end = time.monotonic() + within_s
    left = [one for one in processes if not one.wait_gone(max(0.0, end - time.monotonic()))]
    assert not left, f"{left} live on"


KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT

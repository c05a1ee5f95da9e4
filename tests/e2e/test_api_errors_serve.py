"""Pins how ``mstar-tp serve`` ends, with real ranks: a start that fails is one screen that names
the cause, a killed rank ends every stream with an error that names it, a signal ends all in order;
and no process, socket or folder outlives any of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mstar_tp.errors import MstarError
from mstar_tp.testing.server import Server

MODEL = str(Path(__file__).parents[2] / "demo" / "model")
FLAGS = ("--tp", "2", "--device", "cpu", "--threads", "1", "--served-model-name", "base")
SMALL = ("--max-model-len", "512", "--max-num-seqs", "8")
BODY: dict[str, Any] = {
    "model": "base",
    "prompt": "Once",
    "max_tokens": 500,
    "stream": True,
    "ignore_eos": True,
}
STOP_S = 60.0
"""A server that takes longer to end hangs."""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Everything the server makes goes here: its sockets' paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="e2e-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def serve(scratch: Path, *more: str) -> Server:
    return Server(MODEL, *FLAGS, *SMALL, *more, env={"TMPDIR": str(scratch)})


def ranks(scratch: Path) -> dict[int, str]:
    """pid -> its rank (empty for the launcher), of every process that belongs to this server."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "mstar_tp.worker" in command and str(scratch) in command:
            rank = [text.partition("=")[2] for text in variables if text.startswith("RANK=")]
            found[int(folder.name)] = rank[0] if rank else ""
    return found


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.began = threading.Event()
        self.events: list[Any] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=BODY, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    self.events.append(data if data == "[DONE]" else json.loads(data))
                    self.began.set()

    def ended(self) -> Any:
        """The last event before [DONE]."""
        self.join(STOP_S)
        assert not self.is_alive() and self.events[-1] == "[DONE]"
        return self.events[-2]


def nothing_left(scratch: Path) -> None:
    assert ranks(scratch) == {}
    assert list(scratch.iterdir()) == []


def test_a_start_that_fails_is_one_screen_that_names_the_cause(scratch: Path) -> None:
    with (
        pytest.raises(MstarError) as failed,
        serve(scratch, "--lora", f"ghost={scratch / 'missing'}"),
    ):
        pass
    text = str(failed.value)
    (shown,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "rank" in shown and "missing" in shown
    assert "Traceback" not in text
    assert len(text.splitlines()) < 40
    nothing_left(scratch)


def test_a_killed_rank_ends_streams_with_its_name_and_the_server_with_1(scratch: Path) -> None:
    with serve(scratch) as server:
        stream = Stream(server.url)
        assert stream.began.wait(STOP_S)
        (victim,) = [pid for pid, rank in ranks(scratch).items() if rank == "1"]
        os.kill(victim, signal.SIGKILL)
        error = stream.ended()["error"]
        assert "rank 1" in error["message"] and error["type"] == "server_error"
        assert server.process.wait(STOP_S) == 1
    nothing_left(scratch)


def test_signals_end_everything_in_order_and_twice_is_once(scratch: Path) -> None:
    with serve(scratch, "--shutdown-grace", "0.5") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        streams = [Stream(server.url) for _ in range(4)]
        assert all(stream.began.wait(STOP_S) for stream in streams)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        ends = [stream.ended() for stream in streams]
        assert all("error" in end or end["choices"][0]["finish_reason"] for end in ends)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0
        assert "Traceback" not in server.log
    nothing_left(scratch)


def test_a_signal_while_it_starts_leaves_nothing(scratch: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mstar_tp", "serve", MODEL, *FLAGS, *SMALL, "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert process.stderr is not None
    assert any("rank 1: loading" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=STOP_S)
    assert process.returncode == 0 and "Traceback" not in rest
    nothing_left(scratch)

"""Pins ``mstar-tp frontend``, which waits for ranks that somebody else starts and outlives them.

It serves the ranks that come next, and leaves nothing behind when a signal ends it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_kit import GUARD_S, WORLD_SIZE, FakeRanks
from support.frontend_kit import byte_level_folder

from mstar_tp.common.version import VERSION
from mstar_tp.config import build_config
from mstar_tp.config.server_flags import DEFAULT_INSTANCE
from mstar_tp.wire.handshake import Hello

BODY: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 3}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="fe-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Command:
    """The process, and what it says on stdout."""

    def __init__(self, scratch: Path) -> None:
        self.model = str(byte_level_folder(scratch / "model"))
        (scratch / "tmp").mkdir()
        command = [sys.executable, "-m", "mstar_tp", "frontend", self.model, "--listen", "ipc"]
        command += ["--tp", str(WORLD_SIZE), "--served-model-name", "tiny", "--port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=(scratch / "log").open("wb"),
            text=True,
            env={**os.environ, "TMPDIR": str(scratch / "tmp")},
        )

    def says(self, pattern: str) -> str:
        """The first group of the next line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(pattern, line)
            if found is not None:
                return found[1]
        raise AssertionError(f"it ended before it said {pattern}")

    def ranks(self, address: str) -> FakeRanks:
        engine = {"model": self.model, "tensor_parallel_size": WORLD_SIZE}
        hello = Hello(
            role="rank",
            rank=-1,
            world_size=WORLD_SIZE,
            instance_id=DEFAULT_INSTANCE,
            config_digest=build_config({"engine": engine}, source="test").digest(),
            version=VERSION,
        )
        return FakeRanks(address, hello)


@pytest.fixture
def command(scratch: Path) -> Iterator[Command]:
    command = Command(scratch)
    yield command
    command.process.kill()
    command.process.communicate(timeout=GUARD_S)


def test_it_outlives_its_ranks_and_serves_the_next(command: Command, scratch: Path) -> None:
    address = command.says(r"Waiting for 2 ranks at (\S+)$")
    first = command.ranks(address)
    url = command.says(r"^Serving tiny on (\S+)$")
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
    first.kill()
    command.says("(waiting for them to be started again)")
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503 and "are being started again: " in health.text
    second = command.ranks(address)
    assert command.says(r"^Serving tiny on (\S+)$") == url
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(GUARD_S) == 0
    second.kill()
    assert "SIGTERM: stopping: no request runs, the ranks are told to stop" in _log(scratch)
    assert list((scratch / "tmp").iterdir()) == []


def test_a_signal_while_it_waits_ends_it_with_0(command: Command, scratch: Path) -> None:
    command.says(r"Waiting for 2 ranks at (\S+)$")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(GUARD_S) == 0
    assert "SIGINT: stopping while the ranks start" in _log(scratch)
    assert list((scratch / "tmp").iterdir()) == []


def _log(scratch: Path) -> str:
    return (scratch / "log").read_text()

"""Pins that ``launch/ray_serve.py`` serves two instances behind one address, sends an adapter's
requests where the adapter is, passes streams and errors on as they are, and ends in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from support.failure_kit import GUARD_S, until

pytest.importorskip("ray")

from support.processes import family

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "launch" / "demo"
NAMES = ("pirate", "robot")
HELLO = "who are you"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    # A short path: Ray's sockets lie there. A cluster of its own, whatever else the machine runs.
    scratch = tmp_path_factory.mktemp("r")
    env = {
        **os.environ,
        "RAY_TMPDIR": str(scratch) if len(str(scratch)) < 40 else "/tmp",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "150",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        *(sys.executable, str(ROOT / "launch/ray_serve.py"), str(DEMO / "model")),
        *("--replicas", "2", "--port", str(port), "--host", "127.0.0.1"),
        *("--served-model-name", "base", "--device", "cpu", "--max-model-len", "256"),
        *(word for name in NAMES for word in ("--lora", f"{name}={DEMO / 'adapters' / name}")),
    ]
    log = scratch / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        found = f"http://127.0.0.1:{port}"
        wait_ready(found, process, log)
        yield found
        below = family(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 0, log.read_text()
        assert all(one.wait_gone(GUARD_S) for one in below)
    finally:
        process.kill()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 2 * GUARD_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=GUARD_S).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(url: str, name: str) -> tuple[str, str]:
    """The answer, and which replica gave it."""
    body = {"model": name, "prompt": HELLO, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=GUARD_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.headers["x-mstar-replica"]


def test_every_name_is_served_and_an_adapter_stays_where_it_is(url: str) -> None:
    texts = {name: ask(url, name)[0] for name in ("base", *NAMES)}
    assert len(set(texts.values())) == len(texts)
    for name in NAMES:
        # Replicas tell Serve what they have now and then: from then on it is always the same one.
        until(lambda name=name: len({ask(url, name)[1] for _ in range(8)}) == 1)
        assert ask(url, name)[0] == texts[name]
    both = {ask(url, "base")[1] for _ in range(40)}
    assert len(both) == 2, "requests on no adapter go to both"


def test_streams_and_errors_come_through_as_they_are(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=GUARD_S)
    pieces = client.completions.create(
        model="pirate", prompt=HELLO, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == ask(url, "pirate")[0]
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt=HELLO)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="base", prompt=HELLO, max_tokens=-1)
    assert {card.id for card in client.models.list()} == {"base", *NAMES}
    refused = httpx.post(f"{url}/v1/load_lora_adapter", json={}, timeout=GUARD_S)
    assert refused.status_code == 400 and "one replica" in refused.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=GUARD_S).status_code == 400

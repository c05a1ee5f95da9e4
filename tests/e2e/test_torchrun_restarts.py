"""Pins that requests outlive ranks that plain torchrun starts: with ``--max-restarts``, and when it
is asked to stop (they end on its ranks, if they can) and started anew, whose count of restarts
begins at 0 again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from support.failure_kit import GUARD_S, MODEL, Stream, until
from support.processes import Process, family

FLAGS = (MODEL, "--tp", "2", "--dtype", "float32", "--max-model-len", "256")


@contextmanager
def running(*command: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    try:
        yield process
    finally:
        below = family(process.pid)
        process.terminate()
        process.wait(GUARD_S)
        assert all(one.wait_gone(GUARD_S) for one in below)


def says(process: subprocess.Popen[str], start: str) -> str:
    """What follows ``start`` in the next line that has it."""
    assert process.stdout is not None
    for line in process.stdout:
        if start in line:
            return line.partition(start)[2].strip()
    raise AssertionError(f"it ended before it said {start}")


def healthy(url: str) -> bool:
    return httpx.get(f"{url}/health").status_code == 200


def a_rank(agent: subprocess.Popen[str], number: str) -> Process:
    for process in family(agent.pid):
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        if f"RANK={number}".encode() in variables:
            return process
    raise AssertionError(f"there is no rank {number}")


def test_torchrun_starts_ranks_again_and_streams_go_on() -> None:
    with tempfile.TemporaryDirectory(prefix="tr-") as scratch:
        env = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
        serve = ("mstar_tp", "frontend", *FLAGS, "--served-model-name", "base", "--port", "0")
        with running(*serve, "--listen", "ipc", env=env) as frontend:
            address = says(frontend, "Waiting for 2 ranks at ")
            agent_args = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
            worker = ("-m", "mstar_tp.worker", *FLAGS, "--frontend", address)
            agent = ("torch.distributed.run", *agent_args, *worker)
            with running(*agent, env=env) as first:
                url = says(frontend, "Serving base on ")
                bodies = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
                wanted = [Stream(url, model="base", **body).outcome() for body in bodies]
                streams = [Stream(url, model="base", **body) for body in bodies]
                for stream in streams:
                    stream.at(10)
                a_rank(first, "1").send(9)
                assert [stream.outcome() for stream in streams] == wanted
                until(lambda: healthy(url))
                streams = [Stream(url, model="base", **body) for body in bodies]
                for stream in streams:
                    stream.at(10)
                # torchrun passes it on: the ranks end what runs on them, and leave.
                first.terminate()
                until(lambda: not healthy(url))
                late = Stream(url, model="base", **bodies[1])
                assert first.wait(GUARD_S) != 0 and late.pieces == 0
            with running(*agent, env=env):
                # A machine may be too slow for the first two to end before torchrun kills.
                assert [stream.outcome() for stream in (*streams, late)] == [*wanted, wanted[1]]
                metrics = httpx.get(f"{url}/metrics").text
                restarts = re.findall(r"^mstar_tp_restarts_total\{(.*)\} (\d+)", metrics, re.M)
                assert ('reason="asked_to_stop"', "1") in restarts
                assert sum(int(count) for _, count in restarts) >= 2

"""Measure what preparing long prompts costs the streams that run meanwhile, and idle connections.

    python scripts/bench_prepare.py                   ranks that compute nothing, then a tiny model
    python scripts/bench_prepare.py --threads 1       prepared on the event loop, for comparison

Eight streams run; the gaps between their events are taken alone, then while ``--clients`` send
long prompts one after the other, then alone again. Prompts are refused once they are tokenized
(they have more tokens than the context), so that all they cost is preparing them. The ranks of the
first part are one process that makes a token every 10 ms: what is left is the frontend's. The
second part computes, so tokenizing also takes processor time from the ranks of this machine.
Last, ``--connections`` connections that ask for nothing: the frontend's memory and the gaps again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq
from lean_client import LeanClient

from mstar_tp.common.version import VERSION
from mstar_tp.config import build_config
from mstar_tp.config.server_flags import DEFAULT_INSTANCE
from mstar_tp.testing.server import Server
from mstar_tp.wire.channels import ConductorLink
from mstar_tp.wire.commands import Abort, NewRequest, Shutdown
from mstar_tp.wire.handshake import Hello
from mstar_tp.wire.reports import Ready, Token, Tokens

STREAMS = 8
STEP_S = 0.01
CONTEXT = 16_384
MODEL = Path(__file__).resolve().parent.parent / "launch" / "demo" / "model"


def fake_rank(address: str, hello: bytes) -> None:
    """Makes a token of every live request every ``STEP_S``; the process of one rank."""
    link = ConductorLink(zmq.Context(), address, msgspec.msgpack.decode(hello, type=Hello))
    link.start(60)
    sizes = {"vocab_size": 4096, "max_model_len": CONTEXT, "num_pages": 8, "page_size": 16}
    link.send(Ready(rank=0, eos_token_ids=(), targets=(), **sizes))
    live: dict[int, int] = {}
    poller = zmq.Poller()
    poller.register(link.poll_socket, zmq.POLLIN)
    due = time.monotonic()
    while link.lost is None:
        poller.poll(max(0, int((due - time.monotonic()) * 1000)))
        for message in link.receive():
            match message:
                case NewRequest():
                    live[message.rid] = message.params.max_tokens
                case Abort(rid=rid):
                    live.pop(rid, None)
                case Shutdown():
                    return
        if time.monotonic() < due:
            continue
        due = max(due + STEP_S, time.monotonic())  # what was missed is not made up for at once
        tokens = []
        for rid in list(live):
            live[rid] -= 1
            finish = None if live[rid] else "length"
            tokens.append(Token(rid=rid, token=300, slot=0, finish=finish))
            if finish:
                del live[rid]
        if tokens:
            link.send(Tokens(tp_seq=0, tokens=tuple(tokens)))


@contextmanager
def fake_server(threads: int | None) -> Iterator[tuple[str, int]]:
    """A real frontend before ``fake_rank``: its address and process."""
    command = [sys.executable, "-m", "mstar_tp", "frontend", str(MODEL), "--listen", "ipc"]
    command += ["--served-model-name", "base", "--port", "0"]
    command += [] if threads is None else ["--prepare-threads", str(threads)]
    frontend = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert frontend.stdout is not None
    address = _said(frontend.stdout, r"Waiting for 1 rank at (\S+)$")
    digest = build_config({"engine": {"model": str(MODEL)}}, source="bench").digest()
    hello = Hello(
        role="rank", rank=0, world_size=1, instance_id=DEFAULT_INSTANCE,
        config_digest=digest, version=VERSION, group="bench",
    )  # fmt: skip
    rank = multiprocessing.get_context("spawn").Process(
        target=fake_rank, args=(address, msgspec.msgpack.encode(hello)), daemon=True
    )
    rank.start()
    try:
        yield _said(frontend.stdout, r"^Serving base on (\S+)$"), frontend.pid
    finally:
        frontend.terminate()
        frontend.wait(60)
        rank.join(10)


def _said(lines: Iterator[str], pattern: str) -> str:
    for line in lines:
        if found := re.search(pattern, line):
            return found[1]
    raise RuntimeError(f"the frontend ended before it said {pattern}")


async def gaps(url: str, seconds: float) -> list[float]:
    """Seconds between events of ``STREAMS`` streams."""
    found: list[float] = []
    end = time.perf_counter() + seconds

    async def stream() -> None:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        body = {"model": "base", "prompt": [5] * 8, "max_tokens": 200, "stream": True}
        data = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        while time.perf_counter() < end:
            writer.write(head.encode() + data)
            last = 0.0
            while (line := await reader.readline()) != b"data: [DONE]\n":
                assert line, "the stream broke"
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    if last:
                        found.append(now - last)
                    last = now
            while await reader.readline() != b"0\r\n":
                pass
            await reader.readline()
        writer.close()

    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return found


async def beside(url: str, seconds: float, clients: int, body: bytes) -> tuple[list[float], float]:
    """The gaps while ``clients`` send ``body`` one after the other, and how many a second ended."""
    client, count, going = LeanClient(url, "/v1/completions", body), 0, True

    async def ask() -> None:
        nonlocal count
        while going:
            await client.ask()
            count += 1

    asks = [asyncio.ensure_future(ask()) for _ in range(clients)]
    found = await gaps(url, seconds)
    rate, going = count / seconds, False
    await asyncio.gather(*asks)
    client.close()
    return found, rate


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def told(what: str, found: list[float]) -> None:
    ordered = sorted(found)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    print(f"{what:44} p50 {p50 * 1e3:6.1f}  p95 {p95(found) * 1e3:6.1f}  p99 {p99 * 1e3:6.1f} ms")


async def measure(url: str, args: argparse.Namespace, refused: bytes, other: bytes) -> None:
    await gaps(url, 1)
    before = await gaps(url, args.seconds)
    told("alone", before)
    for what, body in (("prompts refused once tokenized", refused), ("max_tokens 1", other)):
        found, rate = await beside(url, args.seconds, args.clients, body)
        told(f"{args.clients} x {what}, {rate:.1f}/s", found)
        after = await gaps(url, args.seconds)
        told("alone again", after)
        print(f"    p95 over that alone: {p95(found) / max(p95(before), p95(after)):.2f}")
        before = after


async def idle(url: str, pid: int, args: argparse.Namespace) -> None:
    memory = Path(f"/proc/{pid}/status")

    def resident_kb() -> int:
        found = re.search(r"VmRSS:\s+(\d+)", memory.read_text())
        return int(found[1]) if found else 0

    told("no idle connection", await gaps(url, args.seconds))
    first, parts = resident_kb(), urlsplit(url)
    ask = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    opened = []
    for _ in range(args.connections):
        connection = socket.create_connection((parts.hostname, parts.port))
        connection.sendall(ask)
        connection.recv(4096)
        opened.append(connection)
    told(f"{args.connections} idle connections", await gaps(url, args.seconds))
    grown = resident_kb() - first
    print(f"    the frontend grew by {grown} kB, {grown / args.connections:.1f} kB a connection")
    for connection in opened:
        connection.close()


def text(chars: int) -> str:
    return ("The quick brown fox says hello to the lazy dog and walks on. " * chars)[:chars]


def _body(prompt: str) -> bytes:
    return json.dumps({"model": "base", "prompt": prompt, "max_tokens": 1}).encode()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--part", choices=("fake", "model", "idle"), action="append")
    args = parser.parse_args()
    parts = args.part or ["fake", "model", "idle"]
    if "fake" in parts or "idle" in parts:
        with fake_server(args.threads) as (url, pid):
            if "fake" in parts:
                print("ranks that compute nothing")
                bodies = (_body(text(60_000)), _body(text(24_000)))
                asyncio.run(measure(url, args, *bodies))
            if "idle" in parts:
                asyncio.run(idle(url, pid, args))
    if "model" in parts:
        more = () if args.threads is None else ("--prepare-threads", str(args.threads))
        with Server(str(MODEL), "--served-model-name", "base", "--tp", "2", *more) as server:
            print("the demo model, two ranks on these cores")
            asyncio.run(measure(server.url, args, _body(text(3_000)), _body(text(500))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A test for each row of the failure model: what must happen when something breaks, with real
processes, while clients stream. One server lives through most of it.

Every stream must say exactly what it says undisturbed: greedy and seeded, on the base, on an
adapter of the configuration and on one loaded at run time, its usage too.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.failure_kit import (
    ASKED,
    GO_ON,
    GUARD_S,
    KILL,
    STOP,
    Stream,
    Victim,
    World,
    all_gone,
    until,
)

from mstar_tp.common.errors import MstarError
from mstar_tp.common.run_folder import PREFIX
from mstar_tp.testing.faults import BadFrame, Crash, SlowRead, StuckCollective

NOTICED_S = 5.0
"""How soon a death must be noticed."""
HANGS_S = 2.0
"""The server's --step-timeout."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def victim(world: World) -> Iterator[Victim]:
    """Its first start is disturbed, too."""
    world.set_faults(Crash(point="load", rank=1, epoch=0))
    more = ("--max-restarts", "100", "--step-timeout", str(HANGS_S), "--max-queue", "64")
    with Victim(world, *more) as victim:
        world.set_faults()
        victim.prepare()
        yield victim
        assert "Traceback" not in _front_log(victim)


@pytest.fixture
def alone(world: World) -> Iterator[World]:
    """For servers of their own; nothing that they put anywhere may be left."""
    world.fresh_tmp()
    world.set_faults()
    yield world
    world.set_faults()
    assert list(world.tmp.iterdir()) == []


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "victim" in request.fixturenames:
        victim: Victim = request.getfixturevalue("victim")
        victim.world.set_faults()
        victim.is_clean()


def _front_log(victim: Victim) -> str:
    return "\n".join(line for line in victim.server.log.splitlines() if "role=frontend" in line)


# ---------------------------------------------- a follower or the leader is killed (SIGKILL)


@pytest.mark.parametrize("name", ["mstar-rank1", "mstar-rank0", "mstar-forks"])
def test_a_follower_or_the_leader_is_killed(victim: Victim, name: str) -> None:
    before = [process for process in victim.processes if process.rank is not None]
    victim.streams_equal(lambda: victim.named(name).send(KILL))
    all_gone(before, within_s=0)
    assert len(victim.processes) == 4, "the frontend, what starts ranks, and two ranks"


@pytest.mark.parametrize("name", ["mstar-rank1", "mstar-rank0", "mstar-forks"])
def test_a_rank_hangs(victim: Victim, name: str) -> None:
    """SIGSTOP: its connections stay open, and nobody hears of it. What starts ranks is needed for
    the next ones only.
    """
    hung = victim.named(name)

    def stop() -> None:
        hung.send(STOP)
        if name == "mstar-forks":
            victim.rank(1).send(KILL)

    victim.streams_equal(stop)
    all_gone([hung], within_s=NOTICED_S)


def test_the_frontend_hangs_for_longer_than_its_ranks_wait(victim: Victim) -> None:
    before = [process for process in victim.processes if process.rank is not None]
    frontend = victim.processes[0]

    def stop() -> None:
        frontend.send(STOP)
        all_gone(before, within_s=NOTICED_S + 2)
        frontend.send(GO_ON)

    victim.streams_equal(stop)


def test_ranks_are_killed_while_they_start(victim: Victim) -> None:
    epoch = victim.epoch
    victim.world.set_faults(
        Crash(point="start", rank=0, epoch=epoch + 1),
        Crash(point="warm-up", rank=1, epoch=epoch + 2),
        Crash(point="ready", rank=1, epoch=epoch + 3),
    )
    victim.streams_equal(lambda: victim.rank(1).send(KILL))
    assert victim.epoch >= epoch + 4


def test_ranks_are_killed_inside_steps(victim: Victim) -> None:
    epoch = victim.epoch
    faults = (
        Crash(point="step", rank=1, epoch=epoch),
        Crash(point="forward", rank=0, epoch=epoch + 1),
        Crash(point="committed", rank=1, epoch=epoch + 2),
    )
    victim.streams_equal(lambda: victim.world.set_faults(*faults))
    assert victim.epoch >= epoch + 3


def test_a_rank_is_killed_while_an_adapter_is_loaded(victim: Victim) -> None:
    epoch = victim.epoch
    victim.world.set_faults(Crash(point="check", rank=1, epoch=epoch))
    assert victim.load("spare").status_code == 200
    assert victim.epoch >= epoch + 1
    assert Stream(victim.server.url, model="spare").ended().error is None
    assert victim.unload("spare").status_code == 200


def test_what_happens_to_adapters_while_the_ranks_are_down_is_so_afterwards(
    victim: Victim,
) -> None:
    victim.world.set_faults(Crash(point="ready", rank=0, epoch=victim.epoch + 1))
    answers: list[httpx.Response] = []

    def happens() -> None:
        victim.rank(0).send(KILL)
        until(lambda: victim.get("/health").status_code == 503)
        answers.append(victim.unload("loaded"))
        answers.append(victim.load("spare"))

    victim.streams_equal(happens)
    assert [answer.status_code for answer in answers] == [200, 200]
    models = {card["id"] for card in victim.get("/v1/models").json()["data"]}
    assert models == {"base", "configured", "spare"}
    assert victim.unload("spare").status_code == victim.load("loaded").status_code == 200


# ------------------------------------------------- order-channel gap, hash mismatch, collectives


def test_an_order_channel_gap(victim: Victim) -> None:
    """On the way to the followers, and to the frontend."""
    epoch = victim.epoch
    faults = (
        BadFrame(what="late", rank=0, epoch=epoch),
        BadFrame(what="doubled", stream="reports", rank=0, epoch=epoch + 1),
    )
    victim.streams_equal(lambda: victim.world.set_faults(*faults))
    assert victim.epoch >= epoch + 2
    assert "frames were lost" in victim.server.log


def test_the_last_frame_of_a_stream_is_lost(victim: Victim) -> None:
    """Nothing comes behind it that would show the gap, and somebody waits for what it said."""
    before = victim.epoch
    victim.world.set_faults(
        BadFrame(what="dropped", of="Advance", rank=0, epoch=before),
        BadFrame(what="dropped", stream="reports", of="LoadResult", rank=1, epoch=before + 1),
    )
    assert victim.load("spare").status_code == 200
    epoch = victim.epoch
    assert epoch >= before + 2
    victim.world.set_faults(
        BadFrame(what="dropped", stream="copies", of="CopyIn", rank=1, epoch=epoch),
        BadFrame(what="dropped", stream="commands", of="NewRequest", rank=0, epoch=epoch + 1),
    )
    assert Stream(victim.server.url, model="spare").ended().error is None
    assert victim.epoch >= epoch + 2
    assert victim.unload("spare").status_code == 200


def test_a_collective_hangs(victim: Victim) -> None:
    epoch = victim.epoch
    fault = StuckCollective(rank=1, epoch=epoch)
    victim.streams_equal(lambda: victim.world.set_faults(fault))
    assert f"has run for more than {HANGS_S:g} s" in victim.server.log


# ------------------------------------- adapter file missing, truncated, other digest; slow storage


def test_an_adapter_file_that_is_another_after_a_restart_fails_its_requests_alone(
    victim: Victim,
) -> None:
    folder = victim.world.folder
    shutil.copytree(folder / "loaded", folder / "kept")
    shutil.copytree(folder / "spare", folder / "changes")
    assert victim.load("changes").status_code == victim.load("vanishes", "kept").status_code == 200
    streams: list[Stream] = []

    def harm() -> None:
        for name in ("changes", "vanishes"):
            streams.append(Stream(victim.server.url, model=name, max_tokens=220))
        for stream in streams:
            stream.at(2)
        victim.world.set_faults(StuckCollective(rank=1))  # so that none ends meanwhile
        shutil.rmtree(folder / "kept")
        shutil.copy(folder / "other" / "adapter_model.safetensors", folder / "changes")
        victim.rank(1).send(KILL)
        victim.world.set_faults()

    victim.streams_equal(harm)
    changed, vanished = (str(stream.ended().error) for stream in streams)
    assert "'changes'" in changed and "digest" in changed
    assert "'vanishes'" in vanished and "no such folder" in vanished
    assert victim.unload("changes").status_code == 200
    assert victim.unload("vanishes").status_code == 404, "it is served no more"


def test_slow_storage_on_one_rank(victim: Victim) -> None:
    assert victim.load("spare").status_code == 200
    victim.world.set_faults(SlowRead(rank=1, adapter="spare", seconds=3600))
    waits = Stream(victim.server.url, model="spare")
    victim.streams_equal(lambda: None)
    assert waits.is_alive() and waits.pieces == 0
    victim.world.set_faults()
    assert waits.ended().error is None
    assert victim.unload("spare").status_code == 200


def test_a_full_pool(victim: Victim) -> None:
    """More adapters than slots, and a death meanwhile: nobody is refused, nobody starves."""
    names = [f"many-{i}" for i in range(5)]
    for i, name in enumerate(names):
        assert victim.load(name, ("spare", "other")[i % 2]).status_code == 200
    more = {"max_tokens": 20, "temperature": 0}
    streams = [Stream(victim.server.url, model=name, **more) for name in names * 2]
    victim.streams_equal(lambda: victim.rank(0).send(KILL))
    texts = [stream.ended().texts for stream in streams]
    assert all(stream.error is None for stream in streams)
    assert texts[:5] == texts[5:] and texts[0] == texts[2] and texts[0] != texts[1]
    for name in names:
        assert victim.unload(name).status_code == 200


# -------------------------------------------------------------- clients, overload, bad requests


def test_a_client_disconnects(victim: Victim) -> None:
    """Also while the ranks are down: the next ones never hear of its request."""
    url = f"{victim.server.url}/v1/completions"
    body = {"model": "loaded", "prompt": [5] * 20, "max_tokens": 200, "ignore_eos": True}

    def leave() -> None:
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=GUARD_S) as answer:
            next(answer.iter_lines())
            victim.rank(1).send(KILL)

    victim.streams_equal(leave)
    victim.is_clean()


def test_a_bad_request(victim: Victim) -> None:
    for body, status in (({"model": "nobody"}, 404), ({"model": "base", "max_tokens": -1}, 400)):
        answer = httpx.post(f"{victim.server.url}/v1/completions", json={"prompt": "x"} | body)
        assert answer.status_code == status and "Traceback" not in answer.text


def test_overload(victim: Victim) -> None:
    """Past the bound the answer is 503 at once, also while the ranks are down."""
    with ThreadPoolExecutor(40) as pool:

        def ask(i: int) -> httpx.Response:
            body = {"model": "base", "prompt": [i] * 8, "max_tokens": 8, "n": 8}
            url = f"{victim.server.url}/v1/completions"
            return httpx.post(url, json=body, timeout=GUARD_S)

        futures = [pool.submit(ask, i) for i in range(40)]
        victim.rank(0).send(KILL)
        answers = [future.result() for future in futures]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused and len(refused) + sum(a.status_code == 200 for a in answers) == len(answers)
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}


# ------------------------------------------------------------ the frontend's death, and SIGTERM


def test_the_frontend_is_killed_and_the_next_start_is_clean(alone: World) -> None:
    """Its ranks end at once; the next one finds its adapters again, and nothing else; SIGTERM
    then finishes what runs, though a rank dies meanwhile.
    """
    with Victim(alone) as first:
        first.prepare()
        assert first.unload("configured").status_code == 200
        assert first.load("configured", "spare").status_code == 200
        streams = first.ask()
        streams[0].at(10)
        processes = first.processes
        processes[0].send(KILL)
        all_gone(processes, within_s=NOTICED_S)
        left = list(alone.tmp.glob(f"{PREFIX}*"))
        assert left, "a killed process cannot clean up"
        for stream, wanted in zip(streams, first.wanted, strict=True):
            assert "broke" in str(stream.ended().error) or stream.outcome() == wanted
    with Victim(alone, "--shutdown-grace", "30") as second:
        assert not any(path.exists() for path in left)
        roots = {card["id"]: card["root"] for card in second.get("/v1/models").json()["data"]}
        assert roots["loaded"] == str(alone.folder / "loaded")
        assert roots["configured"] == str(alone.folder / "spare")
        streams = second.ask()
        for stream in streams:
            stream.at(10)
        alone.set_faults(StuckCollective(rank=1, epoch=0))  # so that none ends meanwhile
        second.server.process.terminate()
        until(lambda: second.get("/health").json()["error"]["code"] == "draining")
        assert Stream(second.server.url, model="base").ended().status == 503
        second.rank(1).send(KILL)
        for body, stream, wanted in zip(ASKED, streams, first.wanted, strict=True):
            if body["model"] != "configured":
                assert stream.outcome() == wanted
            assert stream.ended().error is None
        processes = second.processes
        assert second.server.stop() == 0
        all_gone(processes, within_s=0)


def test_sigterm_ends_what_the_grace_time_does_not_finish(alone: World) -> None:
    """And twice is once; a rank that dies as it is told to stop changes nothing."""
    alone.set_faults(Crash(point="shutdown", rank=1))
    with Victim(alone, "--shutdown-grace", "0.3") as victim:
        streams = [Stream(victim.server.url, model="base", max_tokens=230) for _ in range(4)]
        for stream in streams:
            stream.at(5)
        processes = victim.processes
        victim.server.process.terminate()
        victim.server.process.send_signal(2)
        errors = [stream.ended().error for stream in streams]
        assert all(error is None or "shutting down" in error for error in errors)
        assert victim.server.stop() == 0
        assert "Traceback" not in _front_log(victim)
    all_gone(processes, within_s=0)


def test_a_signal_while_it_starts_leaves_nothing(alone: World) -> None:
    server = alone.server()
    process = subprocess.Popen(
        server.command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=server.environ,
    )
    assert process.stderr is not None
    assert any("rank 1: loading" in line for line in process.stderr)
    process.terminate()
    _, rest = process.communicate(timeout=GUARD_S)
    assert process.returncode == 0 and "Traceback" not in rest


def test_a_bad_adapter_at_the_start(alone: World) -> None:
    """One screen that names the cause; no second try."""
    with (
        pytest.raises(MstarError) as failed,
        alone.server("--lora", f"ghost={alone.folder / 'missing'}"),
    ):
        pass
    text = str(failed.value)
    (shown,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "rank" in shown and "missing" in shown
    assert "Traceback" not in text and "starting them again" not in text
    assert len(text.splitlines()) < 40


def test_ranks_that_cannot_be_started_again_end_the_server_with_the_cause(alone: World) -> None:
    with Victim(alone, "--max-restarts", "1") as victim:
        stream = Stream(victim.server.url, model="base", max_tokens=200)
        stream.at(10)
        stuck = StuckCollective(rank=1, epoch=0)  # so that it does not end meanwhile
        alone.set_faults(Crash(point="load", rank=1), stuck)
        victim.rank(1).send(KILL)
        assert "rank 1" in str(stream.ended().error)
        assert victim.server.process.wait(GUARD_S) == 1

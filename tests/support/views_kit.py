"""Two real ranks that see files of their own under one relative path, as machines do."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mstar_tp.config import ServeConfig, build_config
from mstar_tp.testing.faults import AnyFault, write_faults
from mstar_tp.testing.tiny_models import make_adapter, make_tiny_model
from mstar_tp.wire.commands import Load, LoadAbort, LoadCommit, Unload
from mstar_tp.wire.reports import AdapterDigest, LoadDone, LoadResult
from mstar_tp.wire.states import StateReport
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams
from support.instance import Generation, Instance

WEIGHTS = "adapter_model.safetensors"
PROMPT = tuple(range(3, 14))
SHORT = SamplingParams(max_tokens=6, temperature=0)
LONG = SamplingParams(max_tokens=48, temperature=0)
RANKS = (0, 1)
MANY = 1000
"""Questions to a rank, each of which gives it a turn."""
Damage = Callable[[Path], None]


class Views:
    """The model, adapters of two kinds of weights, and what each rank sees of them.

    ``NAMES`` are served from the start, with weights ``a``; ``b`` are other weights of the same
    shape.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.model = make_tiny_model(folder / "model", "llama", seed=7)
        for seed, weights in enumerate("ab"):
            make_adapter(folder / weights, self.model, rank=4, seed=seed)
        self.ranks = [folder / f"view{rank}" for rank in RANKS]
        self.faults = folder / "faults.json"
        write_faults(self.faults, [])
        for name in NAMES:
            self.put(name, "a")

    def put(self, name: str, weights: str, ranks: Sequence[int] = RANKS) -> None:
        """Give ranks adapter ``name`` with the weights called ``weights``."""
        for rank in ranks:
            shutil.copytree(self.folder / weights, self.ranks[rank] / name, dirs_exist_ok=True)

    def set_faults(self, *faults: AnyFault) -> None:
        write_faults(self.faults, faults)

    def config(self, *, slots: int, held: int) -> ServeConfig:
        tree = {
            "model": str(self.model),
            "tensor_parallel_size": 2,
            "threads": 1,
            "max_model_len": 96,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 4,
            "lora": {
                "adapters": {name: name for name in NAMES},
                "max_loras": slots,
                "max_cpu_loras": held,
                "max_lora_rank": 8,
            },
        }
        return build_config({"engine": tree}, source="test")

    def start(self, *, slots: int, held: int) -> Instance:
        config = self.config(slots=slots, held=held)
        return Instance(config, views=self.ranks, faults=self.faults)


class Driver:
    """Requests and loads on one instance, by name."""

    _loads = itertools.count()

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def ask(
        self, name: str | None, generation: int = FIRST_GENERATION, params: SamplingParams = SHORT
    ) -> int:
        """Open a request; its number."""
        key = None if name is None else AdapterKey(name, generation)
        return self.instance.submit(PROMPT, params, key)

    def answer(self, name: str | None, generation: int = FIRST_GENERATION) -> Generation:
        return self.instance.result(self.ask(name, generation))

    def digest(self, name: str, generation: int = FIRST_GENERATION) -> str:
        """Wait until the first copies of an adapter are in on both ranks; their digest."""
        key = AdapterKey(name, generation)
        while (report := self.instance.wait_report(AdapterDigest)[0][1]).key != key:
            pass
        return report.digest

    def evict(self) -> None:
        """Leave no adapter in a slot or in host memory but those that nothing happens to."""
        for name in WELL:
            assert self.answer(name).failed is None

    def announce(self, name: str, generation: int, path: str | None = None) -> int:
        """Announce a load; its number."""
        load_id = next(self._loads)
        key = AdapterKey(name, generation)
        self.instance.send(Load(load_id=load_id, key=key, path=path or name))
        return load_id

    def validations(self, count: int = 1) -> dict[int, dict[int, str | None]]:
        """The answers of both ranks to ``count`` announced loads: load -> rank -> cause."""
        found: dict[int, dict[int, str | None]] = {}
        for rank, result in self.instance.wait_report(LoadResult, count * len(RANKS)):
            found.setdefault(result.load_id, {})[rank] = result.cause
        return found

    def commit(self, load_id: int) -> str | None:
        """Commit a load; why the leader did not apply it, or None."""
        self.instance.send(LoadCommit(load_id=load_id))
        ((_, done),) = self.instance.wait_report(LoadDone)
        assert done.load_id == load_id
        return done.cause

    def done(self, count: int) -> None:
        """Wait until the leader has applied ``count`` commits."""
        causes = [done.cause for _, done in self.instance.wait_report(LoadDone, count)]
        assert causes == [None] * count

    def abort(self, load_id: int) -> None:
        self.instance.send(LoadAbort(load_id=load_id))

    def load(self, name: str, generation: int, path: str | None = None) -> str | None:
        """Load as the conductor does; why not, or None."""
        load_id = self.announce(name, generation, path)
        causes = self.validations()[load_id]
        if any(causes.values()):
            self.abort(load_id)
            return "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items() if cause)
        return self.commit(load_id)

    def unload(self, name: str, generation: int = FIRST_GENERATION) -> None:
        self.instance.send(Unload(key=AdapterKey(name, generation)))

    def removed(self, rid: int, rank: int) -> None:
        """Ask ``rank`` until it has removed a request that was told to end."""
        for _ in range(MANY):
            if rid not in self.instance.inspect(rank)[0].requests:
                return
        raise AssertionError(f"request {rid} is still open on rank {rank}")

    def settled(self) -> list[StateReport]:
        """Both ranks' tables, which are equal, and in which nothing is left of any request."""
        states = self.instance.inspect()
        for rid in states[0].requests:  # told to end a moment ago
            self.removed(rid, rank=0)
            states = self.instance.inspect()
        for state in states:
            assert state.requests == () and state.pages_used == 0
            assert state.kv_host.pages_used == 0
            assert all(slot.holders == () for slot in state.slots)
            assert (state.slots, state.cpu_cache) == (states[0].slots, states[0].cpu_cache)
            assert state.checks == states[0].checks
            assert state.steps_waited_for_read == 0
        assert states[0].waiting == states[0].running == 0
        return states


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def take_away(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}-away"))


def make_unreadable(folder: Path) -> None:
    """A file that cannot be read whoever reads it, a superuser too."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def other_weights(folder: Path) -> None:
    """The header stays the same: only the bytes of the tensors differ."""
    shutil.copy(folder.parent.parent / "b" / WEIGHTS, folder / WEIGHTS)


DAMAGES: dict[str, Damage] = {
    "truncated": truncate,
    "gone": take_away,
    "unreadable": make_unreadable,
    "other": other_weights,
}

WELL = ("well", "well-2")
NAMES = (
    *WELL,
    *(f"unread-{damage}-{rank}" for damage in DAMAGES for rank in RANKS),
    *(f"read-{damage}" for damage in DAMAGES),
    *("flaky", "stuck-0", "stuck-1", "twins", "waits"),
    *("late-ingest", "late-remove", "early", "crowd-1", "crowd-2"),
)

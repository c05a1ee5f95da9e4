"""The actions of a chaos run on the server: loads, unloads, harm to files, faults on one rank."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
from chaos_clients import Clients, Question
from chaos_names import Name
from chaos_report import Report
from chaos_world import WEIGHTS_NAME, World, configured
from prometheus_client.parser import text_string_to_metric_families

from mstar_tp.testing.faults import AnyFault, FailRead, FaultFile, SlowRead, WrongBytes

LOADED, REFUSED, NOT_FOUND = 200, 400, 404


class Operators:
    """Every change to a name or its files is made under the name's lock."""

    def __init__(
        self,
        world: World,
        names: dict[str, Name],
        clients: Clients,
        session: aiohttp.ClientSession,
        faults: FaultFile,
        report: Report,
        rng: random.Random,
        tp: int,
    ) -> None:
        self._world = world
        self._names = names
        self._clients = clients
        self._session = session
        self._faults = faults
        self._report = report
        self._rng = rng
        self._tp = tp
        self._clock = asyncio.get_running_loop().time
        self._numbers = itertools.count()
        self._weights_in = configured(world.folder)
        """Folder of an adapter -> the weights there."""
        self._in_force: list[AnyFault] = []

    # ------------------------------------------------------------------ who does what

    async def load_all(self) -> None:
        """Serve every name that is not served from the start, one after the other."""
        for name in self._names.values():
            async with name.lock:
                await self._look(name)
                await self._load(name)

    async def reload(self, stop: asyncio.Event) -> None:
        """Loads and unloads at random until ``stop``."""
        await self._until(stop, 0.3, [
            (self._replace, 4), (self._replace_in_place, 2), (self._load_again, 2),
            (self._unload_for_a_while, 2), (self._race_unload_and_load, 2),
            (self._race_two_loads, 2), (self._load_and_unload_at_once, 1), (self._load_bad, 2),
        ])  # fmt: skip

    async def harm(self, stop: asyncio.Event) -> None:
        """Damages adapters' files, and restores them, until ``stop``."""
        await self._until(stop, 0.3, [
            (self._hide, 3), (self._truncate, 2), (self._delete, 2),
            (self._overwrite, 2), (self._swap, 2), (self._fail_reads, 2), (self._wrong_bytes, 2),
            (self._hang_reads, 1),
        ])  # fmt: skip

    async def slow(self, stop: asyncio.Event) -> None:
        """Slows one rank's reads down to seconds, on and off, until ``stop``."""
        while not stop.is_set():
            rank, seconds = self._rng.randrange(self._tp), self._rng.uniform(0.5, 3.0)
            self._report.events["slowed a rank's reads"] += 1
            with self._fault(SlowRead(rank=rank, seconds=seconds)):
                await self._pause(stop, self._rng.uniform(2.0, 6.0))
            await self._pause(stop, self._rng.uniform(0.5, 3.0))

    async def _until(
        self,
        stop: asyncio.Event,
        pause_s: float,
        deeds: list[tuple[Callable[[Name], Awaitable[None]], int]],
    ) -> None:
        while not stop.is_set():
            deed = self._rng.choices([d for d, _ in deeds], [weight for _, weight in deeds])[0]
            name = self._rng.choice(list(self._names.values()))
            if name.lock.locked():
                await self._pause(stop, 0.01)
                continue
            async with name.lock:
                await deed(name)
            await self._pause(stop, self._rng.uniform(0.0, 2 * pause_s))

    async def _pause(self, stop: asyncio.Event, seconds: float) -> None:
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            return

    # ------------------------------------------------------------------ loads and unloads

    async def _replace(self, name: Name) -> None:
        """Other weights under the same name, from a folder of their own."""
        await self._unload(name)
        await self._load(name)

    async def _replace_in_place(self, name: Name) -> None:
        """Other weights in the very folder that requests of the old ones may still read."""
        if name.folder is None or name.weights is None:
            await self._load(name)
            return
        self._report.events["files replaced under a name"] += 1
        name.begin_fault(self._clock())
        self._fill(name.folder, self._choose(name))
        await self._unload(name)
        await self._load(name, name.folder)
        name.end_fault(self._clock())

    async def _load_again(self, name: Name) -> None:
        """A name that is served is loaded again from where it is: refused."""
        if name.weights is None or name.folder is None:
            await self._load(name)
            return
        status, text = await self._post_load(name, name.folder)
        self._expect(name, "a load of a served name", status, REFUSED, text)

    async def _unload_for_a_while(self, name: Name) -> None:
        if name.weights is None:
            await self._load(name)
        await self._unload(name)
        status, text = await self._post_unload(name)
        self._expect(name, "an unload of a name that is not served", status, NOT_FOUND, text)

    async def _race_unload_and_load(self, name: Name) -> None:
        if name.weights is None:
            await self._load(name)
        weights, folder = self._fresh(name)
        self._report.events["unloads that raced a load"] += 1
        name.begin(self._clock(), None, weights)
        await self._gather(self._post_unload(name), self._post_load(name, folder))
        await self._look(name)

    async def _race_two_loads(self, name: Name) -> None:
        await self._unload(name)
        (one, first), (two, second) = self._fresh(name), self._fresh(name)
        self._report.events["loads that raced each other"] += 1
        name.begin(self._clock(), one, two)
        results = await self._gather(self._post_load(name, first), self._post_load(name, second))
        if sorted(status for status, _ in results) != [LOADED, REFUSED]:
            self._report.violation("failure", f"two loads of {name.name} at once: {results}")
        await self._look(name)

    async def _load_and_unload_at_once(self, name: Name) -> None:
        await self._unload(name)
        weights, folder = self._fresh(name)
        self._report.events["loads that raced an unload"] += 1
        name.begin(self._clock(), weights)
        await self._gather(self._post_load(name, folder), self._post_unload(name))
        await self._look(name)

    async def _load_bad(self, name: Name) -> None:
        """A damaged folder is refused, and nothing of it stays."""
        await self._unload(name)
        _, folder = self._fresh(name)
        file = folder / WEIGHTS_NAME
        match self._rng.randrange(3):
            case 0:
                _cut(file, self._rng.random())
            case 1:
                file.unlink()
            case _:
                shutil.rmtree(folder)
        status, text = await self._post_load(name, folder)
        wanted = REFUSED if folder.exists() else NOT_FOUND
        self._expect(name, "a load of a damaged folder", status, wanted, text)
        self._report.events["damaged folders loaded"] += 1

    async def _load(self, name: Name, folder: Path | None = None) -> None:
        if name.weights is not None:
            return
        if folder is None:
            _, folder = self._fresh(name)
        weights = self._weights_in[folder]
        name.begin(self._clock(), weights)
        status, text = await self._post_load(name, folder)
        self._expect(name, "a load", status, LOADED, text)
        await self._look(name)
        self._report.events["loads"] += 1

    async def _unload(self, name: Name) -> None:
        if name.weights is None:
            return
        name.begin(self._clock(), None)
        status, text = await self._post_unload(name)
        self._expect(name, "an unload", status, LOADED, text)
        name.settle(self._clock(), None)
        self._report.events["unloads"] += 1

    async def _look(self, name: Name) -> None:
        """Settle what the name serves now that every change to it has been answered."""
        async with self._session.get(f"/v1/models/{name.name}") as response:
            tree = await response.json()
        if response.status == NOT_FOUND:
            name.settle(self._clock(), None)
            name.end_fault(self._clock())
            return
        name.folder = Path(tree["root"])
        name.settle(self._clock(), self._weights_in[name.folder])
        name.end_fault(self._clock())

    # ------------------------------------------------------------------ harm to files

    async def _hide(self, name: Name) -> None:
        """The folder is gone for a while and comes back as it was."""
        folder = await self._in_fault(name, "folders hidden")
        away = folder.with_name(f"{folder.name}-away")
        folder.rename(away)
        await self._a_while()
        away.rename(folder)
        await self._recover(name)

    async def _truncate(self, name: Name) -> None:
        folder = await self._in_fault(name, "files truncated")
        _cut(folder / WEIGHTS_NAME, self._rng.random())
        await self._restore(name, folder)

    async def _delete(self, name: Name) -> None:
        folder = await self._in_fault(name, "files deleted")
        (folder / WEIGHTS_NAME).unlink()
        await self._restore(name, folder)

    async def _overwrite(self, name: Name) -> None:
        """Other weights of the same size and header are written over the file."""
        folder = await self._in_fault(name, "files overwritten")
        other = self._world.library(self._world.like(self._weights_in[folder]))
        (folder / WEIGHTS_NAME).write_bytes((other / WEIGHTS_NAME).read_bytes())
        await self._restore(name, folder)

    async def _swap(self, name: Name) -> None:
        """Another file with other weights takes the file's place."""
        folder = await self._in_fault(name, "files swapped")
        other = self._world.library(self._world.like(self._weights_in[folder]))
        fresh = folder / "fresh"
        shutil.copyfile(other / WEIGHTS_NAME, fresh)
        os.replace(fresh, folder / WEIGHTS_NAME)
        await self._restore(name, folder)

    async def _fail_reads(self, name: Name) -> None:
        await self._in_fault(name, "reads failed on a rank")
        rank = self._rng.randrange(self._tp)
        with self._fault(FailRead(rank=rank, adapter=name.name)):
            await self._a_while()
        await self._recover(name)

    async def _wrong_bytes(self, name: Name) -> None:
        await self._in_fault(name, "other bytes read on a rank")
        rank = self._rng.randrange(self._tp)
        with self._fault(WrongBytes(rank=rank, adapter=name.name)):
            await self._a_while()
        await self._recover(name)

    async def _hang_reads(self, name: Name) -> None:
        """One rank's reads of one adapter hang for longer than a read may take."""
        await self._in_fault(name, "reads hung on a rank")
        rank = self._rng.randrange(self._tp)
        with self._fault(SlowRead(rank=rank, adapter=name.name, seconds=3600)):
            question = Question(name=name.name, prompt=0, num_tokens=1)
            await self._clients.ask(question)
            await self._a_while()
        await self._recover(name)

    async def _in_fault(self, name: Name, event: str) -> Path:
        await self._load(name)
        assert name.folder is not None
        self._report.events[event] += 1
        name.begin_fault(self._clock())
        return name.folder

    async def _restore(self, name: Name, folder: Path) -> None:
        """After a while the files are what they were, and the name is loaded again."""
        await self._a_while()
        self._fill(folder, self._weights_in[folder])
        await self._unload(name)
        await self._load(name, folder)
        name.end_fault(self._clock())

    async def _recover(self, name: Name) -> None:
        """Check that the name answers again once the fault is over, without another load.

        One read that failed may stand until the ranks have dropped it; the next one must not.
        """
        for attempt in range(2):
            question = Question(name=name.name, prompt=attempt, num_tokens=1)
            answer = await self._clients.ask(question)
            if answer.error is None:
                break
            await self.inspect()
        else:
            self._report.violation("failure", f"{name.name} did not recover: {answer.error}")
        state = await self.inspect()
        if any(one["adapter"]["name"] == name.name for one in state["ranks"][0]["failed_reads"]):
            # It answers from its slot, with a failed read behind it that counts once the slot is
            # taken: only a new generation is free of that.
            await self._unload(name)
            await self._load(name, name.folder)
        name.end_fault(self._clock())

    async def _a_while(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))

    # ------------------------------------------------------------------ parts

    def _choose(self, name: Name) -> str:
        """Weights that the name does not serve now."""
        return self._rng.choice([w for w in self._world.weights if w != name.weights])

    def _fresh(self, name: Name) -> tuple[str, Path]:
        """A new folder, with weights that the name does not serve now.

        Old ones stay: requests of a generation that was unloaded may still read them.
        """
        weights = self._choose(name)
        folder = self._world.live / f"{name.name}-{next(self._numbers)}"
        self._fill(folder, weights)
        return weights, folder

    def _fill(self, folder: Path, weights: str) -> None:
        self._world.copy(weights, folder)
        self._weights_in[folder] = weights

    def _fault(self, fault: AnyFault) -> _InForce:
        return _InForce(self._faults, self._in_force, fault)

    async def _gather(self, *calls: Awaitable[tuple[int, str]]) -> list[tuple[int, str]]:
        """Both at once, either first."""
        order = list(calls)
        if self._rng.random() < 0.5:
            order.reverse()
        return list(await asyncio.gather(*order))

    async def _post_load(self, name: Name, folder: Path) -> tuple[int, str]:
        body = {"lora_name": name.name, "lora_path": str(folder)}
        async with self._session.post("/v1/load_lora_adapter", json=body) as response:
            return response.status, await response.text()

    async def _post_unload(self, name: Name) -> tuple[int, str]:
        body = {"lora_name": name.name}
        async with self._session.post("/v1/unload_lora_adapter", json=body) as response:
            return response.status, await response.text()

    async def metrics(self) -> dict[tuple[str, str], float]:
        """(metric, rank or outcome or "") -> its value."""
        async with self._session.get("/metrics") as response:
            response.raise_for_status()
            text = await response.text()
        return {
            (sample.name, sample.labels.get("rank") or sample.labels.get("outcome", "")): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def inspect(self) -> dict[str, Any]:
        """Every rank's tables at one place in the order."""
        async with self._session.get("/debug/state") as response:
            response.raise_for_status()
            return cast(dict[str, Any], await response.json())

    def _expect(self, name: Name, what: str, status: int, wanted: int, text: str) -> None:
        if "the ranks are gone" in text:
            self._report.ranks_gone(text)
        elif status != wanted:
            self._report.violation(
                "failure", f"{name.name}: {what} was answered {status}, not {wanted}: {text}"
            )


class _InForce:
    """A fault that stands in the file inside a ``with``."""

    def __init__(self, file: FaultFile, in_force: list[AnyFault], fault: AnyFault) -> None:
        self._file = file
        self._in_force = in_force
        self._fault = fault

    def __enter__(self) -> None:
        self._in_force.append(self._fault)
        self._file.write(self._in_force)

    def __exit__(self, *_: object) -> None:
        self._in_force.remove(self._fault)
        self._file.write(self._in_force)


def _cut(file: Path, share: float) -> None:
    """Cut the end of ``file`` off."""
    with file.open("r+b") as out:
        out.truncate(int(share * file.stat().st_size))

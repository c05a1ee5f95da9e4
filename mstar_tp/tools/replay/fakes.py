"""Fakes that a replay puts in the place of the device, the disk and the other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn, cast

from mstar_tp.common.errors import RecordingError
from mstar_tp.engine.resources.kv.pages import PageKey
from mstar_tp.engine.resources.kv.prefix import num_computed
from mstar_tp.engine.resources.lora import vote
from mstar_tp.engine.resources.lora.adapters import Adapter
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.recording.entries import PagesNamed
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:
    import torch

    from mstar_tp.lora.device.delta_plan import DeltaPlan
    from mstar_tp.lora.device.expert_weights import ExpertWeights
    from mstar_tp.lora.device.norm_weights import NormWeights
    from mstar_tp.lora.device.target_weights import LayerWeights
    from mstar_tp.lora.device.tiles import TileBuffer
    from mstar_tp.lora.device.vocab_weights import EmbeddingWeights, HeadWeights


class RecordedGroup:
    """A rank's place in its group, and the agreements that its recording holds."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.answers: deque[tuple[int, ...]] = deque()
        """What the agreements of the step that runs came to."""

    @property
    def tp(self) -> RecordedGroup:
        return self

    def agree(self, values: Sequence[int]) -> list[int]:
        """The result that the ranks agreed on then.

        Raises:
            RecordingError: this step held no such agreement, or one on other adapters.
        """
        if not self.answers:
            raise RecordingError("the step asks for an agreement that is not in the recording")
        answer = self.answers.popleft()
        # Step and adapters are the same in every rank's vote, so also in what came of it.
        if len(answer) != len(values) or answer[: vote.HEAD] != tuple(values[: vote.HEAD]):
            raise RecordingError("the step misses other adapters than it agreed on then")
        return list(answer)


class RecordedReads:
    """Reads that come to what the recording says; they land when an admit looks at them.

    When a read lands decides nothing but what the agreements, which are recorded, came to.
    """

    def __init__(self, land: Land, copies: dict[tuple[AdapterKey, int], CopyIn]) -> None:
        self._land = land
        self._copies = copies
        self._waiting: list[Read] = []

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        self._waiting.append(read)

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        work()

    def close(self) -> None:
        self._waiting.clear()

    def land_all(self) -> None:
        """Let every read that was begun end."""
        waiting, self._waiting = self._waiting, []
        for read in waiting:
            copy = self._copies.get((read.key, read.fetch_no or 0))
            if copy is not None and copy.cause is not None:
                self._land(read, None, copy.cause)
            else:
                digest = "" if copy is None or copy.digest is None else copy.digest
                self._land(read, _adapter(read.key, digest), None)


class RecordedStore(LoraAdapterStore):
    """A store whose adapters cost what they cost then, and hold no bytes."""

    def __init__(
        self,
        spec: LoraSpec,
        costs: Mapping[AdapterKey, int],
        untouched: Collection[AdapterKey] = (),
        over_capacity: Collection[AdapterKey] = (),
    ) -> None:
        super().__init__(spec, 0, 1, False, cast("torch.dtype", None))
        self._recorded = costs
        self._untouched = untouched
        self._over_capacity = over_capacity

    def over_capacity(
        self,
        key: AdapterKey,
        record: AdapterRecord,
        pinned: bool,
        kept: Sequence[AdapterKey],
        others: Sequence[AdapterKey],
    ) -> str | None:
        return "there was no room for it then" if key in self._over_capacity else None

    def check(self, name: str, path: str) -> AdapterRecord:
        """One that passed: a load that was refused has no commit in the recording."""
        return AdapterRecord(
            adapter=name,
            path=path,
            identity=(),
            fingerprint=b"",
            lora_rank=0,
            targets=(),
        )

    def charge(self, record: AdapterRecord) -> int:
        return 1

    def register(self, adapter: Adapter) -> None:
        key = adapter.key
        self.note(adapter, self._recorded.get(key, 1), has_part=key not in self._untouched)


class RecordedNames:
    """The names that a rank's pages had: tokens are not recorded, hashes of full pages are."""

    def __init__(
        self, requests: RequestTable, page_size: int, named: Mapping[int, Sequence[PagesNamed]]
    ) -> None:
        self._requests = requests
        self._page_size = page_size
        self._to_come = {rid: deque(entries) for rid, entries in named.items()}
        self._names: dict[int, list[PageKey]] = {}

    def open(self, rid: int) -> None:
        pass  # an admit asks first

    def of(self, rid: int) -> Sequence[PageKey]:
        if rid not in self._names:
            self._names[rid] = []
            self._add(rid)
        return self._names[rid]

    def num_queried(self, rid: int) -> int:
        return 0  # only the leader's own plan asks

    def extend(self, rid: int) -> Sequence[PageKey]:
        names = self._names.get(rid, [])
        num_full = num_computed(self._requests[rid]) // self._page_size
        if num_full > len(names):
            self._add(rid)
        return names[:num_full]

    def close(self, rid: int) -> None:
        self._names.pop(rid, None)

    def _add(self, rid: int) -> None:
        entries = self._to_come.get(rid)
        if entries:
            entry = entries.popleft()
            self._names[rid] += [(entry.root, content) for content in entry.contents]


class NoWeights:
    """Device slots without a device: an install leaves nothing behind."""

    def install(self, places: Sequence[tuple[int, LoadedAdapter]]) -> None:
        pass

    def plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        sampled: Sequence[int] = (),
        tables: TileBuffer | None = None,
    ) -> DeltaPlan:
        self._refuse()

    def launched(self) -> None:
        pass

    def reap(self) -> None:
        pass

    def graph_tables(self, num_rows: int) -> TileBuffer | None:
        self._refuse()

    def captured_plan(self, tables: TileBuffer, num_rows: int) -> DeltaPlan:
        self._refuse()

    def can_capture(self, slots: Sequence[int]) -> bool:
        self._refuse()

    def filled(self, seed: int) -> AbstractContextManager[None]:
        self._refuse()

    def layer(self, target: str, layer: int) -> LayerWeights:
        self._refuse()

    def experts(self, target: str) -> ExpertWeights:
        self._refuse()

    def embedding(self, target: str) -> EmbeddingWeights:
        self._refuse()

    def head(self, target: str) -> HeadWeights:
        self._refuse()

    def norm(self, target: str) -> NormWeights:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("a replay runs no forward")


def _adapter(key: AdapterKey, digest: str) -> LoadedAdapter:
    return LoadedAdapter(key=key, digest=digest, lora_rank=0, scaling={}, a={}, b={})

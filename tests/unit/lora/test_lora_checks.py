"""Pins checks of many adapters: a like one is recognised without weakening the check, every bad one
is named, and what stays of a registered adapter is as little for a large file as for a small one.
"""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_tp.common.errors import AdapterError
from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord, fingerprint
from mstar_tp.lora.format import batch_checks
from mstar_tp.lora.format.batch_checks import KNOWN_RECIPES, AdapterChecker, check_all
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import q_pairs, random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def spec() -> LoraSpec:
    return tiny_spec()


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the adapters that were checked in full."""
    names: list[str] = []

    def counted(spec: LoraSpec, name: str, path: Path, others: Sequence[LoraSpec]) -> object:
        names.append(name)
        return check_adapter_file(spec, name, path, others)

    monkeypatch.setattr(batch_checks, "check_adapter_file", counted)
    return names


def test_a_like_adapter_is_recognised_and_comes_out_as_its_own_check_would(
    spec: LoraSpec, tmp_path: Path, full_checks: list[str]
) -> None:
    checker = AdapterChecker(spec)
    folders = [
        write_adapter(tmp_path / str(seed), random_pairs(spec, rank=2, seed=seed))
        for seed in range(3)
    ]
    found = [checker.check(folder.name, folder) for folder in folders]
    assert full_checks == ["0"]
    assert found == [check_adapter_file(spec, folder.name, folder) for folder in folders]


def _alpha(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "lora_alpha": 8}))


def _fewer(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(dict(list(tensors.items())[:-2]), folder / WEIGHTS)


def _truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def _longer(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x")


def _sharded(folder: Path) -> None:
    (folder / f"{WEIGHTS}.index.json").write_text("{}")


def _no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("same_file", [True, False])
@pytest.mark.parametrize(
    "change", [_alpha, _fewer, _truncated, _longer, _sharded, _no_config, _no_folder]
)
def test_what_a_check_reads_is_never_taken_for_like_once_it_differs(
    spec: LoraSpec, tmp_path: Path, change: Callable[[Path], None], same_file: bool
) -> None:
    checker = AdapterChecker(spec)
    pairs = random_pairs(spec, rank=2, seed=0)
    write_adapter(tmp_path / "first", pairs)
    known = checker.check("first", tmp_path / "first")
    other = tmp_path / "first" if same_file else write_adapter(tmp_path / "other", pairs)
    change(other)
    try:
        wanted = check_adapter_file(spec, "other", other)
    except AdapterError as refusal:
        with pytest.raises(AdapterError) as error:
            checker.check("other", other)
        assert str(other) in str(error.value)
        assert change is _no_folder or str(error.value) == str(refusal)
    else:
        found = checker.check("other", other)
        assert found == wanted
        assert fingerprint(found) != fingerprint(known)


def test_few_recipes_are_remembered(spec: LoraSpec, tmp_path: Path, full_checks: list[str]) -> None:
    checker = AdapterChecker(spec)
    folders = [
        write_adapter(tmp_path / str(n), q_pairs(spec), lora_alpha=n + 1)
        for n in range(KNOWN_RECIPES + 1)
    ]
    for folder in (*folders, folders[-1], folders[0]):
        checker.check(folder.name, folder)
    assert full_checks == [*(folder.name for folder in folders), "0"]


def test_many_are_checked_in_order_with_progress_and_every_bad_one_is_named(
    spec: LoraSpec, tmp_path: Path
) -> None:
    adapters = [(f"a{n}", str(write_adapter(tmp_path / f"a{n}", q_pairs(spec)))) for n in range(20)]
    told: list[tuple[int, int]] = []

    def run() -> list[str]:
        checker = AdapterChecker(spec)
        return check_all(
            adapters,
            lambda name, path: checker.check(name, path).adapter,
            lambda done, total: told.append((done, total)),
        )

    assert run() == [name for name, _ in adapters]
    assert told == [(n + 1, 20) for n in range(20)]
    for n in (3, 11, 19):
        _truncated(tmp_path / f"a{n}")
    with pytest.raises(AdapterError, match=r"'a3'[^\n]*\n[^\n]*'a11'[^\n]*\n[^\n]*'a19'[^\n]*$"):
        run()


class Inline:
    """Header checks run where they are asked for; nothing is read."""

    def __init__(self, land: Land) -> None:
        pass

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        raise AssertionError(f"registering reads {read.key}")

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        work()

    def close(self) -> None:
        pass


def _growth(register: Callable[[int], None], first: int, count: int) -> float:
    """Traced bytes that ``count`` registrations leave, each."""
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(first, first + count):
        register(number)
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / count


def test_a_registered_adapter_leaves_a_record_and_nothing_of_its_file(tmp_path: Path) -> None:
    spec = tiny_spec()
    torch.set_num_threads(1)
    pool = LoraAdapterPool(
        spec,
        device="cpu",
        groups=JointGroups(SingleGroup()),
        dtype=torch.float32,
        decides=True,
        report=lambda report: None,
        make_readers=Inline,
    )
    # More recipes than are remembered: each registration is checked in full, and shares nothing.
    folders = []
    for n in range(KNOWN_RECIPES + 1):
        folder = write_adapter(tmp_path / str(n), {})
        save_file(random_pairs(spec, rank=2, seed=n), folder / WEIGHTS, {"number": str(n)})
        folders.append(folder)
    causes: list[str | None] = []

    def register(number: int) -> None:
        key, path = AdapterKey(f"adapter-{number}", 1), str(folders[number % len(folders)])
        pool.loads.begin(key, path, lambda cause, rank, targets: causes.append(cause))
        assert causes.pop() is None and pool.loads.commit(key, path) is None

    tracemalloc.start()
    try:
        register(0)
        file_bytes, _ = tracemalloc.get_traced_memory()
        for number in range(1, 20):
            register(number)
        first, second = _growth(register, 20, 60), _growth(register, 80, 60)
    finally:
        tracemalloc.stop()
    assert file_bytes > 10_000, "a checked header costs more than what may stay of it"
    assert max(first, second) < 1_500, f"bytes a registration: {first:.0f}, then {second:.0f}"
    assert (
        len(pool.reports.debug_state().served) == 140 and pool.reports.debug_state().cpu_cache == ()
    )


def test_records_tell_what_ranks_decide_by(spec: LoraSpec, tmp_path: Path) -> None:
    def record(name: str, **how: object) -> AdapterRecord:
        rank = int(str(how.get("r", 2)))
        folder = write_adapter(tmp_path / name, q_pairs(spec, rank=rank, a=rank / 8), **how)
        return AdapterRecord.of(check_adapter_file(spec, name, folder), str(folder))

    plain = record("plain")
    assert plain.decides == record("other-alpha", lora_alpha=8).decides
    assert plain.decides != record("other-rank", r=3).decides
    assert plain.targets is record("again").targets

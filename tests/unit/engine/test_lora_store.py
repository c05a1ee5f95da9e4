"""Pins what a read of a registered adapter may bring: the weights it was loaded with, or a refusal
that names the file, whatever happened to the folder in between.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.tensor_files.reader import TensorFile
from mstar_tp.testing.lora_files import random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import AdapterKey

KEY = AdapterKey("x", 1)
SPEC = tiny_spec()


@pytest.fixture
def store() -> LoraAdapterStore:
    torch.set_num_threads(1)
    return LoraAdapterStore(SPEC, rank=0, world_size=1, page_locked=False, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_adapter(tmp_path / "x", random_pairs(SPEC, rank=2, seed=0))
    # An old file, so that a write within the clock's grain still shows.
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    return folder


@pytest.fixture
def weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


@pytest.fixture
def record(store: LoraAdapterStore, folder: Path) -> AdapterRecord:
    return store.check(KEY.name, str(folder))


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


def _no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _a_folder_instead(folder: Path) -> None:
    _no_weights(folder)
    (folder / "adapter_model.safetensors").mkdir()


def _truncated(folder: Path) -> None:
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:-9])


def _other_weights(folder: Path) -> None:
    write_adapter(folder, random_pairs(SPEC, rank=2, seed=1))


def _other_settings(folder: Path) -> None:
    write_adapter(folder, random_pairs(SPEC, rank=2, seed=0), lora_alpha=9)


CHANGES = [_gone, _no_weights, _a_folder_instead, _truncated, _other_weights, _other_settings]


@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_is_not_what_was_loaded_is_refused_by_its_name(
    store: LoraAdapterStore,
    record: AdapterRecord,
    folder: Path,
    change: Callable[[Path], None],
    served_before: bool,
) -> None:
    digest = store.read(KEY, record).digest if served_before else None
    change(folder)
    with pytest.raises(AdapterError, match="adapter 'x'") as error:
        store.read(KEY, record, digest)
    assert str(folder) in str(error.value)


def test_a_folder_that_was_away_and_is_back_can_be_read(
    store: LoraAdapterStore, record: AdapterRecord, folder: Path
) -> None:
    away = folder.rename(folder.with_name("away"))
    with pytest.raises(AdapterError):
        store.read(KEY, record)
    away.rename(folder)
    assert store.read(KEY, record).key == KEY


def test_weights_that_were_served_may_be_put_back_as_another_file(
    store: LoraAdapterStore, record: AdapterRecord, weights: Path
) -> None:
    first = store.read(KEY, record)
    data = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(data)
    assert store.read(KEY, record, first.digest).digest == first.digest
    # Without weights to compare with, nothing says that these are the ones that were loaded.
    with pytest.raises(AdapterError, match="has changed since it was loaded"):
        store.read(KEY, record)


def test_a_file_that_is_written_while_it_is_read_is_refused(
    store: LoraAdapterStore, record: AdapterRecord, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TensorFile.read

    def overwritten_on_the_way(
        file: TensorFile, name: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not written:
            written.append(name)
            with weights.open("r+b") as raw:
                raw.seek(-4, 2)
                raw.write(b"\0\0\0\0")
        return read(file, name, out)

    written: list[str] = []
    monkeypatch.setattr(TensorFile, "read", overwritten_on_the_way)
    with pytest.raises(AdapterError, match="was changed while it was read"):
        store.read(KEY, record)

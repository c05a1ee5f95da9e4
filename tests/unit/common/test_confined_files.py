"""Pins that no adapter loaded at run time is read from outside the folders for that, whatever is
swapped between a check of its path and the opening of its files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mstar_tp.common.confined_files import confined, open_file, read_file
from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.frontend.text.tokenizer import load_tokenizer
from mstar_tp.testing.lora_files import random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

SPEC = tiny_spec()
LOADED, CONFIGURED = AdapterKey("x", 1), AdapterKey("x", FIRST_GENERATION)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Holds ``x``; ``outside`` beside the root has files of the same shapes."""
    write_adapter(tmp_path / "root" / "x", random_pairs(SPEC, rank=2, seed=0))
    write_adapter(tmp_path / "outside", random_pairs(SPEC, rank=2, seed=1))
    return tmp_path / "root"


def _a_link_in_place_of_the_weights(root: Path) -> None:
    (root / "x" / WEIGHTS).unlink()
    (root / "x" / WEIGHTS).symlink_to(root.parent / "outside" / WEIGHTS)


def _a_link_in_place_of_the_settings(root: Path) -> None:
    (root / "x" / CONFIG).unlink()
    (root / "x" / CONFIG).symlink_to(root.parent / "outside" / CONFIG)


def _a_link_in_place_of_the_folder(root: Path) -> None:
    (root / "x").rename(root / "was")
    (root / "x").symlink_to(root.parent / "outside")


def _a_chain_of_links(root: Path) -> None:
    (root / "x").rename(root / "was")
    (root / "x").symlink_to("./step")
    (root / "step").symlink_to("../outside")


SWAPS = [
    _a_link_in_place_of_the_weights,
    _a_link_in_place_of_the_settings,
    _a_link_in_place_of_the_folder,
    _a_chain_of_links,
]


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("when", ["before the check", "between check and read"])
def test_a_path_that_is_swapped_for_a_link_outside_is_not_followed(
    root: Path, swap: Callable[[Path], None], when: str
) -> None:
    torch.set_num_threads(1)
    store = LoraAdapterStore(SPEC, rank=0, world_size=1, page_locked=False, dtype=torch.float32)
    store.roots = (os.path.realpath(root),)
    path = str(root / "x")
    with store.within(LOADED):
        record = store.check("x", path)
        known = store.read(LOADED, record).digest
    if when == "before the check":
        swap(root)
        with store.within(LOADED), pytest.raises(AdapterError, match="leads outside the folders"):
            store.check("x", path)
    else:
        swap(root)
        with store.within(LOADED), pytest.raises(AdapterError, match="leads outside the folders"):
            store.read(LOADED, record, known)
    # What the operator configured may lie anywhere, and the same swap shows what would be read.
    with store.within(CONFIGURED):
        store.check("x", path)


@pytest.mark.parametrize("swap", SWAPS[:1])
def test_links_that_stay_inside_are_followed(root: Path, swap: Callable[[Path], None]) -> None:
    with confined((os.path.realpath(root.parent),)):
        swap(root)
        assert read_file(root / "x" / WEIGHTS)
    with pytest.raises(OSError, match="leads outside"), confined((os.path.realpath(root),)):
        open_file(root / "x" / WEIGHTS)
    with pytest.raises(OSError, match="leads outside"), confined((os.path.realpath(root) + "x",)):
        open_file(root / "was" if (root / "was").exists() else root / "x" / CONFIG)
    assert read_file(root / "x" / WEIGHTS), "nothing is refused outside the block"


def test_a_refused_file_is_closed(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with confined(("/nowhere",)), pytest.raises(OSError, match="leads outside"):
            open_file(root / "x" / CONFIG)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
             "chat_template.jinja", "generation_config.json"]
)  # fmt: skip
def test_tokenizer_files_are_not_read_from_outside_either(tmp_path: Path, name: str) -> None:
    from support.frontend_kit import byte_level_folder

    folder = byte_level_folder(tmp_path / "root" / "x")
    load = [folder / name] if (folder / name).exists() else []
    for file in load:
        file.rename(tmp_path / name)
    if not load:
        (tmp_path / name).write_text("{}")
    (folder / name).symlink_to(tmp_path / name)
    load_tokenizer(folder)
    with (
        confined((os.path.realpath(tmp_path / "root"),)),
        pytest.raises(Exception, match="leads outside"),
    ):
        load_tokenizer(folder)

"""One rank of test_models_tp: runs every model folder given and, on rank 0, saves the logits."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.paged_runner import PagedRunner

from mstar_tp.distributed.comm import CommGroup, JointGroups, SingleGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup
from mstar_tp.distributed.start import Rendezvous, destroy_groups, init_groups
from mstar_tp.kernels.cpu import cpu_kernels
from mstar_tp.layers.attention.attention import AttentionRow
from mstar_tp.models.blocks import PreNormDecoder
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.cpp_decode import CppDecoder
from mstar_tp.models.loader import load_model

PROMPT = [(7 * i * i + 3 * i) % 200 + 3 for i in range(19)]


def run_model(folder: Path, group: CommGroup) -> dict[str, torch.Tensor]:
    """Logits of a prompt whole, in chunks with another text between, and of decode steps."""
    torch.set_num_threads(1)
    config = load_model_config(folder)
    model = load_model(folder, config, group, torch.float32, torch.device("cpu"))
    hashes: list[int] = []

    def note(_module: Any, _inputs: Any, hidden: torch.Tensor) -> None:
        hashes.append(zlib.crc32(hidden.numpy().tobytes()))

    model.model.register_forward_hook(note)
    runner = PagedRunner(model)
    got = {"whole": runner.prefill("whole", PROMPT)}
    got["chunked"] = runner.prefill("chunked", PROMPT[:-3], 5)
    for i, token in enumerate(PROMPT[-3:]):
        parts = runner.step([("chunked", [token]), ("other", PROMPT[i : i + 4])])
        got[f"decode {i}"] = None if parts is None else torch.cat(parts)
    _check_cpp(runner)
    assert all(JointGroups(group).same(hashes)), f"{folder.name}: hidden states differ over ranks"
    assert all((logits is None) == (group.rank != 0) for logits in got.values())
    return {name: logits for name, logits in got.items() if logits is not None}


def _check_cpp(runner: PagedRunner) -> None:
    """Decoding rows in one call of C++ are the modules', bit for bit, on every rank."""
    model = runner.model
    shares = isinstance(model.place.group, SingleGroup | SharedMemoryGroup)
    cpp = CppDecoder.of(model, runner.caches, runner.page_size, 16, None)
    kernels = cpu_kernels(model.place.device, torch.float32)
    packs = kernels is not None and kernels.pack_weight(torch.ones(1, 1)) is not None
    known = packs and shares
    assert (cpp is not None) == (known and isinstance(model.model, PreNormDecoder))
    if cpp is None:
        return
    ids = [PROMPT[0], PROMPT[5]]
    wanted = runner.step([("whole", ids[:1]), ("chunked", ids[1:])])
    length = len(PROMPT)
    pages = [runner.pages_of(name) for name in ("whole", "chunked")]
    assert cpp.plan(ids, [AttentionRow(1, length, held) for held in pages])
    kept = [(cache.k.clone(), cache.v.clone()) for cache in runner.caches]
    with torch.inference_mode():
        got = cpp.run()
    for cache, (k, v) in zip(runner.caches, kept, strict=True):
        assert torch.equal(cache.k.nan_to_num(), k.nan_to_num())
        assert torch.equal(cache.v.nan_to_num(), v.nan_to_num())
    assert (got is None) == (wanted is None)
    if got is not None and wanted is not None:
        assert torch.equal(got, torch.cat(wanted))
    assert not cpp.plan(ids, [AttentionRow(2, length, pages[0])])


def main(store: str, rank: str, world_size: str, folders: str, out: str) -> None:
    meeting = Rendezvous(dist.FileStore(store, int(world_size)), int(rank), int(world_size))
    group = init_groups(torch.device("cpu"), meeting).tp
    results = {path.name: run_model(path, group) for path in sorted(Path(folders).iterdir())}
    if group.rank == 0:
        torch.save(results, out)
    destroy_groups()


if __name__ == "__main__":
    main(*sys.argv[1:])

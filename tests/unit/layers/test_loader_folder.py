"""Promise: a model folder is loaded whole and exactly, or refused with the file and the key at
fault.

Nothing is skipped: a key that no module takes and a module that no key fills are both errors. A
rank reads its own slices' bytes alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paged_runner import PagedRunner
from support.thread_group import ThreadGroups

from mstar_tp.common.errors import CheckpointError
from mstar_tp.distributed.comm import CommGroup, SingleGroup
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from mstar_tp.models.config.families import load_model_config
from mstar_tp.models.loader import load_model, resolve_dtype
from mstar_tp.testing.tiny_models import FAMILIES, Family, make_tiny_model

torch.set_num_threads(1)
TOKENS = [5, 17, 99, 3, 42]
Tensors = dict[str, torch.Tensor]


def load(folder: Path, group: CommGroup | None = None, **options: Any) -> CausalLM:
    config = load_model_config(folder)
    return load_model(
        folder, config, group or SingleGroup(), torch.float32, torch.device("cpu"), **options
    )


def logits(folder: Path) -> torch.Tensor:
    got = PagedRunner(load(folder)).prefill("a", TOKENS)
    assert got is not None
    return got


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "llama", "llama", 1, num_hidden_layers=1)


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "qwen2", "qwen2", 1, num_hidden_layers=1)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the single weight file's tensors."""
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_load_as_the_single_file_does(tmp_path: Path, family: Family) -> None:
    make_tiny_model(tmp_path / "one", family, 1)
    make_tiny_model(tmp_path / "many", family, 1, max_shard_size="60KB")
    assert not (tmp_path / "many" / SINGLE_FILE).exists()
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "many"))


def test_a_tied_checkpoint_may_repeat_its_embedding_but_nothing_else(qwen2: Path) -> None:
    wanted = logits(qwen2)
    embedding = "model.embed_tokens.weight"
    rewrite(qwen2, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert torch.equal(logits(qwen2), wanted)
    rewrite(qwen2, lambda t: t["lm_head.weight"][200].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs .* tie_word_embeddings"):
        load(qwen2)


def test_keys_known_to_be_without_effect_are_passed_over(llama: Path) -> None:
    wanted = logits(llama)
    rewrite(
        llama,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    assert torch.equal(logits(llama), wanted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop("model.layers.0.mlp.up_proj.weight"),
            "'model.layers.0.mlp.up_proj.weight'",
        ),
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight'"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight'"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "'model.layers.0.self_attn.q_proj.bias', which LlamaForCausalLM .* has no place for",
        ),
        (
            lambda t: t.update({f"model.layers.1.extra.{i}": torch.ones(1) for i in range(9)}),
            "'model.layers.1.extra.0'.* and 6 more",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.o_proj.weight": torch.ones(64, 63)}),
            r"o_proj.weight' is \[64, 63\], wanted \[64, 64\]",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.ones(212, 64)}),
            r"embed_tokens.weight' is \[212, 64\], wanted \[211, 64\]",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.down_proj.weight": torch.ones(64, 96, dtype=torch.int8)}
            ),
            "down_proj.weight' is I8.*quantised",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_by_key(
    llama: Path, change: Callable[[Tensors], object], said: str
) -> None:
    rewrite(llama, change)
    with pytest.raises(CheckpointError, match=said) as error:
        load(llama)
    assert str(llama) in str(error.value)


def test_a_pickle_is_refused_with_the_conversion_to_run(llama: Path) -> None:
    (llama / SINGLE_FILE).rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is a pickle.*save_pretrained"):
        load(llama)


def test_a_folder_without_weights_says_what_it_holds_instead(llama: Path) -> None:
    (llama / SINGLE_FILE).rename(llama / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"neither .* found consolidated\.safetensors"):
        load(llama)
    (llama / "consolidated.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=re.escape(f"holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    ):
        load(llama)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(llama / "nowhere")


def test_a_damaged_weight_file_is_refused_by_name(llama: Path) -> None:
    path = llama / SINGLE_FILE
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: ") + ".*truncated"):
        load(llama)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    return make_tiny_model(folder, "llama", 1, num_hidden_layers=1, max_shard_size="60KB")


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / INDEX_FILE
    tree = json.loads(path.read_text())
    change(tree["weight_map"])
    path.write_text(json.dumps(tree))


def test_a_missing_shard_is_refused_by_name(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(shard))):
        load(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    homes = list(index.values())
    key, home = next((key, home) for key, home in index.items() if homes.count(home) > 1)
    other = next(name for name in index.values() if name != home)
    for change, said in (
        (lambda m: m.update({key: other}), f"says {key!r} is in {other}"),
        (lambda m: m.update({key: home, "model.ghost": home}), "says 'model.ghost' is in"),
        (lambda m: m.pop("model.ghost") and m.pop(key), f"holds {key!r}, which .* does not list"),
    ):
        edit_index(sharded, change)
        with pytest.raises(CheckpointError, match=said):
            load(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "x.bin", 3])
def test_an_index_cannot_lead_out_of_its_folder(sharded: Path, name: object) -> None:
    edit_index(sharded, lambda m: m.update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is .*in the same folder"):
        load(sharded)


def test_a_key_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    both = {**load_file(second), **load_file(first)}
    save_file(both, second)
    with pytest.raises(CheckpointError, match=r"which .* holds too"):
        load(sharded)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_rank_reads_only_its_own_slices(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wide enough for a rank's run of columns to be worth reading alone.
    sizes = {"hidden_size": 64, "intermediate_size": 8192, "vocab_size": 400}
    make_tiny_model(tmp_path, "llama", 1, num_hidden_layers=1, **sizes)
    total = 0
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal total
        total += (got := preadv(fd, buffers, offset))
        return got

    monkeypatch.setattr(os, "preadv", counted)
    model = load(tmp_path, ThreadGroups(world_size)[1 % world_size])
    whole = sum(tensor.nbytes for tensor in load_file(tmp_path / SINGLE_FILE).values())
    norms = 3 * 64 * 4
    attention = 2 * 64 * 64 * 4 + 2 * 64 * 32 * 4
    # Attention is too narrow to save anything by reading columns alone, and two KV heads serve
    # four.
    assert total <= norms + attention + (whole - norms - attention) / world_size
    assert model.num_kv_heads == max(1, 2 // world_size)


def test_progress_counts_up_to_every_module(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(llama, progress=lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    # Embedding, head, last norm; and of the layer two norms and four linears.
    assert seen == [(i, total) for i in range(1, total + 1)] and total == 9


def test_auto_is_the_checkpoints_own_dtype(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama", 1, dtype=torch.bfloat16)
    config = load_model_config(tmp_path)
    assert resolve_dtype("auto", config) is torch.bfloat16
    assert resolve_dtype("float32", config) is torch.float32


def test_rotary_tables_stop_at_the_length_asked_for(llama: Path) -> None:
    short = load(llama, max_position=16)
    got = PagedRunner(short).prefill("a", TOKENS)
    assert got is not None and torch.equal(got, logits(llama))

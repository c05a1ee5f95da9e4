"""Tensors that stand in the base model's place: trained tokens, saved matrices and norms, copies of
base weights. Right on any number of ranks, refused where PEFT would mean something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_kit import Q0, load, refusal
from support.vocab_kit import (
    EMBED,
    FULL,
    HEAD,
    NORM,
    TIED,
    VOCAB,
    Base,
    Tensors,
    embedding_pair,
    head,
    head_pair,
    slots_of,
    tokens,
    way,  # noqa: F401 -- a fixture
)

from mstar_tp.layers.norm import RMSNorm
from mstar_tp.lora.device.delta_plan import DeltaPlan
from mstar_tp.lora.device.deltas import LoraNormDelta
from mstar_tp.testing.lora_files import (
    pair,
    q_pairs,
    tiny_spec,
    with_vocab,
    write_adapter,
)

# --------------------------------------------------------------------------------- replaced rows


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_trained_tokens_replace_their_rows_where_they_live(tmp_path: Path, world_size: int) -> None:
    ids = [32, 3, 16]
    tensors = q_pairs(FULL) | tokens(EMBED, ids) | tokens(HEAD, ids)
    both = {"embed_tokens": ids, "lm_head": ids}
    folder = write_adapter(tmp_path, tensors, trainable_token_indices=both)
    asked = torch.tensor([3, 4, 32, 16])
    part = -(-VOCAB // world_size)
    table = torch.arange(world_size * part * 8.0).view(-1, 8) / 100
    total, logits = torch.zeros(4, 8), []
    for rank in range(world_size):
        copy = load(folder, spec=FULL, rank=rank, world_size=world_size)
        weights = slots_of(FULL, {1: copy}, rank, world_size)
        mine = range(rank * part, (rank + 1) * part)
        y = torch.stack([table[i] * (i in mine) for i in asked.tolist()])
        plan = weights.plan([1] * 4, [1] * 4, [1])
        weights.embedding("model.embed_tokens").add(y, asked, plan.vocab.tokens)
        total += y
        x = torch.ones(1, 8)
        logits.append(head(weights, x, [1], x @ table[mine.start : mine.stop].t()))
    replaced = table.clone()
    replaced[ids] = 7.0 + torch.tensor(ids)[:, None]
    torch.testing.assert_close(total, replaced[asked])
    torch.testing.assert_close(torch.cat(logits, dim=1)[0], replaced.sum(1))


def test_a_tied_head_takes_the_embeddings_tokens_over(tmp_path: Path) -> None:
    tensors = q_pairs(FULL) | tokens(EMBED, [4, 2])
    folder = write_adapter(tmp_path, tensors, trainable_token_indices=[4, 2])
    assert set(load(folder, spec=FULL).rows) == {"model.embed_tokens"}
    tied = load(folder, spec=TIED).rows
    assert tied["lm_head"].ids.tolist() == tied["model.embed_tokens"].ids.tolist() == [2, 4]
    assert torch.equal(tied["lm_head"].weight, tied["model.embed_tokens"].weight)


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        (tokens(EMBED, [1]), {}, "trainable_token_indices"),
        (tokens(EMBED, [1]), {"trainable_token_indices": [1, 2]}, "[2, 8]"),
        (tokens(EMBED, [1]), {"trainable_token_indices": [33]}, "token 33"),
        (tokens(EMBED, [1, 2]), {"trainable_token_indices": [1, 1]}, "different token ids"),
        (tokens(EMBED, [1]), {"trainable_token_indices": [-1]}, "different token ids"),
        (tokens(EMBED, [1]), {"trainable_token_indices": "1"}, "trainable_token_indices"),
        ({}, {"trainable_token_indices": [1]}, "embed_tokens (trainable_token_indices)"),
        (
            tokens(EMBED, [1]) | embedding_pair(),
            {"trainable_token_indices": [1]},
            "replaces what",
        ),
        (
            tokens(EMBED, list(range(9))),
            {"trainable_token_indices": list(range(9))},
            "9 rows of model.embed_tokens, wanted at most 8: raise --max-lora-saved-rows",
        ),
        (
            {f"{HEAD}.weight": torch.ones(VOCAB, 8), f"{EMBED}.weight": torch.ones(VOCAB, 8)},
            {"modules_to_save": ["lm_head", "embed_tokens"]},
            "modules_to_save replaces 33 rows of lm_head and 33 rows of model.embed_tokens",
        ),
        (
            {f"{HEAD}.modules_to_save.weight": torch.ones(VOCAB, 8)},
            {},
            "modules_to_save in adapter_config.json does not name it",
        ),
        ({}, {"modules_to_save": ["lm_head"]}, "lm_head (modules_to_save)"),
        (
            {"base_model.model.score.weight": torch.ones(3, 8)},
            {"modules_to_save": ["score"], "task_type": "SEQ_CLS"},
            "score",
        ),
        (
            {f"{Q0}.modules_to_save.weight": torch.ones(8, 8)},
            {"modules_to_save": ["q_proj"]},
            "merge the adapter",
        ),
    ],
)
def test_replaced_rows_that_nothing_explains_are_refused(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any], named: str
) -> None:
    spec = with_vocab(tiny_spec(), VOCAB, max_saved_rows=8)
    folder = write_adapter(tmp_path, pair(Q0.replace("0", "1"), 8, 8) | tensors, **config)
    assert named in refusal(folder, spec=spec)


@pytest.mark.parametrize("key", ["weight", "modules_to_save.weight", "modules_to_save.x.weight"])
def test_a_saved_matrix_replaces_every_row(tmp_path: Path, key: str) -> None:
    weight = torch.randn(VOCAB, 8)
    tensors = q_pairs(FULL) | {f"{HEAD}.{key}": weight}
    folder = write_adapter(tmp_path, tensors, modules_to_save=["lm_head"])
    copy = load(folder, spec=FULL, rank=1, world_size=2)
    assert copy.rows["lm_head"].ids.tolist() == list(range(16))
    assert torch.equal(copy.rows["lm_head"].weight, weight[17:])


# ----------------------------------------------------------------------------------------- norms


@pytest.mark.usefixtures("way")
def test_a_saved_norm_stands_for_its_own_rows_and_layer(tmp_path: Path) -> None:
    norm, delta_norm = RMSNorm(8, 1e-6, torch.float32), RMSNorm(8, 1e-6, torch.float32)
    delta_norm.set_weight(torch.arange(8.0))
    tensors = q_pairs(FULL) | {f"{NORM}.weight": torch.arange(8.0)}
    folder = write_adapter(tmp_path, tensors, modules_to_save=["layers.1.input_layernorm"])
    weights = slots_of(FULL, {1: load(folder, spec=FULL)}, 0, 1)
    x = torch.randn(4, 8)

    class Source:
        def current_plan(self) -> DeltaPlan:
            plan: DeltaPlan = weights.plan([0, 1, 2], [1, 2, 1])
            return plan

    for layer in (0, 1):
        stored = weights.norm("input_layernorm")
        got = LoraNormDelta(Source(), stored, layer, norm)(norm(x), x)
        wanted = norm(x)
        if layer == 1:
            wanted[1:3] = delta_norm(x[1:3])
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({f"{NORM}.weight": torch.ones(8)}, {}, "to compare it with"),
        ({f"{NORM}.weight": torch.ones(7)}, {"modules_to_save": ["input_layernorm"]}, "[8]"),
        (
            {f"{NORM}.weight": torch.full((8,), torch.nan)},
            {"modules_to_save": ["1.input_layernorm"]},
            "8 values",
        ),
        (
            {f"{NORM}.weight": torch.ones(8)},
            {"modules_to_save": ["input_layernorm"]},
            "model.layers.0.input_layernorm (modules_to_save)",
        ),
        ({f"{NORM}.lora_A.weight": torch.ones(2, 8)}, {}, "is a norm: it has no factors"),
        ({}, {"modules_to_save": ["input_layernorm"]}, "input_layernorm (modules_to_save)"),
        (
            {f"{NORM}.weight": torch.ones(8), f"{NORM}.modules_to_save.weight": torch.ones(8)},
            {"modules_to_save": ["input_layernorm"]},
            "replace one weight",
        ),
    ],
)
def test_a_norm_that_cannot_stand_for_the_bases_is_refused(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any], named: str
) -> None:
    folder = write_adapter(tmp_path, q_pairs(FULL) | tensors, **config)
    assert named in refusal(folder, spec=FULL)


def test_a_copy_of_a_norm_equal_to_the_bases_is_without_effect(tmp_path: Path) -> None:
    tensors = q_pairs(FULL) | {f"{NORM}.weight": torch.arange(8.0)}
    base = Base({"model.layers.1.input_layernorm.weight": torch.arange(8.0)})
    for rank in range(2):
        folder = write_adapter(tmp_path, tensors)
        assert not load(folder, spec=FULL, rank=rank, world_size=2, base=base).norms


# --------------------------------------------------------------------------- copies of base weights


def copies(dtype: torch.dtype = torch.float32) -> tuple[Base, Tensors]:
    """A base model, and what PEFT writes of it beside the factors of its ends."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(VOCAB, 8, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    kept = {
        f"{EMBED}.base_layer.weight": weights["model.embed_tokens.weight"].to(dtype),
        f"{HEAD}.base_layer.weight": weights["lm_head.weight"].to(dtype),
    }
    return Base(weights), kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_equal_to_the_base_up_to_a_cast_is_without_effect(
    tmp_path: Path, dtype: torch.dtype, world_size: int
) -> None:
    base, kept = copies(dtype)
    plain = load(write_adapter(tmp_path / "a", embedding_pair() | head_pair()), spec=FULL)
    folder = write_adapter(tmp_path / "b", embedding_pair() | head_pair() | kept)
    for rank in range(world_size):
        adapter = load(folder, spec=FULL, rank=rank, world_size=world_size, base=base)
        assert adapter.digest == plain.digest and not adapter.rows


@pytest.mark.parametrize("key", [f"{HEAD}.base_layer.weight", f"{HEAD}.original_module.weight"])
def test_a_copy_that_differs_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    base, kept = copies()
    weight = kept[f"{HEAD}.base_layer.weight"]
    kept = {key: weight + 0.5}
    text = refusal(write_adapter(tmp_path, head_pair() | kept), spec=FULL, base=base)
    assert key in text and "lm_head.weight in rows 0 to 32" in text and "another base" in text
    kept = {key: torch.cat([weight[:32], weight[32:] + 0.5])}
    folder = write_adapter(tmp_path, head_pair() | kept)
    assert load(folder, spec=FULL, rank=0, world_size=2, base=base)
    with pytest.raises(ValueError, match="rows 16 to 32"):
        load(folder, spec=FULL, rank=1, world_size=2, base=base)


def test_a_tied_heads_copy_is_compared_with_the_embedding(tmp_path: Path) -> None:
    base, kept = copies()
    embedding = {f"{HEAD}.base_layer.weight": kept[f"{EMBED}.base_layer.weight"]}
    tied = Base({"model.embed_tokens.weight": base.weights["model.embed_tokens.weight"]})
    assert load(write_adapter(tmp_path, head_pair() | embedding), spec=TIED, base=tied)


def test_copies_without_a_base_to_compare_with_or_of_another_shape_are_refused(
    tmp_path: Path,
) -> None:
    _, kept = copies()
    folder = write_adapter(tmp_path / "a", head_pair() | kept)
    assert "to compare it with" in refusal(folder, spec=FULL)
    resized = {f"{EMBED}.weight": torch.ones(VOCAB + 3, 8)}
    text = refusal(write_adapter(tmp_path / "b", head_pair() | resized), spec=FULL)
    assert f"{EMBED}.weight" in text and "[36, 8]" in text and "another base model" in text

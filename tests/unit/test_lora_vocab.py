"""Adapters at the ends of a model: factors of the embedding and the head, replaced rows, copies of
base weights. Right on any number of ranks, refused where PEFT would mean something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import Q0, SPEC, everywhere, load, q_change, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mstar_tp.errors import LockstepError
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.checkpoint import check_adapter_file
from mstar_tp.lora.delta_plan import DeltaPlan
from mstar_tp.lora.deltas import LoraHeadDelta, LoraNormDelta
from mstar_tp.lora.shards import shard_bytes
from mstar_tp.lora.slot_weights import SlotWeights
from mstar_tp.lora.spec import LoraSpec
from mstar_tp.testing.lora_files import (
    pair,
    q_pairs,
    tiny_spec,
    with_norms,
    with_vocab,
    write_adapter,
)

VOCAB = 33  # not divisible by two: the second rank's part is padded
FULL = with_norms(with_vocab(tiny_spec(slots=3), VOCAB))
TIED = with_vocab(tiny_spec(slots=3), VOCAB, tied=True)
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
Tensors = dict[str, torch.Tensor]


def embedding_pair(b: float = 0.1, rank: int = 2) -> Tensors:
    """A[k, t] = t / 100: every token has a change of its own."""
    a = (torch.arange(VOCAB) / 100.0).repeat(rank, 1)
    return {f"{EMBED}.lora_embedding_A": a, f"{EMBED}.lora_embedding_B": torch.full((8, rank), b)}


def head_pair(rank: int = 2) -> Tensors:
    """B[v, k] = (v + 1) / 100."""
    return {
        f"{HEAD}.lora_A.weight": torch.full((rank, 8), 0.1),
        f"{HEAD}.lora_B.weight": ((torch.arange(VOCAB) + 1) / 100.0)[:, None].repeat(1, rank),
    }


class Base:
    """A base model's weights by name."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights

    def read_rows(self, name: str, rows: range) -> torch.Tensor | None:
        tensor = self.weights.get(name)
        return None if tensor is None else tensor[rows.start : rows.stop]


def slots_of(spec: LoraSpec, adapters: Mapping[int, LoadedAdapter], rank: int, ws: int) -> Any:
    weights = SlotWeights(
        spec,
        rank=rank,
        world_size=ws,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    weights.install(list(adapters.items()))
    return weights


def embed(weights: Any, ids: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The change of each token's embedding on one rank."""
    y = torch.zeros(len(ids), 8)
    plan = weights.plan(slots, [1] * len(slots), slots)
    if plan.vocab is not None:
        weights.embedding("model.embed_tokens").add(y, ids, plan.vocab.tokens)
    return y


def head(weights: Any, x: torch.Tensor, slots: list[int], base: torch.Tensor) -> torch.Tensor:
    """Logits of one rank's part, from the base's."""
    plan, y = weights.plan(slots, [1] * len(slots), slots), base.clone()
    if plan.vocab is not None:
        weights.head("lm_head").add(y, x, plan.vocab.samples)
    return y


# ------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_token_gets_its_own_change_once(tmp_path: Path, world_size: int) -> None:
    folder = write_adapter(tmp_path, embedding_pair())
    ids = torch.tensor([5, 9, 32, 0, 16, 17])
    total = torch.zeros(len(ids), 8)
    for rank in range(world_size):
        copy = load(folder, spec=FULL, rank=rank, world_size=world_size)
        weights = slots_of(FULL, {1: copy}, rank, world_size)
        total += embed(weights, ids, [1, 1, 1, 0, 1, 1])
    # s * sum over r of B * A[:, t] = 2 * 2 * 0.1 * t / 100; the row without an adapter has none.
    wanted = torch.tensor([5, 9, 32, 0, 16, 17]) / 100.0 * 0.4
    torch.testing.assert_close(total, wanted[:, None].repeat(1, 8))


@pytest.mark.parametrize("name", ["", ".default"])
def test_embedding_keys_have_no_weight_ending(tmp_path: Path, name: str) -> None:
    tensors = {f"{key}{name}": tensor for key, tensor in embedding_pair().items()}
    assert load(write_adapter(tmp_path, tensors), spec=FULL).a["model.embed_tokens"].any()


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({f"{EMBED}.lora_embedding_A": torch.ones(2, 8)}, "lora_embedding_B"),
        (pair(EMBED, VOCAB, 8), "lora_embedding_A"),
        (embedding_pair() | {f"{EMBED}.lora_embedding_A": torch.ones(2, 32)}, "[2, 33]"),
        ({f"{Q0}.lora_embedding_A": torch.ones(2, 8)}, "takes lora_A and lora_B"),
        (head_pair() | {f"{HEAD}.lora_A.weight": torch.ones(2, 33)}, "[2, 8]"),
    ],
)
def test_factors_of_another_kind_or_vocabulary_are_refused(
    tmp_path: Path, tensors: Tensors, named: str
) -> None:
    assert named in refusal(write_adapter(tmp_path, tensors), spec=FULL)


# ------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_padded_vocabularys_logits_are_in_their_places(tmp_path: Path, world_size: int) -> None:
    folder = write_adapter(tmp_path, head_pair(), lora_bias=True)
    x, parts = torch.ones(2, 8), []
    for rank in range(world_size):
        copy = load(folder, spec=FULL, rank=rank, world_size=world_size)
        weights = slots_of(FULL, {2: copy}, rank, world_size)
        parts.append(head(weights, x, [0, 2], torch.zeros(2, -(-VOCAB // world_size))))
    logits = torch.cat(parts, dim=1)
    assert not logits[:, VOCAB:].any()
    assert not logits[0].any()
    # s * B * A x = 2 * 2 * (v + 1) / 100 * 0.8
    wanted = (torch.arange(VOCAB) + 1) / 100.0 * 3.2
    torch.testing.assert_close(logits[1, :VOCAB], wanted)


def test_a_head_is_never_given_other_rows_than_the_plan_says(tmp_path: Path) -> None:
    weights = slots_of(FULL, {1: load(write_adapter(tmp_path, head_pair()), spec=FULL)}, 0, 1)

    class Source:
        def current_plan(self) -> DeltaPlan:
            plan: DeltaPlan = weights.plan([1, 1], [3, 1], [1])
            return plan

    delta = LoraHeadDelta(Source(), weights.head("lm_head"))
    with pytest.raises(LockstepError, match="2 rows, but the step samples 1"):
        delta(torch.zeros(2, VOCAB), torch.ones(2, 8))


# -------------------------------------------------------------------------------------- the bias


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bias_inside_lora_is_scaled_and_added_once(tmp_path: Path, world_size: int) -> None:
    down = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = pair(Q0, 8, 8) | {f"{Q0}.lora_B.bias": torch.full((8,), 0.5)}
    tensors |= pair(down, 16, 8) | {f"{down}.lora_B.bias": torch.full((8,), 0.5)}
    folder = write_adapter(tmp_path, tensors, lora_bias=True)
    q_parts, down_total = [], torch.zeros(1, 8)
    for rank in range(world_size):
        copy = load(folder, rank=rank, world_size=world_size)
        weights, width = slots_of(SPEC, {1: copy}, rank, world_size), 16 // world_size
        plan = weights.plan([1], [1])
        q = weights.layer("self_attn.qkv_proj", 0).add(
            torch.zeros(1, width), torch.ones(1, 8), plan
        )
        q_parts.append(q[:, : 8 // world_size])
        layer = weights.layer("mlp.down_proj", 0)
        down_total += layer.add(torch.zeros(1, 8), torch.ones(1, width), plan)
        assert not q[:, 8 // world_size :].any()
    # 0.32 from the factors and 2 * 0.5 from the bias; of down, twice as many inputs.
    assert everywhere(torch.cat(q_parts, dim=1), 1.32) and everywhere(down_total, 1.64)


def test_a_flag_without_the_tensor_changes_nothing_and_a_tensor_without_the_flag_is_refused(
    tmp_path: Path,
) -> None:
    adapter = load(write_adapter(tmp_path / "a", q_pairs(SPEC), lora_bias=True))
    assert everywhere(q_change(adapter), 0.04) and not adapter.bias
    tensors = q_pairs(SPEC) | {f"{Q0}.lora_B.bias": torch.ones(8)}
    text = refusal(write_adapter(tmp_path / "b", tensors))
    assert f"{Q0}.lora_B.bias" in text and "lora_bias" in text
    alone = {f"{Q0}.lora_B.bias": torch.ones(8)}
    assert "stands alone" in refusal(write_adapter(tmp_path / "c", alone, lora_bias=True))


# --------------------------------------------------------------------------------- replaced rows


def tokens(module: str, ids: list[int], value: float = 7.0) -> Tensors:
    rows = torch.full((len(ids), 8), value) + torch.tensor(ids)[:, None]
    return {f"{module}.token_adapter.trainable_tokens_delta": rows}


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

NORM = "base_model.model.model.layers.1.input_layernorm"


def test_a_saved_norm_stands_for_its_own_rows_and_layer(tmp_path: Path) -> None:
    norm, delta_norm = RMSNorm(8, 1e-6, torch.float32), RMSNorm(8, 1e-6, torch.float32)
    delta_norm.set_weight(torch.arange(8.0))
    tensors = q_pairs(FULL) | {f"{NORM}.weight": torch.arange(8.0)}
    folder = write_adapter(tmp_path, tensors, modules_to_save=["input_layernorm"])
    weights = slots_of(FULL, {1: load(folder, spec=FULL)}, 0, 1)
    x = torch.randn(4, 8)

    class Source:
        def current_plan(self) -> DeltaPlan:
            plan: DeltaPlan = weights.plan([0, 1, 2], [1, 2, 1])
            return plan

    for layer in (0, 1):
        stored = weights.norm("input_layernorm")
        got = LoraNormDelta(Source(), stored, layer, norm.forward_with)(norm(x), x)
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
            {"modules_to_save": ["norm"]},
            "8 values",
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


# ----------------------------------------------------------------------------- slots and their size


def everything(folder: Path, seed: int) -> Path:
    """An adapter with all there is: factors, biases, rows."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {key: noise(*t.shape) for key, t in (q_pairs(FULL) | embedding_pair()).items()}
    tensors |= {f"{Q0}.lora_B.bias": noise(8)}
    tensors |= {key: noise(*t.shape) for key, t in tokens(HEAD, [seed, 20, 32]).items()}
    tensors |= {f"{NORM}.weight": noise(8)}
    ids, saved = {"lm_head": [seed, 20, 32]}, ["input_layernorm"]
    settings = {"lora_bias": True, "trainable_token_indices": ids, "modules_to_save": saved}
    return write_adapter(folder, tensors, **settings)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_copys_size_follows_from_the_header(tmp_path: Path, world_size: int) -> None:
    folder = everything(tmp_path, 3)
    file = check_adapter_file(FULL, "x", folder)
    for rank in range(world_size):
        copy = load(folder, spec=FULL, rank=rank, world_size=world_size)
        assert shard_bytes(FULL, file, rank, world_size, torch.float32) == copy.num_bytes


def test_an_evicted_adapter_leaves_nothing_at_the_ends(tmp_path: Path) -> None:
    first = load(everything(tmp_path / "a", 3), spec=FULL)
    second = load(write_adapter(tmp_path / "b", head_pair()), spec=FULL)
    third = load(write_adapter(tmp_path / "c", q_pairs(FULL)), spec=FULL)
    used = slots_of(FULL, {1: first}, 0, 1)
    ids, x, base = torch.arange(4), torch.randn(4, 8), torch.randn(4, VOCAB)
    for adapter in (second, third, first):
        used.install([(1, adapter)])
        fresh = slots_of(FULL, {1: adapter}, 0, 1)
        assert torch.equal(embed(used, ids, [1] * 4), embed(fresh, ids, [1] * 4))
        assert torch.equal(head(used, x, [1] * 4, base), head(fresh, x, [1] * 4, base))
        layer = "self_attn.qkv_proj", 0
        got, wanted = (
            w.layer(*layer).add(torch.zeros(4, 16), x, w.plan([1] * 4, [1] * 4))
            for w in (used, fresh)
        )
        assert torch.equal(got, wanted)
        left = (w.norm("input_layernorm").get(1, 1) for w in (used, fresh))
        assert len({None if weight is None else tuple(weight.tolist()) for weight in left}) == 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_digest_is_one_for_every_rank_tp_and_split_and_sees_every_part(
    tmp_path: Path, world_size: int
) -> None:
    folder = everything(tmp_path / "a", 3)
    digest = load(folder, spec=FULL).digest
    for rank in range(world_size):
        assert load(folder, spec=FULL, rank=rank, world_size=world_size).digest == digest
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for name in tensors:
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[0] += 1
        save_file(changed, weights)
        assert load(folder, spec=FULL).digest != digest, name
    save_file(dict(reversed(tensors.items())), weights)
    assert load(folder, spec=FULL).digest == digest
    config = json.loads((folder / "adapter_config.json").read_text())
    config["trainable_token_indices"] = {"lm_head": [4, 20, 32]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert load(folder, spec=FULL).digest != digest


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=6),
    sampling=st.lists(st.booleans(), min_size=6, max_size=6),
    seed=st.integers(0, 100),
)
def test_rows_of_any_mix_are_what_they_are_alone(
    mixed: Any, rows: list[tuple[int, int]], sampling: list[bool], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots, counts = [slot for slot, _ in rows], [count for _, count in rows]
    by_token = [slot for slot, count in rows for _ in range(count)]
    sampled = [slot for slot, samples in zip(slots, sampling, strict=False) if samples]
    plan = mixed.plan(slots, counts, sampled)
    ids = torch.randint(0, VOCAB, (len(by_token),), generator=generator)
    y = torch.randn(len(by_token), 8, generator=generator)
    x, logits = (torch.randn(len(sampled), n, generator=generator) for n in (8, VOCAB))
    got_y, got_logits = y.clone(), logits.clone()
    if plan.vocab is not None:
        mixed.embedding("model.embed_tokens").add(got_y, ids, plan.vocab.tokens)
        mixed.head("lm_head").add(got_logits, x, plan.vocab.samples)
    for i, slot in enumerate(by_token):
        alone = y[i : i + 1].clone()
        if slot:
            one = mixed.plan([slot], [1], [slot])
            if one.vocab is not None:
                mixed.embedding("model.embed_tokens").add(alone, ids[i : i + 1], one.vocab.tokens)
        else:
            assert torch.equal(got_y[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(got_y[i : i + 1], alone)
    for i, slot in enumerate(sampled):
        alone = head(mixed, x[i : i + 1], [slot], logits[i : i + 1])
        torch.testing.assert_close(got_logits[i : i + 1], alone)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three slots: all there is, a head and an embedding, linears only."""
    folder = tmp_path_factory.mktemp("mixed")
    adapters = {
        1: load(everything(folder / "a", 3), spec=FULL),
        2: load(write_adapter(folder / "b", head_pair() | embedding_pair()), spec=FULL),
        3: load(write_adapter(folder / "c", q_pairs(FULL)), spec=FULL),
    }
    return slots_of(FULL, adapters, 0, 1)

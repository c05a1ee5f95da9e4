"""Adapters at the ends of a model: factors of the embedding and the head, biases, and what slots
keep of them. Right on any number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.adapter_kit import Q0, SPEC, everywhere, load, q_change, refusal
from support.vocab_kit import (
    EMBED,
    FULL,
    HEAD,
    NORM,
    VOCAB,
    Tensors,
    embed,
    embedding_pair,
    head,
    head_pair,
    slots_of,
    tokens,
    way,  # noqa: F401 -- a fixture
)

from mstar_tp.common.errors import LockstepError
from mstar_tp.lora.device.delta_plan import DeltaPlan
from mstar_tp.lora.device.deltas import LoraHeadDelta
from mstar_tp.lora.format.checkpoint import check_adapter_file
from mstar_tp.lora.reading.shards import shard_bytes
from mstar_tp.testing.lora_files import (
    pair,
    q_pairs,
    write_adapter,
)

# ------------------------------------------------------------------------------------- embeddings


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
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
    ids, saved = {"lm_head": [seed, 20, 32]}, ["layers.1.input_layernorm"]
    settings = {"lora_bias": True, "trainable_token_indices": ids, "modules_to_save": saved}
    return write_adapter(folder, tensors, **settings)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_copys_size_follows_from_the_header(tmp_path: Path, world_size: int) -> None:
    folder = everything(tmp_path, 3)
    file = check_adapter_file(FULL, "x", folder)
    for rank in range(world_size):
        copy = load(folder, spec=FULL, rank=rank, world_size=world_size)
        assert shard_bytes(FULL, file, rank, world_size, torch.float32) == copy.num_bytes


@pytest.mark.usefixtures("way")
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

"""Promise: a linear, embedding or head split over ranks is the whole one, with no more than its one
collective.

The whole one is plain float64 maths on the full weight; ranks are threads with real exchange
between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from support.thread_group import ThreadGroup, ThreadGroups

from mstar_tp.common.errors import CheckpointError, ConfigError
from mstar_tp.distributed.comm import CommGroup
from mstar_tp.distributed.shard import OutSlice
from mstar_tp.layers.embedding import ParallelHead, VocabParallelEmbedding
from mstar_tp.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from mstar_tp.layers.weights import MatrixPart, Placement

WORLDS = (1, 2, 4)


@dataclass
class MemoryReader:
    """A checkpoint of plain tensors; notes how many numbers were read of each key."""

    tensors: dict[str, torch.Tensor]
    read: dict[str, int] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        return key in self.tensors

    def read_rows(self, key: str, shape: tuple[int, ...], rows: range, out: torch.Tensor) -> None:
        self._give(key, shape, self.tensors[key][rows.start : rows.stop], out)

    def read_columns(
        self, key: str, shape: tuple[int, ...], columns: range, out: torch.Tensor
    ) -> None:
        self._give(key, shape, self.tensors[key][:, columns.start : columns.stop], out)

    def read_matrix(
        self,
        key: str,
        shape: tuple[int, int, int],
        index: int,
        part: MatrixPart,
        out: torch.Tensor,
    ) -> None:
        raise AssertionError(f"{key}: no linear reads stacked matrices")

    def _give(
        self, key: str, shape: tuple[int, ...], part: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert tuple(self.tensors[key].shape) == shape
        assert out.shape == part.shape and out.is_contiguous()
        out.copy_(part)
        self.read[key] = self.read.get(key, 0) + part.numel()


class CountingGroup:
    """A thread group that counts its collectives."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.calls.append(name)
        method: Callable[..., object] = getattr(self._group, name)
        return method


def place(group: CommGroup, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(group=group, dtype=dtype, device=torch.device("cpu"))


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert torch.allclose(got.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_merged_linear_holds_its_own_rows_of_each_slice(world_size: int, packed: bool) -> None:
    tensors = random_tensors(
        {
            "mlp.gate_proj.weight": (12, 20),
            "mlp.gate_proj.bias": (12,),
            "mlp.up_proj.weight": (16, 20),
            "mlp.up_proj.bias": (16,),
        }
    )
    x = torch.randn(3, 20)
    gate, up = (
        x @ tensors[f"mlp.{name}.weight"].T + tensors[f"mlp.{name}.bias"]
        for name in ("gate_proj", "up_proj")
    )

    def rank_main(group: ThreadGroup) -> None:
        counted = CountingGroup(group)
        layer = MergedColumnParallelLinear(
            20, {"gate_proj": 12, "up_proj": 16}, place(counted), bias=True
        )
        reader = MemoryReader(tensors)
        layer.load(reader, "mlp")
        assert reader.read["mlp.gate_proj.weight"] == 12 * 20 // world_size
        if packed:
            layer.pack()
        got_gate, got_up = layer(x).split(layer.local_sizes, dim=-1)
        for got, whole, rows in zip((got_gate, got_up), (gate, up), layer.local_rows, strict=True):
            assert_same(got, whole[:, rows.start : rows.stop])
        assert counted.calls == []

    ThreadGroups(world_size).run(rank_main)


@pytest.mark.parametrize("world_size", WORLDS)
def test_key_value_heads_are_copied_to_neighbouring_ranks_when_too_few(world_size: int) -> None:
    sizes = {"q_proj": 4 * 6, "k_proj": 2 * 6, "v_proj": 2 * 6}
    tensors = random_tensors({f"attn.{name}.weight": (size, 10) for name, size in sizes.items()})
    x = torch.randn(3, 10)

    def rank_main(group: ThreadGroup) -> None:
        layer = QKVParallelLinear(10, place(group), num_heads=4, num_kv_heads=2, head_dim=6)
        layer.load(MemoryReader(tensors), "attn")
        heads = 4 // world_size
        kv_heads = max(1, 2 // world_size)
        assert (layer.num_local_heads, layer.num_local_kv_heads) == (heads, kv_heads)
        first_kv = group.rank * 2 // world_size
        firsts = (group.rank * heads, first_kv, first_kv)
        counts = (heads, kv_heads, kv_heads)
        parts = layer(x).split(layer.local_sizes, dim=-1)
        for name, first, count, got in zip(sizes, firsts, counts, parts, strict=True):
            rows = tensors[f"attn.{name}.weight"][first * 6 : (first + count) * 6]
            assert_same(got, x @ rows.T)

    ThreadGroups(world_size).run(rank_main)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_parallel_linear_sums_once_and_adds_its_bias_once(
    world_size: int, bias: bool
) -> None:
    tensors = random_tensors({"attn.o_proj.weight": (10, 24), "attn.o_proj.bias": (10,)})
    x = torch.randn(3, 24)
    wanted = x @ tensors["attn.o_proj.weight"].T + (tensors["attn.o_proj.bias"] if bias else 0)

    def rank_main(group: ThreadGroup) -> None:
        counted = CountingGroup(group)
        layer = RowParallelLinear(24, "o_proj", 10, place(counted), in_units=4, bias=bias)
        reader = MemoryReader(tensors)
        layer.load(reader, "attn")
        assert reader.read["attn.o_proj.weight"] == 10 * 24 // world_size
        layer.pack()
        mine = slice(layer.local_columns.start, layer.local_columns.stop)
        assert_same(layer(x[:, mine].contiguous()), wanted)
        assert counted.calls == ["all_reduce"]

    ThreadGroups(world_size).run(rank_main)


def test_a_subclass_put_in_place_adds_its_part_before_the_sum() -> None:
    class WithOnes(RowParallelLinear):
        def local(self, x_TI: torch.Tensor) -> torch.Tensor:
            return super().local(x_TI) + 1

    tensors = random_tensors({"o_proj.weight": (6, 8)})
    x = torch.randn(3, 8)

    def rank_main(group: ThreadGroup) -> None:
        layer: ParallelLinear = RowParallelLinear(8, "o_proj", 6, place(group))
        layer.load(MemoryReader(tensors), "")
        layer.__class__ = WithOnes
        assert isinstance(layer, RowParallelLinear)
        mine = slice(layer.local_columns.start, layer.local_columns.stop)
        assert_same(layer(x[:, mine].contiguous()), x @ tensors["o_proj.weight"].T + 2)

    ThreadGroups(2).run(rank_main)


@pytest.mark.parametrize("vocab_size", [5, 8, 11])
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_embedding_looks_every_id_up_once(world_size: int, vocab_size: int) -> None:
    tensors = random_tensors({"model.embed_tokens.weight": (vocab_size, 6)})
    ids = torch.arange(vocab_size).repeat(2)

    def rank_main(group: ThreadGroup) -> None:
        counted = CountingGroup(group)
        layer = VocabParallelEmbedding(vocab_size, 6, place(counted), name="embed_tokens")
        layer.load(MemoryReader(tensors), "model")
        assert torch.equal(layer(ids), tensors["model.embed_tokens.weight"][ids])
        assert counted.calls == ["all_reduce"]

    ThreadGroups(world_size).run(rank_main)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 8, 11])
@pytest.mark.parametrize("world_size", WORLDS)
def test_padded_ids_have_no_logits(world_size: int, vocab_size: int, tied: bool) -> None:
    """Every true logit is negative, so a padded id's zero would win every greedy choice."""
    key = "model.embed_tokens.weight" if tied else "lm_head.weight"
    tensors = random_tensors({key: (vocab_size, 6)})
    tensors[key].abs_()
    hidden = -torch.rand(4, 6) - 0.1

    def rank_main(group: ThreadGroup) -> None:
        counted = CountingGroup(group)
        reader = MemoryReader(tensors)
        embedding = VocabParallelEmbedding(vocab_size, 6, place(counted), name="embed_tokens")
        head = ParallelHead(
            vocab_size, 6, place(counted), name="lm_head", tied=embedding if tied else None
        )
        if tied:
            embedding.load(reader, "model")
        head.load(reader, "")
        head.pack()
        logits = head.logits(hidden)
        assert counted.calls == ["gather"]
        if group.rank == 0:
            assert logits is not None
            assert_same(logits, hidden @ tensors[key].T)
            assert int(logits.argmax(-1).max()) < vocab_size
        else:
            assert logits is None

    ThreadGroups(world_size).run(rank_main)


def test_a_tied_head_takes_a_repeated_weight_only_if_it_is_the_embeddings() -> None:
    weight = torch.randn(7, 4)
    group = ThreadGroups(1)[0]
    for head_weight, said in ((weight.clone(), None), (weight + 1, "lm_head.weight differs")):
        reader = MemoryReader({"embed_tokens.weight": weight, "lm_head.weight": head_weight})
        embedding = VocabParallelEmbedding(7, 4, place(group), name="embed_tokens")
        embedding.load(reader, "")
        head = ParallelHead(7, 4, place(group), name="lm_head", tied=embedding)
        if said is None:
            head.load(reader, "")
            continue
        with pytest.raises(CheckpointError, match=said):
            head.load(reader, "")


def test_blocks_that_feed_a_sum_are_never_replicated() -> None:
    group = ThreadGroups(4)[0]
    for build in (
        lambda: QKVParallelLinear(8, place(group), num_heads=2, num_kv_heads=2, head_dim=4),
        lambda: MergedColumnParallelLinear(8, {"gate_proj": 2}, place(group)),
        lambda: RowParallelLinear(8, "o_proj", 8, place(group), in_units=2),
    ):
        with pytest.raises(ConfigError, match="2 blocks cannot be dealt to 4 ranks"):
            build()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_linears_are_within_rounding_of_the_maths(dtype: torch.dtype) -> None:
    tensors = random_tensors({"a.weight": (40, 64), "a.bias": (40,)})
    part = OutSlice(name="a", out_features=40, units=40)
    layer = ColumnParallelLinear(64, (part,), place(ThreadGroups(1)[0], dtype), bias=True)
    layer.load(MemoryReader(tensors), "")
    layer.pack()
    x = torch.randn(5, 64).to(dtype)
    weight, bias = (tensors[key].to(dtype).double() for key in ("a.weight", "a.bias"))
    wanted = x.double() @ weight.T + bias
    got = layer(x)
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() <= 2 * torch.finfo(dtype).eps * wanted.abs().max()

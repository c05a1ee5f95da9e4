"""A whole step of decoding rows in one call of C++, for decoders that it knows.

It computes bit for bit what their layers compute, without the sixty calls from Python.

It reads the modules once, after they are loaded and bound, and runs what they hold: their weights,
their adapters' slots, their group's collectives, in their order. Whatever it does not know, in the
model or in a step, is left to the modules. Step thread.

Legend: R rows of the step, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from mstar_tp.distributed.comm import SingleGroup
from mstar_tp.distributed.shared_memory import SharedMemoryGroup
from mstar_tp.kernels import decode as cpp
from mstar_tp.kernels.collectives import NUMBER, Collectives
from mstar_tp.layers.activation import gelu_tanh_and_mul, silu_and_mul
from mstar_tp.layers.attention.attention import AttentionRow, KVCache
from mstar_tp.layers.embedding import ParallelHead
from mstar_tp.layers.linear import ParallelLinear
from mstar_tp.layers.lora.linear import WithLoraDelta
from mstar_tp.layers.norm import RMSNorm
from mstar_tp.layers.rotary import RotaryEmbedding
from mstar_tp.lora.device.delta_plan import DeltaPlan
from mstar_tp.models.blocks import CausalLM, GatedMlp, PreNormDecoder, PreNormLayer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ROWS = 64
"""The most rows of a step; a larger one spends little of its time on calls."""

_ACTIVATIONS: dict[Callable[[torch.Tensor], torch.Tensor], int] = {
    silu_and_mul: 0,
    gelu_tanh_and_mul: 1,
}


class CppDecoder:
    """Runs steps of rows that have one new token each. ``plan`` lays a step out, ``run`` runs it.

    Holds what C++ reads: the structs' addresses stay good as long as this lives.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: Sequence[KVCache],
        page_size: int,
        max_pages: int,
        deltas: Callable[[], DeltaPlan] | None,
    ) -> None:
        """``max_pages``: of one request; ``deltas``: the current step's, None without adapters.

        Raises:
            _UnknownError: the model has something that C++ does not run.
        """
        place = model.place
        self._dtype = place.dtype
        _check(place.device.type == "cpu", "a device")
        self._run_step = _known(cpp.decode_step(place.dtype), "no kernels")
        self._kept: list[object] = []
        self._tables: dict[RotaryEmbedding, int] = {}
        self._deltas = deltas
        decoder = _exactly(model.model, PreNormDecoder)
        self._collectives = _collectives(model)
        self._rank, self._world_size = place.group.rank, place.group.world_size
        self._vocab_size = model.config.vocab_size
        layers = [_exactly(layer, PreNormLayer) for layer in decoder.layers]
        built = (cpp.Layer * len(layers))(
            *(self._layer(layer, cache) for layer, cache in zip(layers, kv, strict=True))
        )
        self._kept.append(built)
        self._decoder = self._build(model, decoder, built, page_size)
        self._step = cpp.DecodeStep()
        rows = MAX_ROWS
        self._ids, self._positions, self._lengths = (np.zeros(rows, np.int64) for _ in range(3))
        self._places = np.arange(rows)
        self._pages = np.zeros((rows, max_pages), np.int64)
        self._held: list[tuple[Sequence[int], int]] = [((), 0)] * rows
        """Whose pages stand in ``_pages``, and how many of them."""
        self._page_size = page_size
        step = self._step
        step.ids, step.positions, step.places, step.lengths, step.pages = (
            x.ctypes.data
            for x in (self._ids, self._positions, self._places, self._lengths, self._pages)
        )
        step.width = max_pages

    @classmethod
    def of(
        cls,
        model: CausalLM,
        kv: Sequence[KVCache],
        page_size: int,
        max_pages: int,
        deltas: Callable[[], DeltaPlan] | None,
    ) -> CppDecoder | None:
        """None where the model, its dtype, device or group is not what C++ runs."""
        try:
            return cls(model, kv, page_size, max_pages, deltas)
        except _UnknownError as why:
            logger.debug("decoding steps run module by module: %s", why)
            return None

    # ------------------------------------------------------------------ a step

    def plan(self, ids: Sequence[int], rows: Sequence[AttentionRow]) -> bool:
        """Lay out a step of ``rows``, whose new tokens are ``ids``, for the next ``run``.

        False where it is for the modules: a row has several new tokens, or an adapter changes more
        than linears. It is called after the deltas' own plan.
        """
        count = len(rows)
        if count > MAX_ROWS or count != len(ids):
            return False
        deltas = None if self._deltas is None else self._deltas()
        if deltas is not None and not _only_grouped(deltas):
            return False
        contexts = [row.context for row in rows]
        self._ids[:count] = ids
        self._positions[:count] = contexts
        np.add(self._positions[:count], 1, out=self._lengths[:count])
        for place, (_, context, pages) in enumerate(rows):
            used = context // self._page_size + 1
            held, taken = self._held[place]
            # A request's list of pages is its own, and grows between two of its steps at most.
            if held is not pages or taken != used:
                self._pages[place, :used] = pages[:used]
                self._held[place] = pages, used
        step = self._step
        step.rows = count
        grouped = None if deltas is None else deltas.grouped
        step.adapters = None if grouped is None else ctypes.addressof(grouped.at)
        return True

    def run(self) -> torch.Tensor | None:
        """Logits [R, V] of the planned step on rank 0, None elsewhere.

        Collective on the model's group: the same calls as the modules make.

        Raises:
            PeerLostError: a rank's process has ended.
            LockstepError: ranks are in different calls.
        """
        decoder, step = self._decoder, self._step
        logits = None
        if self._rank == 0:
            size = self._world_size * decoder.head.outputs
            logits = torch.empty((step.rows, size), dtype=self._dtype)
            step.logits = logits.data_ptr()
        if self._collectives is None:
            self._call()
        else:
            self._collectives.run(self._call, "a decode step")
        return None if logits is None else logits[:, : self._vocab_size]

    def _call(self) -> int:
        return self._run_step(ctypes.addressof(self._decoder), ctypes.addressof(self._step))

    # ------------------------------------------------------------------ reading the modules

    def _build(
        self,
        model: CausalLM,
        decoder: PreNormDecoder,
        layers: ctypes.Array[cpp.Layer],
        page_size: int,
    ) -> cpp.Decoder:
        config, embedding, head = model.config, decoder.embed_tokens, model.lm_head
        _check(config.final_softcap is None, "capped logits")
        first = decoder.layers[0]
        assert isinstance(first, PreNormLayer)
        attention, mlp = first.self_attn.attn.shape, _exactly(first.mlp, GatedMlp)
        inner = mlp.gate_up_proj.local_sizes[0]
        widest = max(sum(mlp.gate_up_proj.local_sizes), sum(first.self_attn.qkv_proj.local_sizes))
        mixed = max(inner, attention.num_heads * attention.head_dim)
        rows, hidden = MAX_ROWS, config.hidden_size
        built = cpp.Decoder(
            layers=layers,
            num_layers=len(layers),
            hidden=hidden,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            dim=attention.head_dim,
            inner=inner,
            page_size=page_size,
            eps=decoder.norm.eps,
            scale=attention.scale,
            softcap=attention.softcap or 0.0,
            gelu=_ACTIVATIONS[mlp.activate],
            threads=torch.get_num_threads(),
            dtype=NUMBER[self._dtype],
            embedding=self._at(_known(embedding.weight, "no embedding")),
            vocab_first=embedding.shard.first,
            vocab_rows=embedding.shard.size,
            norm=self._norm(decoder.norm),
            head=self._linear(head),
            comm=None if self._collectives is None else self._collectives.address,
        )
        built.residual, built.x = (self._scratch(rows * hidden) for _ in range(2))
        built.wide, built.mixed = self._scratch(rows * widest), self._scratch(rows * mixed)
        built.local = self._scratch(rows * built.head.outputs)
        return built

    def _layer(self, layer: PreNormLayer, cache: KVCache) -> cpp.Layer:
        attention, mlp = layer.self_attn, _exactly(layer.mlp, GatedMlp)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return cpp.Layer(
            input_norm=self._norm(layer.input_layernorm),
            post_norm=self._norm(layer.post_attention_layernorm),
            q_norm=None if q_norm is None else self._norm(q_norm),
            k_norm=None if k_norm is None else self._norm(k_norm),
            angles=self._angles(attention.rope),
            keys=self._at(cache.k),
            values=self._at(cache.v),
            window=attention.attn.shape.window or 0,
            qkv=self._linear(attention.qkv_proj),
            o=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_up_proj),
            down=self._linear(mlp.down_proj),
        )

    def _angles(self, rope: RotaryEmbedding) -> int:
        """One table for all layers of a rotary setting: that of a long context is large."""
        if rope not in self._tables:
            self._tables[rope] = self._at(rope.table_P2D.to(self._dtype))
        return self._tables[rope]

    def _norm(self, norm: RMSNorm) -> int:
        _check(not norm.unit_offset, "a norm of another kind")
        return self._at(norm.weight)

    def _linear(self, module: ParallelLinear | ParallelHead) -> cpp.Linear:
        weight = _known(module.weight, "a weight is missing")
        packed = _known(weight.packed, "a GEMM that is not ours")
        bias = module.bias if isinstance(module, ParallelLinear) else None
        linear = cpp.Linear(
            weight=self._at(packed),
            bias=None if bias is None else self._at(bias),
            inputs=weight.shape[1],
            outputs=weight.shape[0],
        )
        if isinstance(module, WithLoraDelta):
            linear.factors = module.lora_delta.weights.factors
        return linear

    def _at(self, x: torch.Tensor) -> int:
        dense = x.is_contiguous() and x.device.type == "cpu"
        _check(dense and x.dtype is self._dtype, "a tensor of another kind")
        self._kept.append(x)
        return x.data_ptr()

    def _scratch(self, size: int) -> int:
        return self._at(torch.empty(size, dtype=self._dtype))


class _UnknownError(Exception):
    """The model has something that C++ does not run; the text says what."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise _UnknownError(what)


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise _UnknownError(what)
    return value


def _exactly(module: object, kind: type[T]) -> T:
    """``module`` itself, if it is of ``kind`` and of no class that changes it."""
    if type(module) is not kind:
        raise _UnknownError(f"a {type(module).__name__}")
    return module


def _collectives(model: CausalLM) -> Collectives | None:
    group = model.place.group
    if isinstance(group, SingleGroup):
        return None
    _check(isinstance(group, SharedMemoryGroup), "a group without shared memory")
    assert isinstance(group, SharedMemoryGroup)
    return group.collectives


def _only_grouped(plan: DeltaPlan) -> bool:
    """Tell whether adapters change nothing but linears, and the kernel takes all their rows."""
    others = (plan.segments, plan.biased, plan.normed, plan.thinned)
    lone = (plan.tiled, plan.routed, plan.vocab)
    return not any(others) and all(part is None for part in lone)

"""A fuzzer of adapter loading: damaged folders against the pools of two ranks, as threads.

``AdapterFuzzer.run`` damages one of a few good adapters, loads it on both ranks as a server would
(check, commit or abort, a request, reads, unload), and raises AssertionError when the answer is not
an adapter or one clear refusal, or when anything is left behind on a rank.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraReqConfig
from mstar_tp.testing.lora_files import pair, tiny_spec, with_norms, with_vocab, write_adapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey
from support.adapter_damage import Damage, Parts, damage, take_apart
from support.thread_group import ThreadGroups

SPEC = with_norms(with_vocab(tiny_spec(), 32))
WORLD_SIZE = 2
MAX_CHARS = 2300
"""The most characters of an answer: the checker's own bound, and the names before it."""
_INTERNALS = re.compile(
    r"Traceback|Errno|0x[0-9a-f]{6}|<class|codec|set_int_max|recursion|NoneType|[A-Za-z]Error\b|\bTrue\b:"
)
_STEM = "base_model.model.model"


class Outcome(NamedTuple):
    """The result of one damaged adapter: ``cause`` is None where it loaded."""

    damage: Damage
    cause: str | None


def good_adapters(folder: Path) -> list[Path]:
    """One of each kind of file, as the tools that make them write it."""
    q, up, down = (f"{_STEM}.layers.0.{m}_proj" for m in ("self_attn.q", "mlp.up", "mlp.down"))
    many = pair(q, 8, 8, rank=3) | pair(up, 8, 16) | pair(down, 16, 8)
    many |= pair(f"{_STEM}.layers.1.self_attn.qkv_proj", 8, 16)
    many[f"{up}.lora_B.bias"] = torch.ones(16)
    many[f"{_STEM}.layers.1.input_layernorm.weight"] = torch.ones(8)
    many[f"{_STEM}.embed_tokens.token_adapter.trainable_tokens_delta"] = torch.ones(3, 8)
    ends = pair("base_model.model.lm_head", 8, 32)
    ends[f"{_STEM}.embed_tokens.lora_embedding_A"] = torch.full((2, 32), 0.1)
    ends[f"{_STEM}.embed_tokens.lora_embedding_B"] = torch.full((8, 2), 0.1)
    kohya = {}
    for name, tensor in pair("lora_te_model_layers_1_self_attn_q_proj", 8, 8).items():
        kohya[name.replace("lora_A", "lora_down").replace("lora_B", "lora_up")] = tensor.half()
    kohya["lora_te_model_layers_1_self_attn_q_proj.alpha"] = torch.tensor(1.0)
    folders = [
        write_adapter(folder / "plain", pair(q, 8, 8)),
        write_adapter(
            folder / "many",
            many,
            rank_pattern={"q_proj": 3},
            alpha_pattern={r"layers\.0\..*": 2},
            lora_bias=True,
            modules_to_save=["layers.1.input_layernorm"],
            trainable_token_indices=[1, 5, 31],
            layers_to_transform=[0, 1],
        ),
        write_adapter(folder / "ends", ends, use_rslora=True, exclude_modules=["k_proj"]),
        write_adapter(folder / "kohya", kohya),
        write_adapter(folder / "diffusers", {}),
    ]
    (folder / "kohya" / "adapter_config.json").unlink()
    _write_diffusers(folder / "diffusers")
    return folders


def _write_diffusers(folder: Path) -> None:
    from safetensors.torch import save_file

    settings = {"text_encoder.r": 2, "text_encoder.lora_alpha": 4}
    tensors = pair("text_encoder.model.layers.0.self_attn.v_proj", 8, 4)
    metadata = {"lora_adapter_metadata": json.dumps(settings)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata=metadata)
    (folder / "adapter_config.json").unlink()


class AdapterFuzzer:
    """Two ranks that serve the tiny model; ``close`` ends their threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.landed: SimpleQueue[CopyIn] = SimpleQueue()
        self.refused: Counter[str] = Counter()
        groups = ThreadGroups(WORLD_SIZE)
        self.pools = [
            LoraAdapterPool(
                SPEC,
                device="cpu",
                groups=groups[rank].joint,
                dtype=torch.float32,
                decides=rank == 0,
                report=self.landed.put,
            )
            for rank in range(WORLD_SIZE)
        ]
        (folder / "good").mkdir()
        self._good = good_adapters(folder / "good")
        self._count = 0
        self._clean = [self._state(pool) for pool in self.pools]
        for path in self._good:
            assert self.load(path) is None, path
        self._assert_clean()

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def run(self, seed: int) -> Outcome:
        """Damage a good adapter and load it.

        Raises:
            AssertionError: the answer is no clear refusal, or something is left on a rank.
        """
        source = random.Random(seed)
        parts: Parts = take_apart(source.choice(self._good))
        bad = self.folder / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        done = damage(parts, bad, source)
        cause = self.load(bad)
        if cause is not None:
            self.assert_clear(cause, bad)
        self._assert_clean()
        return Outcome(done, cause)

    def load(self, path: Path) -> str | None:
        """Load, run a request's reads, unload; the reason of a refusal, or None.

        An adapter that loads is finite and the same weights on every rank.
        """
        self._count += 1
        key = AdapterKey("x", self._count)
        causes: SimpleQueue[str | None] = SimpleQueue()
        for pool in self.pools:
            pool.loads.begin(key, str(path), lambda cause, rank, changes: causes.put(cause))
        answers = [causes.get(timeout=60) for _ in self.pools]
        assert len({answer is None for answer in answers}) == 1, f"the ranks differ: {answers}"
        if answers[0] is not None:
            for pool in self.pools:
                pool.loads.abort(key)
            assert answers[0] == answers[1], answers
            return answers[0]
        return self._read(key, path)

    def _read(self, key: AdapterKey, path: Path) -> str | None:
        for pool in self.pools:
            assert pool.loads.commit(key, str(path)) is None
            assert pool.ingest_request(self._count, LoraReqConfig(key)) is None
        reports = [self.landed.get(timeout=60) for _ in self.pools]
        causes = [report.cause for report in reports if report.cause is not None]
        if not causes:
            assert len({report.digest for report in reports}) == 1, "the digests differ"
            for pool in self.pools:
                copy = pool.store.get(key)
                assert copy is not None
                self._assert_sound(copy)
        for pool in self.pools:
            for report in reports:
                if report.cause is not None:
                    pool.drop_copy(key, report.fetch_no, report.rank, report.cause)
            pool.remove_request(self._count)
            assert pool.loads.unload(key)
            pool.loads.forget()
        return min(causes) if causes else None

    def _assert_sound(self, copy: LoadedAdapter) -> None:
        tables = (copy.a, copy.b, copy.bias)
        tensors = [tensor for table in tables for tensor in table.values()]
        tensors += [rows.weight for rows in copy.rows.values()]
        tensors += [norms.weight for norms in copy.norms.values()]
        assert tensors and all(bool(tensor.isfinite().all()) for tensor in tensors)

    def assert_clear(self, cause: str, folder: Path) -> None:
        """Check that the text is one line that names the adapter and the file.

        Any log and wire takes it, and it shows nothing of the code's insides.
        """
        assert cause.startswith("adapter 'x'"), cause
        assert str(folder) in cause, cause
        assert cause.isprintable() and cause.encode("utf-8"), repr(cause)
        assert len(cause) < MAX_CHARS, f"{len(cause)} characters"
        found = _INTERNALS.search(cause)
        assert found is None, f"{found and found[0]!r} in {cause}"

    def _assert_clean(self) -> None:
        for rank, pool in enumerate(self.pools):
            self._wait_for_readers(pool)
            state = self._state(pool)
            assert state == self._clean[rank], f"left on rank {rank}: {state}"

    def _wait_for_readers(self, pool: LoraAdapterPool) -> None:
        """A reader that has reported lets go of its copy a moment later."""
        budget = pool.store.budget
        with budget._moved:
            budget._moved.wait_for(lambda: budget.memory_bytes == 0, timeout=60)

    def _state(self, pool: LoraAdapterPool) -> tuple[object, ...]:
        """All that a load could leave."""
        registry, store = pool.tables.registry, pool.store
        return (
            pool.reports.debug_state(),
            store.cpu_cache.used,
            store.num_copies,
            len(store.adapters),
            len(registry._loads),
            store.budget.memory_bytes,
        )

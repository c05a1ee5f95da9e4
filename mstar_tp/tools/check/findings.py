"""The findings of ``mstar-tp inspect`` and ``mstar-tp check`` as plain data: their ``--json``.

No torch.

Fields are added, never renamed or removed. Bytes of a rank are one number a rank, rank 0 first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Block = Literal["config", "environment", "model", "adapters", "memory", "server"]
BLOCKS: tuple[Block, ...] = ("config", "environment", "model", "adapters", "memory", "server")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence: what would be refused, or (of notes) what an operator should know."""

    block: Block
    text: str
    adapter: str | None = None
    """The adapter that the finding is about."""


class TargetFindings(msgspec.Struct, frozen=True, kw_only=True):
    """One module's role over the layers that have it in the adapter."""

    name: str
    layers: str
    """The layers as ranges; empty for a module outside every stack."""
    num_modules: int
    ranks: tuple[int, ...]
    kind: Literal["factors", "replaced"] = "factors"


class AdapterFindings(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter. Of one that is refused, what could still be read."""

    name: str
    path: str
    format: str | None = None
    files: int = 0
    file_bytes: int = 0
    tensors: int = 0
    dtypes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    alphas: tuple[float, ...] = ()
    """The alphas as PEFT's settings give them; empty for files without such."""
    scalings: tuple[float, ...] = ()
    """The factors that B @ A is multiplied with."""
    targets: tuple[TargetFindings, ...] = ()
    host_bytes: tuple[int, ...] | None = None
    """Each rank's copy in host memory; None without a model, or refused."""
    digest: str | None = None
    """The digest, with --digests and a model."""
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def servable(self) -> bool:
        return not self.refusals


class ModelTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A module that adapters may change."""

    name: str
    layers: int
    in_features: int
    out_features: int
    kind: str


class ModelFindings(msgspec.Struct, frozen=True, kw_only=True):
    """A base model, as ``tensor_parallel_size`` ranks would hold it."""

    path: str
    architecture: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    tensor_parallel_size: int
    weight_bytes: tuple[int, ...] | None
    """None where the model cannot be split so."""
    targets: tuple[ModelTarget, ...]


class MemoryFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a deployment takes before any request runs, and the memory there is."""

    device: Literal["cpu", "cuda"]
    weight_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    """All slots of a rank."""
    cpu_cache_bytes: tuple[int, ...]
    """The most that a rank's CPU cache holds."""
    kv_host_bytes: tuple[int, ...]
    """The most that a rank's host memory keeps of preempted requests' KV."""
    num_kv_pages: int
    max_model_len: int
    device_total: int | None
    """Bytes of the smallest GPU; None on the CPU."""
    device_free: int | None
    host_total: int | None
    """Bytes of this machine, or of the container; None where the system does not say."""
    host_free: int | None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``mstar-tp inspect``."""

    ok: bool
    path: str
    tensor_parallel_size: int
    max_lora_rank: int
    max_lora_saved_rows: int
    model: ModelFindings | None
    slot_bytes: tuple[int, ...] | None
    """One slot of a rank; None without a model."""
    adapters: tuple[AdapterFindings, ...]
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    seconds: float
    """Seconds that checking the adapters took."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``mstar-tp check``."""

    ok: bool
    source: str
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    model: ModelFindings | None
    memory: MemoryFindings | None
    adapters: tuple[AdapterFindings, ...]
    seconds: float
    """Seconds that checking the adapters took."""

"""The section ``engine``: what every rank must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mstar_tp.config.lora import LoraConfig
from mstar_tp.config.section import Fault, Positive, Section

STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""Tokens in one step by default. On a CPU 128 cost hardly more a token than thousands, and a step
of thousands would hold every stream up for seconds."""


class EngineConfig(Section):
    """What every rank must agree on; its digest is compared at start."""

    model: str
    """Folder of the base model, as Hugging Face lays it out (config.json, *.safetensors)."""
    tensor_parallel_size: Positive = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Positive | None = None
    """Prompt plus output tokens of one request; default: the model's own limit."""
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive | None = None
    """Tokens in one step; default: STEP_TOKENS of the device, max_num_seqs if that is more."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is let in first: who came first, or of the lowest priority number among those."""
    async_scheduling: bool | None = None
    """Plan and announce each step while the one before it runs; default: unless the instance is one
    CPU rank."""
    enforce_eager: bool = False
    """Capture no graphs: every step's kernels are launched one by one. CPU ranks capture none."""
    graph_rows: tuple[Positive, ...] | None = None
    """Rows of the decode steps that are captured; default: powers of two up to max_num_seqs, and
    max_num_seqs. A step takes the least that holds it; one that none holds is run in pieces."""
    graph_tokens: tuple[Positive, ...] | None = None
    """Tokens of the other steps that are captured, cut at their attentions; default: powers of two
    from 16 to 512. A step that none holds runs eagerly."""
    block_size: Positive = 16
    """Tokens in one KV page."""
    kv_cache_memory_bytes: Positive | None = None
    """KV pages' bytes on each rank; default: what max_num_seqs full requests need, at most
    4 GiB."""
    num_kv_pages: Positive | None = None
    """KV pages on each rank; overrides kv_cache_memory_bytes."""
    attention_backend: Literal["auto", "triton", "flashinfer", "torch"] = "auto"
    """What attends; auto: Triton's kernels on CUDA devices, torch and our own kernels on CPUs."""
    batch_invariant: bool = False
    """On CUDA devices, attention and adapters give a row the same bits whatever rows stand beside
    it."""
    threads: Positive | None = None
    """Compute threads of a CPU rank; default: its share of the cores, one for a small model."""
    logprobs_mode: Literal["raw_logprobs", "raw_logits"] = "raw_logprobs"
    """What a token's logprobs report: log-softmax of the model's logits, or the logits."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    read_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A read of an adapter that takes longer is a failure."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long start-up waits for every rank to say hello and load."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """A step that runs for longer hangs: its rank ends, and with it the group."""
    record: str | None = None
    """Rank R records the order it applies and its outcomes in this path with ``.rankR`` behind."""
    lora: LoraConfig | None = None

    def step_tokens(self, device_type: str) -> int:
        """The most tokens in one step on a device of this type (``cpu``, ``cuda``)."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(STEP_TOKENS[device_type], self.max_num_seqs)

    def _faults(self) -> Iterator[Fault]:
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            yield Fault(
                f"{{}} is {tokens}, wanted at least "
                f"{{}} = {self.max_num_seqs}: every running row needs a token a step",
                ("max_num_batched_tokens", "max_num_seqs"),
            )

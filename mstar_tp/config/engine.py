"""The section ``engine``: what every rank must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mstar_tp.config.lora import LoraConfig
from mstar_tp.config.section import Fault, Positive, Section

STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""Tokens in one step by default.

On a CPU 128 cost hardly more a token than thousands, and a step of thousands would hold every
stream up for seconds.
"""


class EngineConfig(Section):
    """What every rank must agree on; its digest is compared at start."""

    model: str
    """Folder of the base model, as Hugging Face lays it out: ``config.json``, ``*.safetensors``,
    ``tokenizer.json``."""
    tensor_parallel_size: Positive = 1
    """Ranks that the model is split over."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What weights and activations are kept in; ``auto``: the checkpoint's own dtype."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; ``auto`` takes GPUs where torch sees one."""
    max_model_len: Positive | None = None
    """Prompt plus output tokens of one request; unset: the model's own limit."""
    max_num_seqs: Positive = 64
    """Requests that run at once: rows in one step."""
    max_num_batched_tokens: Positive | None = None
    """Tokens in one step, at least ``max_num_seqs``; longer prompts are computed in chunks.

    More make long prompts a little cheaper; fewer hold other streams up for less and bring first
    tokens sooner. Unset: 2048 on CUDA devices, 128 on CPUs, ``max_num_seqs`` if that is more.
    """
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Who of the waiting is let in first. ``fcfs``: who came first; ``priority``: who has the
    lowest ``priority``, then who came first; ``fair``: whose adapter has had the fewest tokens
    for its weight, the base model counting as one."""
    async_scheduling: bool | None = None
    """Plan and announce each step while the one before it runs; unset: on, but off for a single CPU
    rank."""
    enforce_eager: bool = False
    """Capture no CUDA graphs: every step's kernels are launched one by one. CPU ranks capture none.
    """
    graph_rows: tuple[Positive, ...] | None = None
    """Rows of the decode steps that are captured.

    A step takes the least that holds it; one that none holds is run in pieces. Unset: 1, 2, 4 … and
    ``max_num_seqs``.
    """
    graph_tokens: tuple[Positive, ...] | None = None
    """Tokens of the other steps that are captured, in pieces with attention between them.

    A step that none holds runs eagerly. Unset: 16, 32 … 512.
    """
    block_size: Positive = 16
    """Tokens in one KV page."""
    kv_cache_memory_bytes: Positive | None = None
    """KV pages' bytes on each rank; unset: what ``max_num_seqs`` full requests need, at most 4 GiB.
    """
    num_kv_pages: Positive | None = None
    """KV pages on each rank; overrides ``kv_cache_memory_bytes``."""
    kv_offloading_size: Annotated[float, Field(ge=0)] | None = None
    """GiB of host memory, on all ranks together, for the KV of requests that gave their pages up to
    others: it comes back when they go on. Unset: as much as the pages themselves take, at most 4
    GiB a rank, and none where the pages hold ``max_num_seqs`` full requests. 0: they compute it
    again. Pinned at the start on CUDA devices, taken as it is needed on CPUs."""
    prefix_caching: bool = True
    """Keep full KV pages: requests whose tokens begin alike, on the same adapter, go on from them
    instead of computing them again. Kept pages are given away before a request lacks one."""
    attention_backend: Literal["auto", "triton", "flashinfer", "torch"] = "auto"
    """What attends. ``triton`` (kernels over pages) and ``flashinfer`` (its package; float16 and
    bfloat16, heads of 64, 128 or 256) run on CUDA devices, ``torch`` anywhere. ``auto``: Triton on
    CUDA devices; torch with our own kernels on CPUs."""
    batch_invariant: bool = False
    """On CUDA devices, attention and adapters give a row the same bits whatever rows stand beside
    it; needs the backend ``triton``."""
    threads: Positive | None = None
    """Compute threads of a CPU rank; unset: its share of the machine's cores, one where a rank
    holds under 64 MB of weights."""
    logprobs_mode: Literal["raw_logprobs", "raw_logits"] = "raw_logprobs"
    """What a token's logprobs report: log-softmax of the model's logits, or the logits."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    """Most logprobs of a token that a request may ask for."""
    read_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds: a read or a check of an adapter that takes longer, from its start, has failed."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that start-up waits for every rank to say hello and load."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds: a step that runs for longer counts as hung; its rank ends, and with it the group."""
    record: str | None = None
    """Rank R records what it applied in this path with ``.rankR`` behind, for ``mstar-tp replay``.
    """
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

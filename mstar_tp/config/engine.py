"""The section ``engine``: the settings that every rank must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mstar_tp.config.lora import LoraConfig
from mstar_tp.config.section import Fault, Flag, Positive, Section

STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""Tokens in one step by default.

On a CPU 128 cost hardly more a token than thousands, and a step of thousands would hold every
stream up for seconds."""


class EngineConfig(Section):
    """The settings that every rank must agree on; their digest is compared at start."""

    model: str
    """Folder of the base model, as Hugging Face lays it out.

    It holds ``config.json``, ``*.safetensors`` and ``tokenizer.json``."""
    tensor_parallel_size: Annotated[
        Positive, Flag("model", "ranks that the model is split over")
    ] = 1
    """Ranks that the model is split over."""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Flag("model", "auto, float32, bfloat16 or float16", value="DTYPE"),
    ] = "auto"
    """The dtype of weights and activations; ``auto``: the checkpoint's own."""
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag("model", "auto, cpu or cuda", value="DEVICE")
    ] = "auto"
    """The device that ranks compute on; ``auto`` takes GPUs where torch sees one."""
    max_model_len: Annotated[
        Positive | None,
        Flag("model", "prompt plus output tokens of one request", unset="the model's own limit"),
    ] = None
    """Prompt plus output tokens of one request; unset: the model's own limit."""
    max_num_seqs: Annotated[Positive, Flag("scheduling", "rows in one step")] = 64
    """Requests that run at once: rows in one step."""
    max_num_batched_tokens: Annotated[
        Positive | None,
        Flag(
            "scheduling",
            "tokens in one step; longer prompts are computed in chunks",
            unset=f"{STEP_TOKENS['cpu']} on CPUs, {STEP_TOKENS['cuda']} on CUDA devices, "
            "max-num-seqs if that is more",
        ),
    ] = None
    """Tokens in one step, at least ``max_num_seqs``; longer prompts are computed in chunks.

    More make long prompts a little cheaper; fewer hold other streams up for less and bring first
    tokens sooner. Unset: 2048 on CUDA devices, 128 on CPUs, ``max_num_seqs`` if that is more."""
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "fair"],
        Flag(
            "scheduling",
            "fcfs: by arrival; priority: requests of a lower priority number first; "
            "fair: adapters take turns, by the tokens they were given",
            value="POLICY",
        ),
    ] = "fcfs"
    """The order in which waiting requests are admitted.

    ``fcfs``: by arrival; ``priority``: the lowest ``priority`` first, then by arrival; ``fair``:
    the request first whose adapter has had the fewest tokens for its weight, the base model
    counting as one adapter."""
    async_scheduling: Annotated[
        bool | None,
        Flag(
            "scheduling",
            "plan each step while the one before it runs",
            unset="on, but for a single CPU rank",
        ),
    ] = None
    """Plan and announce each step while the one before it runs.

    Unset: on, but off for a single CPU rank."""
    enforce_eager: Annotated[
        bool, Flag("model", "capture no CUDA graphs", unset="capture; CPU ranks never do")
    ] = False
    """Capture no CUDA graphs: every step's kernels are launched one by one.

    CPU ranks capture none."""
    graph_rows: Annotated[
        tuple[Positive, ...] | None,
        Flag(
            "model",
            "rows of the decode steps that are captured",
            unset="1, 2, 4 … and max-num-seqs",
        ),
    ] = None
    """Rows of the decode steps that are captured.

    A step takes the least that holds it; one that
    none holds is run in pieces. Unset: 1, 2, 4 … and ``max_num_seqs``."""
    graph_tokens: Annotated[
        tuple[Positive, ...] | None,
        Flag(
            "model", "tokens of the other steps that are captured in pieces", unset="16, 32 … 512"
        ),
    ] = None
    """Tokens of the other steps that are captured, in pieces with attention between them.

    A step that none holds runs eagerly. Unset: 16, 32 … 512."""
    block_size: Annotated[Positive, Flag("memory", "tokens in one KV page")] = 16
    """Tokens in one KV page."""
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Flag(
            "memory",
            "KV pages' bytes on each rank",
            value="BYTES",
            unset="what max-num-seqs full requests need, up to 4 GiB",
        ),
    ] = None
    """KV pages' bytes on each rank.

    Unset: what ``max_num_seqs`` full requests need, at most 4 GiB."""
    num_kv_pages: Annotated[
        Positive | None, Flag("memory", "KV pages on each rank, instead of a number of bytes")
    ] = None
    """KV pages on each rank; overrides ``kv_cache_memory_bytes``."""
    kv_offloading_size: Annotated[
        Annotated[float, Field(ge=0)] | None,
        Flag(
            "memory",
            "GiB of host memory, on all ranks together, for KV of requests that gave up "
            "their pages",
            value="GIB",
            unset="as much as the KV pages take, up to 4 GiB a rank; 0: compute it again",
        ),
    ] = None
    """GiB of host memory, on all ranks together, for the KV of preempted requests.

    It comes back to the device when they go on. Unset: as much as the pages themselves take, at
    most 4 GiB a rank, and none where the pages hold ``max_num_seqs`` full requests. 0: they compute
    it again. Page-locked at the start on CUDA devices, taken as it is needed on CPUs."""
    prefix_caching: Annotated[
        bool,
        Flag(
            "memory",
            "keep full KV pages for requests whose tokens begin alike, on the same adapter",
        ),
    ] = True
    """Keep full KV pages for requests whose tokens begin alike, on the same adapter.

    Such requests go on from them instead of computing them again. Kept pages are given away before
    a request lacks one."""
    attention_backend: Annotated[
        Literal["auto", "triton", "flashinfer", "torch"],
        Flag(
            "model",
            "auto, triton, flashinfer or torch",
            value="NAME",
            note=": triton on CUDA devices",
        ),
    ] = "auto"
    """The implementation of attention.

    ``triton`` (kernels over pages) and ``flashinfer`` (its package; float16 and bfloat16, heads of
    64, 128 or 256) run on CUDA devices, ``torch`` anywhere. ``auto``: Triton on CUDA devices; torch
    with our own kernels on CPUs."""
    batch_invariant: Annotated[
        bool,
        Flag(
            "model", "on CUDA devices, attention and adapters give a row the same bits in any batch"
        ),
    ] = False
    """A row gets the same bits from attention and adapters whatever rows stand beside it.

    Holds on CUDA devices, and needs the backend ``triton``."""
    threads: Annotated[
        Positive | None,
        Flag(
            "model",
            "compute threads of a CPU rank",
            unset="its share of the cores, 1 for a small model",
        ),
    ] = None
    """Compute threads of a CPU rank.

    Unset: its share of the machine's cores, one where a rank holds under 64 MB of weights."""
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits"],
        Flag("API", "raw_logprobs or raw_logits: what logprobs report", value="MODE"),
    ] = "raw_logprobs"
    """The values that logprobs report: log-softmax of the model's logits, or the logits."""
    max_logprobs: Annotated[int, Field(ge=0), Flag("API", "most logprobs of a token")] = 20
    """Most logprobs of a token that a request may ask for."""
    read_timeout_s: Annotated[
        float,
        Field(gt=0),
        Flag(
            "adapters",
            "seconds after which reading an adapter has failed",
            value="SECONDS",
            name="--read-timeout",
        ),
    ] = 120.0
    """Seconds after which a read or a check of an adapter has failed, from its start."""
    start_timeout_s: Annotated[
        float,
        Field(gt=0),
        Flag(
            "model",
            "seconds that start-up waits for every rank",
            value="SECONDS",
            name="--start-timeout",
        ),
    ] = 600.0
    """Seconds that start-up waits for every rank to say hello and load."""
    step_timeout_s: Annotated[
        float,
        Field(gt=0),
        Flag(
            "scheduling",
            "seconds after which a step that still runs counts as hung",
            value="SECONDS",
            name="--step-timeout",
        ),
    ] = 300.0
    """Seconds after which a running step counts as hung: its rank ends, and with it the group."""
    record: Annotated[
        str | None,
        Flag(
            "logging",
            "record what every rank applied for `mstar-tp replay`; rank R writes PATH.rankR",
            value="PATH",
        ),
    ] = None
    """Path of the recordings that ``mstar-tp replay`` reads; rank R's ends in ``.rankR``."""
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

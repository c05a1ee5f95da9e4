"""The flag of each key.

One table for ``mstar-tp serve``, ``frontend``, ``check`` and ``python -m mstar_tp.worker``; flags
are named as vLLM's where they mean the same.
"""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One flag: its spellings, where its value goes in the configuration, and what help says."""

    flags: tuple[str, ...]
    key: str
    help: str
    value: str = "N"
    """What help calls the value."""
    many: bool = False
    switch: bool = False
    """Takes no value: ``--flag`` turns it on, ``--no-flag`` off."""


OPTIONS: tuple[Option, ...] = (
    Option(
        ("--tensor-parallel-size", "--tp", "-tp"),
        "engine.tensor_parallel_size",
        "ranks that the model is split over (default 1)",
    ),
    Option(
        ("--dtype",),
        "engine.dtype",
        "auto, float32, bfloat16 or float16 (default auto)",
        value="DTYPE",
    ),
    Option(("--device",), "engine.device", "auto, cpu or cuda (default auto)", value="DEVICE"),
    Option(
        ("--max-model-len",),
        "engine.max_model_len",
        "prompt plus output tokens of one request (default: the model's own limit)",
    ),
    Option(("--max-num-seqs",), "engine.max_num_seqs", "rows in one step (default 64)"),
    Option(
        ("--max-num-batched-tokens",),
        "engine.max_num_batched_tokens",
        "tokens in one step; longer prompts are computed in chunks (default: 128 on CPUs, 2048 on "
        "CUDA devices, max-num-seqs if that is more)",
    ),
    Option(
        ("--scheduling-policy",),
        "engine.scheduling_policy",
        "fcfs: by arrival; priority: requests of a lower priority number first; fair: adapters "
        "take turns, by the tokens they were given (default fcfs)",
        value="POLICY",
    ),
    Option(
        ("--async-scheduling",),
        "engine.async_scheduling",
        "plan each step while the one before it runs (default: on, but for a single CPU rank)",
        switch=True,
    ),
    Option(
        ("--enforce-eager",),
        "engine.enforce_eager",
        "capture no CUDA graphs (default: capture; CPU ranks never do)",
        switch=True,
    ),
    Option(
        ("--graph-rows", "--cudagraph-capture-sizes"),
        "engine.graph_rows",
        "rows of the decode steps that are captured (default: 1, 2, 4 … and max-num-seqs)",
        many=True,
    ),
    Option(
        ("--graph-tokens",),
        "engine.graph_tokens",
        "tokens of the other steps that are captured in pieces (default: 16, 32 … 512)",
        many=True,
    ),
    Option(("--block-size",), "engine.block_size", "tokens in one KV page (default 16)"),
    Option(
        ("--kv-cache-memory-bytes",),
        "engine.kv_cache_memory_bytes",
        "KV pages' bytes on each rank (default: what max-num-seqs full requests need, up to 4 GiB)",
        value="BYTES",
    ),
    Option(
        ("--num-kv-pages", "--num-gpu-blocks-override"),
        "engine.num_kv_pages",
        "KV pages on each rank, instead of a number of bytes",
    ),
    Option(
        ("--kv-offloading-size",),
        "engine.kv_offloading_size",
        "GiB of host memory, on all ranks together, for KV of requests that gave up their pages "
        "(default: as much as the KV pages take, up to 4 GiB a rank; 0: compute it again)",
        value="GIB",
    ),
    Option(
        ("--prefix-caching", "--enable-prefix-caching"),
        "engine.prefix_caching",
        "keep full KV pages for requests whose tokens begin alike, on the same adapter (default: "
        "on)",
        switch=True,
    ),
    Option(
        ("--attention-backend",),
        "engine.attention_backend",
        "auto, triton, flashinfer or torch (default auto: triton on CUDA devices)",
        value="NAME",
    ),
    Option(
        ("--batch-invariant",),
        "engine.batch_invariant",
        "on CUDA devices, attention and adapters give a row the same bits in any batch (default: "
        "off)",
        switch=True,
    ),
    Option(
        ("--threads",),
        "engine.threads",
        "compute threads of a CPU rank (default: its share of the cores, 1 for a small model)",
    ),
    Option(
        ("--logprobs-mode",),
        "engine.logprobs_mode",
        "raw_logprobs or raw_logits: what logprobs report (default raw_logprobs)",
        value="MODE",
    ),
    Option(("--max-logprobs",), "engine.max_logprobs", "most logprobs of a token (default 20)"),
    Option(
        ("--read-timeout",),
        "engine.read_timeout_s",
        "seconds after which reading an adapter has failed (default 120)",
        value="SECONDS",
    ),
    Option(
        ("--start-timeout",),
        "engine.start_timeout_s",
        "seconds that start-up waits for every rank (default 600)",
        value="SECONDS",
    ),
    Option(
        ("--step-timeout",),
        "engine.step_timeout_s",
        "seconds after which a step that still runs counts as hung (default 300)",
        value="SECONDS",
    ),
    Option(
        ("--record",),
        "engine.record",
        "record what every rank applied for `mstar-tp replay`; rank R writes PATH.rankR",
        value="PATH",
    ),
    Option(
        ("--lora", "--lora-modules"),
        "engine.lora.adapters",
        "name=path of an adapter to serve; repeatable",
        many=True,
        value="NAME=PATH",
    ),
    Option(("--max-loras",), "engine.lora.max_loras", "distinct adapters in one batch (default 8)"),
    Option(("--max-lora-rank",), "engine.lora.max_lora_rank", "highest adapter rank (default 16)"),
    Option(
        ("--max-lora-saved-rows",),
        "engine.lora.max_lora_saved_rows",
        "vocabulary rows that an adapter may replace, held in every slot (default 64)",
    ),
    Option(
        ("--max-cpu-loras",),
        "engine.lora.max_cpu_loras",
        "adapters in each rank's host memory (default: twice max-loras)",
    ),
    Option(
        ("--max-cpu-lora-bytes",),
        "engine.lora.max_cpu_lora_bytes",
        "bytes of adapters in each rank's host memory, instead of a number of adapters",
        value="BYTES",
    ),
    Option(
        ("--lora-root",),
        "engine.lora.roots",
        "folder that runtime loads may read from; repeatable (default: none, so no runtime loads)",
        many=True,
        value="FOLDER",
    ),
    Option(
        ("--adapters-root",),
        "engine.lora.adapters_root",
        "folder whose subfolders are adapters, named by their paths in it (default: none)",
        value="FOLDER",
    ),
    Option(
        ("--on-demand",),
        "engine.lora.on_demand",
        "let requests name any adapter in adapters-root: it is loaded then (default: off)",
        switch=True,
    ),
    Option(
        ("--max-on-demand",),
        "engine.lora.max_on_demand",
        "adapters loaded on demand that stay served (default 1000)",
    ),
    Option(
        ("--lora-exclude",),
        "engine.lora.exclude",
        "regular expression of modules that no adapter may change; slots need no memory for them",
        many=True,
        value="PATTERN",
    ),
    Option(
        ("--lora-limits",),
        "engine.lora.limits",
        "what an adapter may take: name=pinned,weight=W,max_rows=N,max_queued=N, any of these; "
        "repeatable",
        many=True,
        value="NAME=LIMITS",
    ),
    Option(
        ("--lora-default-limits",),
        "engine.lora.default_limits",
        "what adapters may take that have no limits of their own: weight=W,max_rows=N,max_queued=N",
        value="LIMITS",
    ),
    Option(
        ("--lora-base-limits",),
        "engine.lora.base_limits",
        "what the base model may take beside adapters: weight=W,max_rows=N,max_queued=N",
        value="LIMITS",
    ),
    Option(
        ("--served-model-name",),
        "server.served_model_name",
        "names of the base model; answers carry the first (default: the model path)",
        many=True,
        value="NAME",
    ),
    Option(("--host",), "server.host", "address of the API (default 127.0.0.1)", value="ADDRESS"),
    Option(
        ("--port",),
        "server.port",
        "port of the API; 0 takes a free one (default 8000)",
        value="PORT",
    ),
    Option(
        ("--api-key",),
        "server.api_key",
        "key that /v1 requests need; repeatable",
        many=True,
        value="KEY",
    ),
    Option(
        ("--admin-key",),
        "server.admin_key",
        "key that load, unload and debug routes need instead",
        value="KEY",
    ),
    Option(
        ("--api-key-file",),
        "server.api_key_file",
        "YAML file of API keys, each with the adapters it may name (default: none)",
        value="PATH",
    ),
    Option(
        ("--max-queue",), "server.max_queue", "requests held before the API says 503 (default 4096)"
    ),
    Option(
        ("--prepare-threads",),
        "server.prepare_threads",
        "threads that tokenize, lay out chats and decode images; 1: none, the event loop does it "
        "(default: the CPUs that nothing else keeps busy, from 2 to 8)",
    ),
    Option(
        ("--tool-call-parser",),
        "server.tool_call_parser",
        "how the model writes tool calls: hermes, llama3_json, mistral, none, or auto, which goes "
        "by its chat template (default auto)",
        value="FORM",
    ),
    Option(
        ("--shutdown-grace",),
        "server.shutdown_grace_s",
        "seconds that running requests get after SIGTERM (default 30)",
        value="SECONDS",
    ),
    Option(
        ("--max-restarts",),
        "server.max_restarts",
        "times in a row that ranks which died are started again (default 10; 0: never)",
    ),
    Option(
        ("--state-file",),
        "server.state_file",
        "file that keeps adapters loaded and unloaded at run time over a restart of the server",
        value="PATH",
    ),
    Option(
        ("--metrics-adapters",),
        "server.metrics_adapters",
        "adapters that metrics count by name, the most used ones (default 64; 0: none)",
    ),
    Option(
        ("--log-format",),
        "server.log_format",
        "text, or json: one object a line (default text)",
        value="FORMAT",
    ),
    Option(
        ("--enable-log-requests",),
        "server.enable_log_requests",
        "log each request's route, status, times, adapter and numbers of tokens (default: off)",
        switch=True,
    ),
    Option(
        ("--otlp-traces-endpoint",),
        "server.otlp_traces_endpoint",
        "URL that traces of requests are sent to; needs mstar-tp[otel] (default: none)",
        value="URL",
    ),
)

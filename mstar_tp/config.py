"""The serving configuration: one frozen tree, built once, sent whole to every rank.

The same tree comes from command-line flags (named as vLLM's where they mean the same) or a YAML
file whose keys are the flags without dashes. Every refusal names its key. No torch: frontend,
checks and ranks all import this module.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mstar_tp.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoraConfig(_Section):
    """Adapters and the two tiers that hold them."""

    adapters: dict[str, str] = {}
    """name -> folder, served from the start, in this order."""
    max_loras: Positive = 8
    """Device slots: how many distinct adapters can be in one batch."""
    max_lora_rank: Positive = 16
    max_lora_saved_rows: Annotated[int, Field(ge=0)] = 64
    """Rows of the embedding, and of the head, that an adapter may replace (trained tokens, whole
    matrices); every slot has memory for as many."""
    max_cpu_loras: Positive | None = None
    """Adapters in each rank's host tier; at least max_loras; default twice that."""
    max_cpu_lora_bytes: Positive | None = None
    """Bytes of adapters in each rank's host tier, instead of a number of adapters."""
    roots: tuple[str, ...] = ()
    """Folders that runtime loads may read from; without one, runtime loads are refused."""

    @property
    def host_capacity(self) -> int:
        """The host tier's bound: bytes where max_cpu_lora_bytes is given, else adapters."""
        return self.max_cpu_lora_bytes or self.max_cpu_loras or 2 * self.max_loras

    @model_validator(mode="after")
    def _tiers(self) -> Self:
        if self.max_cpu_loras is not None and self.max_cpu_lora_bytes is not None:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras} and max_cpu_lora_bytes is "
                f"{self.max_cpu_lora_bytes}: give one of the two bounds"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, "
                f"wanted at least max_loras = {self.max_loras}"
            )
        for name, path in self.adapters.items():
            if not name or not path:
                raise ValueError(f"adapters: {name!r}: {path!r} needs a name and a path")
        return self


class EngineConfig(_Section):
    """What every rank must agree on; its digest is compared at start."""

    model: str
    """Folder of the base model, as Hugging Face lays it out (config.json, *.safetensors)."""
    tensor_parallel_size: Positive = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Positive | None = None
    """Prompt plus output tokens of one request; default: the model's own limit."""
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    async_scheduling: bool | None = None
    """Plan and announce each step while the one before it runs; default: unless the instance is one
    CPU rank."""
    block_size: Positive = 16
    """Tokens in one KV page."""
    kv_cache_memory_bytes: Positive | None = None
    """KV pages' bytes on each rank; default: what max_num_seqs full requests need, at most
    4 GiB."""
    num_kv_pages: Positive | None = None
    """KV pages on each rank; overrides kv_cache_memory_bytes."""
    threads: Positive | None = None
    """Compute threads of a CPU rank; default: its share of the cores, one for a small model."""
    logprobs_mode: Literal["raw_logprobs", "raw_logits"] = "raw_logprobs"
    """What a token's logprobs report: log-softmax of the model's logits, or the logits."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    read_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A read of an adapter that takes longer is a failure."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long start-up waits for every rank to say hello and load."""
    record: str | None = None
    """Rank R records the order it applies and its outcomes in this path with ``.rankR`` behind."""
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, wanted at least "
                f"max_num_seqs = {self.max_num_seqs}: every running row needs a token a step"
            )
        return self


class ServerConfig(_Section):
    """The API server; ranks never read it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    served_model_name: tuple[str, ...] = ()
    """Names of the base model; default: the model path as given. Answers carry the first."""
    api_key: tuple[str, ...] = ()
    admin_key: str | None = None
    """When set, load/unload/debug routes need it as their bearer token."""
    max_queue: Positive = 4096
    """Requests the server holds before it answers 503."""
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may go on after SIGTERM."""

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class ServeConfig(_Section):
    engine: EngineConfig
    server: ServerConfig = ServerConfig()

    @property
    def base_names(self) -> tuple[str, ...]:
        return self.server.served_model_name or (self.engine.model,)

    @model_validator(mode="after")
    def _names(self) -> Self:
        if self.engine.lora is not None:
            for name in self.base_names:
                if name in self.engine.lora.adapters:
                    raise ValueError(
                        f"lora.adapters: {name!r} is a name of the base model: rename the adapter"
                    )
        return self

    def digest(self) -> str:
        """Hash of what ranks must agree on: equal on every rank of one instance."""
        payload = json.dumps(self.engine.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]

    def dump_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def build_config(tree: dict[str, Any], *, source: str) -> ServeConfig:
    """A validated config from a plain tree; ``source`` names the file or "command line" in errors.

    Raises:
        ConfigError: naming every key that is unknown, missing or out of range, one a line.
    """
    try:
        return ServeConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for e in error.errors():
            key = ".".join(str(p) for p in e["loc"]) or "config"
            given = "" if e["type"] in ("missing", "value_error") else f" (got {e['input']!r})"
            lines.append(f"{source}: {key}: {e['msg']}{given}")
        raise ConfigError("\n".join(lines)) from None


def load_config(path: str | Path) -> ServeConfig:
    """Read a YAML serving config.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds bad keys, each of them named.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wanted a mapping with the keys engine and server")
    return build_config(tree, source=str(path))

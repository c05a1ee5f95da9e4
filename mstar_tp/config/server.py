"""The section ``server``: the API server's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mstar_tp.config.section import Positive, Section


class ServerConfig(Section):
    """The API server; ranks never read it."""

    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port that the API listens on; 0 takes a free one and says which."""
    served_model_name: tuple[str, ...] = ()
    """Names of the base model; answers carry the first. Unset: the model path as given."""
    api_key: tuple[str, ...] = ()
    """Keys of clients: a request's bearer token must be one of them. Unset: no key is needed."""
    admin_key: str | None = None
    """Key that operators' routes (loads, unloads, debugging) need as their bearer token instead."""
    api_key_file: str | None = None
    """YAML file of API keys: each plain or hashed, with the adapters it may name, whether it may
    use the base model, and whether it is an operator's."""
    max_queue: Positive = 4096
    """Requests held, and loads in flight, before the answer is 503."""
    prepare_threads: Positive | None = None
    """Threads that tokenize, lay out chats and decode images; 1: none, the event loop does it.
    Unset: as many as there are CPUs which nothing else keeps busy, from 2 to 8."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    """How the model writes tool calls; ``auto`` goes by its chat template."""
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that running requests may go on after SIGTERM."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """How often in a row ranks that died are started again, 0: never. A group that serves for a
    while starts the count anew."""
    state_file: str | None = None
    """File that keeps the adapters loaded and unloaded at run time over a restart of the server."""
    metrics_adapters: Annotated[int, Field(ge=0)] = 64
    """Adapters whose names stand in metrics, the most used ones; the rest count as ``other``."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written, the ranks' too: ``json`` is one object a line."""
    enable_log_requests: bool = False
    """Log each request: route, status, times, adapter, numbers of tokens. Never what it says."""
    otlp_traces_endpoint: str | None = None
    """URL that traces of requests are sent to as OTLP. Needs the extra ``otel``."""

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

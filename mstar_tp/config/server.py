"""The section ``server``: the settings of the API server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mstar_tp.config.section import Flag, Positive, Section


class ServerConfig(Section):
    """The API server; ranks never read it."""

    host: Annotated[str, Flag("API", "address of the API", value="ADDRESS")] = "127.0.0.1"
    """Address that the API listens on."""
    port: Annotated[
        int, Field(ge=0, le=65535), Flag("API", "port of the API; 0 takes a free one", value="PORT")
    ] = 8000
    """Port that the API listens on; 0 takes a free one and says which."""
    served_model_name: Annotated[
        tuple[str, ...],
        Flag(
            "API",
            "names of the base model; answers carry the first",
            value="NAME",
            unset="the model path",
        ),
    ] = ()
    """Names of the base model; answers carry the first. Unset: the model path as given."""
    api_key: Annotated[
        tuple[str, ...], Flag("API", "key that /v1 requests need; repeatable", value="KEY")
    ] = ()
    """Keys of clients: a request's bearer token must be one of them. Unset: no key is needed."""
    admin_key: Annotated[
        str | None, Flag("API", "key that load, unload and debug routes need instead", value="KEY")
    ] = None
    """Key that operators' routes (loads, unloads, debugging) need as their bearer token instead."""
    api_key_file: Annotated[
        str | None,
        Flag(
            "API",
            "YAML file of API keys, each with the adapters it may name",
            value="PATH",
            unset="none",
        ),
    ] = None
    """YAML file of API keys, each plain or hashed.

    It says which adapters a key may name, whether it may use the base model, and whether it is an
    operator's."""
    max_queue: Annotated[Positive, Flag("API", "requests held before the API says 503")] = 4096
    """Requests held, and loads in flight, before the answer is 503."""
    prepare_threads: Annotated[
        Positive | None,
        Flag(
            "API",
            "threads that tokenize, lay out chats and decode images; 1: none, the event "
            "loop does it",
            unset="the CPUs that nothing else keeps busy, from 2 to 8",
        ),
    ] = None
    """Threads that tokenize, lay out chats and decode images; 1: none, the event loop does it.

    Unset: as many as there are CPUs which nothing else keeps busy, from 2 to 8."""
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "none"],
        Flag(
            "API",
            "how the model writes tool calls: hermes, llama3_json, mistral, none, or "
            "auto, which goes by its chat template",
            value="FORM",
        ),
    ] = "auto"
    """The form in which the model writes tool calls; ``auto`` goes by its chat template."""
    shutdown_grace_s: Annotated[
        float,
        Field(ge=0),
        Flag(
            "API",
            "seconds that running requests get after SIGTERM",
            value="SECONDS",
            name="--shutdown-grace",
        ),
    ] = 30.0
    """Seconds that running requests may go on after SIGTERM."""
    max_restarts: Annotated[
        int,
        Field(ge=0),
        Flag("API", "times in a row that ranks which died are started again", note="; 0: never"),
    ] = 10
    """Times in a row that ranks which died are started again, 0: never.

    A group that serves for a while starts the count anew."""
    state_file: Annotated[
        str | None,
        Flag(
            "API",
            "file that keeps adapters loaded and unloaded at run time over a restart of the server",
            value="PATH",
        ),
    ] = None
    """File that keeps the adapters loaded and unloaded at run time over a restart of the server."""
    metrics_adapters: Annotated[
        int,
        Field(ge=0),
        Flag(
            "logging", "adapters that metrics count by name, the most used ones", note="; 0: none"
        ),
    ] = 64
    """Adapters whose names stand in metrics, the most used ones; the rest count as ``other``."""
    log_format: Annotated[
        Literal["text", "json"], Flag("logging", "text, or json: one object a line", value="FORMAT")
    ] = "text"
    """The form of log lines, the ranks' too: ``json`` is one object a line."""
    enable_log_requests: Annotated[
        bool,
        Flag("logging", "log each request's route, status, times, adapter and numbers of tokens"),
    ] = False
    """Log each request's route, status, times, adapter and numbers of tokens, never its text."""
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag(
            "logging",
            "URL that traces of requests are sent to; needs mstar-tp[otel]",
            value="URL",
            unset="none",
        ),
    ] = None
    """URL that traces of requests are sent to as OTLP. Needs the extra ``otel``."""

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

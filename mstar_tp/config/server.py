"""The section ``server``: the API server's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mstar_tp.config.section import Positive, Section


class ServerConfig(Section):
    """The API server; ranks never read it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    served_model_name: tuple[str, ...] = ()
    """Names of the base model; default: the model path as given. Answers carry the first."""
    api_key: tuple[str, ...] = ()
    admin_key: str | None = None
    """When set, load/unload/debug routes need it as their bearer token."""
    api_key_file: str | None = Field(
        default=None,
        description="YAML file of API keys: each plain or hashed, with the adapters it may name, "
        "whether it may use the base model, and whether it is an operator's.",
    )
    max_queue: Positive = 4096
    """Requests the server holds before it answers 503."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    """How the model writes tool calls; auto goes by its chat template."""
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may go on after SIGTERM."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """How often in a row ranks that died are started again; a group that serves for a while starts
    the count anew."""
    state_file: str | None = None
    """Where the adapters loaded and unloaded at run time are kept over a restart of the server."""

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

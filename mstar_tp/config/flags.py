"""The flag of each key, made from the fields of the sections.

One table for ``mstar-tp serve``, ``frontend``, ``check`` and ``python -m mstar_tp.worker``.
Defaults are read off the fields, so that help shows the values that hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from mstar_tp.config.section import Flag, Group
from mstar_tp.config.tree import all_fields

ALIASES = {
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--cudagraph-capture-sizes": "--graph-rows",
    "--num-gpu-blocks-override": "--num-kv-pages",
    "--enable-prefix-caching": "--prefix-caching",
    "--lora-modules": "--lora",
}
"""Spellings of vLLM and SGLang -> ours, for flags that mean the same."""

PEERS_FLAGS = {
    "--enable-lora": "leave it out: LoRA is on where there is an adapter or a root",
    "--gpu-memory-utilization": "KV pages are asked for with --kv-cache-memory-bytes",
    "--enable-auto-tool-choice": "leave it out: --tool-call-parser alone says how calls are read",
    "--enable-chunked-prefill": "leave it out: prompts are always computed in chunks",
    "--fully-sharded-loras": "leave it out: both factors are sharded as their layer is",
    "--lora-dtype": "leave it out: adapters are kept in the model's dtype",
    "--lora-target-modules": "--lora-exclude says what no adapter may change",
    "--lora-paths": "name adapters with --lora",
    "--max-loras-per-batch": "here it is --max-loras",
    "--chat-template": "leave it out: a template is read from the model's folder, or an adapter's",
    "--disable-log-requests": "leave it out: requests are logged with --enable-log-requests alone",
    "--disable-log-stats": "leave it out: GET /metrics has what it would log",
    "--trust-remote-code": "leave it out: no code is read from a model's folder",
    "--quantization": "quantised weights are not served",
    "--kv-cache-dtype": "quantised caches are not served",
    "--speculative-config": "speculative decoding is not served",
    "--pipeline-parallel-size": "only tensor parallelism is served: --tensor-parallel-size",
    "--data-parallel-size": "start several instances: launch/ray_serve.py routes between them",
    "--tokenizer": "leave it out: the tokenizer is the model folder's, or an adapter's",
    "--load-format": "leave it out: weights are safetensors",
    "--seed": "leave it out: a request's `seed` says it",
    "--config": "name the .yaml file in MODEL's place",
}
"""The usual flags of vLLM and SGLang that are none here, and what to do instead."""


class Option(NamedTuple):
    """One flag: its spellings, the key that it sets, and what help says."""

    flags: tuple[str, ...]
    """All spellings, ours first."""
    key: str
    group: Group
    help: str
    value: str
    """The name that help gives the value."""
    many: bool
    """Takes several values, and may stand several times."""
    switch: bool
    """Takes no value: ``--flag`` turns it on, ``--no-flag`` off."""


def _option(key: str, field: FieldInfo, flag: Flag) -> Option:
    own = flag.name or "--" + key.rpartition(".")[2].replace("_", "-")
    kind = str(field.annotation)
    told = _default(flag, field.get_default(call_default_factory=True))
    return Option(
        flags=(own, *(alias for alias, ours in ALIASES.items() if ours == own)),
        key=key,
        group=flag.group,
        help=flag.help + (f" (default{told}{flag.note})" if told else ""),
        value=flag.value,
        many=kind.startswith(("tuple[", "dict[")),
        switch="bool" in kind,
    )


def _default(flag: Flag, value: Any) -> str:
    """The default as help tells it behind the word, or "" where there is nothing to tell."""
    if flag.unset is not None:
        return f": {flag.unset}"
    if isinstance(value, bool):
        return ": on" if value else ": off"
    if isinstance(value, float):
        return f" {value:g}"
    return f" {value}" if isinstance(value, int | str) else ""


def _options() -> Iterator[Option]:
    for key, field in all_fields():
        yield from (_option(key, field, each) for each in field.metadata if isinstance(each, Flag))


OPTIONS: tuple[Option, ...] = tuple(_options())

"""The serving configuration: one frozen tree, built once, sent whole to every rank.

The same tree comes from command-line flags (named as vLLM's where they mean the same) or a YAML
file whose keys are the flags without dashes. Every refusal names its key. No torch: frontend,
checks and ranks all import this module. ``parse_config`` finds everything that is wrong at once;
who serves raises it, who checks reports it and goes on with the rest.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mstar_tp.errors import ConfigError

try:  # libyaml's: a hundred thousand adapters take a second instead of six
    from yaml import CSafeDumper as _Dumper
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeDumper as _Dumper  # type: ignore[assignment]
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

Positive = Annotated[int, Field(gt=0)]

MAX_ADAPTER_NAME_CHARS = 256


def adapter_name_fault(name: str) -> str | None:
    """Why no adapter can be called ``name``, in words that follow the name of the setting."""
    parts = name.split("/")
    if (
        0 < len(name) <= MAX_ADAPTER_NAME_CHARS
        and name.isprintable()
        and not any(part in ("", ".", "..") for part in parts)
        and "\\" not in name
    ):
        return None
    return (
        f"must be 1 to {MAX_ADAPTER_NAME_CHARS} printable characters, not start or end with '/', "
        "and hold no '..' or backslash"
    )


class _Fault(NamedTuple):
    """Keys of one section that do not go together. ``text`` has a {} for the name of each;
    ``entry`` is the one of the first key's entries that is at fault, where not all of it is.
    """

    text: str
    keys: tuple[str, ...]
    entry: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        """Of what is at fault, within the section. An entry's name may hold dots."""
        return (*self.keys[0].split("."), *self.entry)


class _FaultsError(ValueError):
    """All faults of a section at once."""

    def __init__(self, faults: Sequence[_Fault]) -> None:
        super().__init__("; ".join(fault.text.format(*fault.keys) for fault in faults))
        self.faults = tuple(faults)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def _faults(self) -> Iterator[_Fault]:
        """What values that are right by themselves are wrong together."""
        yield from ()

    @model_validator(mode="after")
    def _together(self) -> Self:
        faults = list(self._faults())
        if faults:
            raise _FaultsError(faults)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes and on as true, which would pass for a 1.
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and "bool" not in annotation:
            raise ValueError(f"got {str(value).lower()}, wanted a value, not a switch")
        if any("\0" in text for text in _strings(value)):
            raise ValueError(f"got {_shown(value)}, which holds a NUL, as no path or name does")
        return value


def _strings(value: Any) -> Iterator[str]:
    """Those in a value of a setting: itself, a list's, a mapping's keys and values."""
    parts = [value]
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    yield from (part for part in parts if isinstance(part, str))


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
    exclude: tuple[str, ...] = ()
    """Regular expressions of modules that no adapter may change, so that slots have no memory for
    them."""

    @field_validator("exclude")
    @classmethod
    def _expressions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @property
    def host_capacity(self) -> int:
        """The host tier's bound: bytes where max_cpu_lora_bytes is given, else adapters."""
        return self.max_cpu_lora_bytes or self.max_cpu_loras or 2 * self.max_loras

    def _faults(self) -> Iterator[_Fault]:
        if self.max_cpu_loras is not None and self.max_cpu_lora_bytes is not None:
            yield _Fault(
                f"{{}} is {self.max_cpu_loras} and {{}} is {self.max_cpu_lora_bytes}: "
                "give one of the two bounds",
                ("max_cpu_loras", "max_cpu_lora_bytes"),
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield _Fault(
                f"{{}} is {self.max_cpu_loras}, wanted at least {{}} = {self.max_loras}",
                ("max_cpu_loras", "max_loras"),
            )
        for name, path in self.adapters.items():
            fault = adapter_name_fault(name)
            if not name or not path:
                entry = _literal(f"{name!r}: {path!r}")
                yield _Fault(f"{{}}: {entry} needs a name and a path", ("adapters",), (name,))
            elif fault is not None:
                yield _Fault(
                    f"{{}}: the name {_literal(_shown(name))} {fault}", ("adapters",), (name,)
                )


STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""Tokens in one step by default. On a CPU 128 cost hardly more a token than thousands, and a step
of thousands would hold every stream up for seconds."""


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

    def _faults(self) -> Iterator[_Fault]:
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            yield _Fault(
                f"{{}} is {tokens}, wanted at least "
                f"{{}} = {self.max_num_seqs}: every running row needs a token a step",
                ("max_num_batched_tokens", "max_num_seqs"),
            )


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


class ServeConfig(_Section):
    engine: EngineConfig
    server: ServerConfig = ServerConfig()

    @property
    def base_names(self) -> tuple[str, ...]:
        return self.server.served_model_name or (self.engine.model,)

    def _faults(self) -> Iterator[_Fault]:
        adapters = {} if self.engine.lora is None else self.engine.lora.adapters
        for name in self.base_names:
            if name in adapters:
                yield _Fault(
                    f"{{}}: {_literal(repr(name))} is a name of the base model: rename the adapter",
                    ("engine.lora.adapters",),
                    (name,),
                )

    def digest(self) -> str:
        """Hash of what ranks must agree on: equal on every rank of one instance."""
        payload = json.dumps(self.engine.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]

    def dump_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


class ConfigFindings(NamedTuple):
    """A configuration and what is wrong with it. With problems, ``config`` holds what is right:
    the keys at fault have their defaults, and a model that is not named is "".
    """

    config: ServeConfig | None
    problems: tuple[str, ...]
    faulty: frozenset[str] = frozenset()
    """Keys that have not the value they were given."""


def build_config(
    tree: dict[str, Any], *, source: str, flags: Mapping[str, str] | None = None
) -> ServeConfig:
    """A validated config from a plain tree; see ``parse_config``.

    Raises:
        ConfigError: naming every key that is unknown, missing or out of range, one a line.
    """
    config, problems, _ = parse_config(tree, source=source, flags=flags)
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def parse_config(
    tree: dict[str, Any], *, source: str, flags: Mapping[str, str] | None = None
) -> ConfigFindings:
    """Judge a plain tree, whole. ``source`` names the file or "command line" in problems, one
    sentence each; ``flags``: key (with dots) -> the flag that it was given by, which is named
    instead.
    """
    tree, names = copy.deepcopy(tree), _Names(source, flags or {})
    problems: dict[str, None] = {}
    faulty: set[str] = set()
    for _ in range(_MAX_PASSES):
        try:
            config = ServeConfig.model_validate(tree)
            return ConfigFindings(config, tuple(problems), frozenset(faulty))
        except ValidationError as error:
            # What hides behind a bad key comes out once that key is gone.
            for e in error.errors():
                for path, text in _sentences(e, names):
                    problems[text] = None
                    faulty.add(".".join(map(str, path)))
                    _forget(tree, path)
    return ConfigFindings(None, tuple(problems), frozenset(faulty))


_MAX_PASSES = 20
_NO_MODEL: dict[tuple[str, ...], Any] = {("engine",): {"model": ""}, ("engine", "model"): ""}


class _Names(NamedTuple):
    """What a person calls a key."""

    source: str
    flags: Mapping[str, str]

    def key(self, key: str) -> str:
        """At the start of a sentence."""
        return self.flags.get(key) or f"{self.source}: {key}"

    def fault(self, section: str, fault: _Fault) -> str:
        keys = [f"{section}.{key}" if section else key for key in fault.keys]
        named = [self.flags.get(full, key) for full, key in zip(keys, fault.keys, strict=True)]
        text = fault.text.format(*named)
        return text if keys[0] in self.flags else f"{self.source}: {section or 'config'}: {text}"


def _sentences(error: Any, names: _Names) -> Iterator[tuple[tuple[Any, ...], str]]:
    """(path of the key at fault, what is wrong with it)."""
    path, kind, message = error["loc"], error["type"], error["msg"]
    key = ".".join(str(part) for part in path if part != "[key]") or "config"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, _FaultsError):
        for fault in cause.faults:
            section = ".".join(map(str, path))
            yield (*path, *fault.path), names.fault(section, fault)
    elif kind == "extra_forbidden":
        yield path, f"{names.key(key)} is no setting{_meant(path)}"
    elif kind == "missing":
        name = "engine.model" if path == ("engine",) else key
        yield path, f"{names.key(name)} is missing"
    elif cause is not None:
        yield path, f"{names.key(key)}: {cause}"
    elif message.startswith("Input should be "):
        wanted = message.removeprefix("Input should be ")
        yield path, f"{names.key(key)}: got {_shown(error['input'])}, wanted {wanted}"
    else:
        yield path, f"{names.key(key)}: {message} (got {_shown(error['input'])})"


def _literal(text: str) -> str:
    """``text`` as part of a fault's text, where braces are places for names."""
    return text.replace("{", "{{").replace("}", "}}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _forget(tree: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Take the key at fault out of the tree; where it lies in a list, the list."""
    if path in _NO_MODEL and (len(path) == 1 or path[-1] not in tree[path[0]]):
        (tree if len(path) == 1 else tree["engine"])[path[-1]] = _NO_MODEL[path]
        return
    holder, key, here = tree, None, tree
    for part in path:
        if not isinstance(here, dict) or part not in here:
            break
        holder, key, here = here, part, here[part]
    if key is not None:
        del holder[key]


def all_keys(section: type[BaseModel] = ServeConfig, prefix: str = "") -> Iterator[str]:
    """Every key that holds a value, with dots."""
    inner: dict[str, type[BaseModel]] = {
        "engine": EngineConfig,
        "server": ServerConfig,
        "lora": LoraConfig,
    }
    for name in section.model_fields:
        if name in inner:
            yield from all_keys(inner[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _meant(path: tuple[Any, ...]) -> str:
    """The key that an unknown one is close to: one of its neighbours, or one of another section."""
    leaf = str(path[-1]).lstrip("-").replace("-", "_").lower()
    home = "".join(f"{part}." for part in path[:-1])
    keys = sorted(all_keys(), key=lambda key: not key.startswith(home))
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(keys)}
    by_leaf |= {short: key for short, key in _SHORT.items() if short not in by_leaf}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    if close:
        return f": did you mean {by_leaf[close[0]]}?"
    there = sorted(key.removeprefix(home) for key in keys if key.startswith(home))
    whole = [name for name in there if "." not in name]
    return f": there are {', '.join(whole or ['engine', 'server'])}"


_SHORT = {
    "tp": "engine.tensor_parallel_size",
    "lora_modules": "engine.lora.adapters",
    "num_gpu_blocks_override": "engine.num_kv_pages",
    "read_timeout": "engine.read_timeout_s",
    "start_timeout": "engine.start_timeout_s",
    "shutdown_grace": "server.shutdown_grace_s",
    "lora_root": "engine.lora.roots",
}
"""What keys are called as flags, where that differs."""


class _Loader(_SafeLoader):
    """As YAML's own, but a key that stands twice is kept in mind, not passed over."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.twice: list[str] = []

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in seen:
                    self.twice.append(
                        f"{key.value!r} stands twice, in lines {seen[key.value]} and {line}: "
                        "remove one"
                    )
                seen[key.value] = line
        return super().construct_mapping(node, deep=deep)


def read_tree(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plain tree in a YAML file, and what is wrong with it.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else than keys.
    """
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        try:
            tree = loader.get_single_data()
        finally:
            loader.dispose()
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        text = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {text}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wanted a mapping with the keys engine and server")
    return tree, tuple(f"{path}: {text}" for text in loader.twice)


def load_config(path: str | Path) -> ServeConfig:
    """Read a YAML serving config.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds bad keys, each of them named.
    """
    tree, twice = read_tree(path)
    config, problems, _ = parse_config(tree, source=str(path))
    if twice or problems or config is None:
        raise ConfigError("\n".join(twice + problems))
    return config

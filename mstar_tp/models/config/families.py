"""A model's config.json, parsed by ourselves: ranks import no transformers for it.

Both spellings in use are read: ``rope_theta`` + ``rope_scaling`` and ``rope_parameters``;
``torch_dtype`` and ``dtype``. Whatever would change the maths and is not served is refused by its
key. Reading a config needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mstar_tp.common.errors import CheckpointError
from mstar_tp.common.problems import Problems
from mstar_tp.models.config.config_keys import Keys, read_json
from mstar_tp.models.config.config_moe import ExpertsConfig, mixtral_experts, qwen_experts
from mstar_tp.models.config.config_rope import gemma_ropes, single_rope
from mstar_tp.models.config.config_vision import VisionConfig, llava_vision

if TYPE_CHECKING:
    from mstar_tp.layers.rotary import RopeConfig

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One causal language model: sizes, and what its family leaves open. Equal on every rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Tokens of a sequence, prompt and output together."""
    dtype: str
    """The checkpoint's own dtype: what "auto" means."""
    activation: Activation
    tied_head: bool
    scale: float
    """The factor that attention scores are multiplied by."""
    windows: tuple[int | None, ...]
    """A layer's sliding window: a token sees itself and window - 1 tokens before; None: all."""
    ropes: tuple[RopeConfig, ...]
    """A layer's rotary embedding."""
    final_softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True where every head of q and k has a norm."""
    experts: ExpertsConfig | None = None
    """None: every layer has one MLP."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a text, of config.json and generation_config.json."""

    vision: VisionConfig | None = None
    """The settings of a model that reads images."""

    @property
    def inner_sizes(self) -> int:
        """The inner sizes of all MLPs of all layers together, every expert's counted."""
        if self.experts is None:
            return self.num_layers * self.intermediate_size
        sparse, experts = len(self.experts.layers), self.experts
        dense = (self.num_layers - sparse) * self.intermediate_size
        return dense + sparse * experts.num_experts * experts.inner_size


def load_model_config(folder: str | Path, problems: Problems | None = None) -> ModelConfig:
    """The config of the model in ``folder``.

    ``problems`` takes every key that is at fault; what does not go together is only looked for
    where each is right.

    Raises:
        CheckpointError: config.json is missing or malformed, or names something that is not served:
            the last of its problems.
    """
    problems = Problems() if problems is None else problems
    path, before = Path(folder) / "config.json", len(problems)
    try:
        config = _read_config(path, Keys(read_json(path), str(path), problems))
    except CheckpointError:
        if len(problems) == before or problems.is_full:
            raise
    if len(problems) > before:
        raise problems.errors[-1]
    return config


def _read_config(path: Path, keys: Keys) -> ModelConfig:
    architecture = _architecture(keys)
    with keys.problems:
        _refuse_unserved(keys)
    eos_ids = _eos_ids(keys, path)
    if architecture in _WITH_VISION:
        config = _WITH_VISION[architecture](keys, eos_ids, path.parent)
    else:
        config = FAMILIES[architecture](keys, eos_ids)
    if config.num_heads % config.num_kv_heads:
        raise keys.refuse(
            "num_key_value_heads", f"a divisor of num_attention_heads = {config.num_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"{path}: head_dim is {config.head_dim}, wanted an even number: rotary embedding turns "
            "pairs of values"
        )
    return config


def architectures() -> tuple[str, ...]:
    """The architectures served, as config.json names them."""
    return (*FAMILIES, *_WITH_VISION)


def _architecture(keys: Keys) -> str:
    names = keys.get("architectures")
    served = architectures()
    if not isinstance(names, list) or len(names) != 1 or names[0] not in served:
        raise keys.refuse("architectures", f"one of {', '.join(served)}")
    return str(names[0])


def _refuse_unserved(keys: Keys) -> None:
    for key in ("quantization_config", "compression_config"):
        if keys.has(key):
            method = keys.table(key).get("quant_method")
            raise CheckpointError(
                f"{keys.where}: {key} says the weights are quantised ({method}), which is not "
                "served: use the float checkpoint of this model"
            )
    if keys.flag("use_bidirectional_attention", False):
        raise keys.refuse("use_bidirectional_attention", "false: only causal attention is served")
    if keys.flag("is_encoder_decoder", False):
        raise keys.refuse("is_encoder_decoder", "false: only decoders are served")


def _eos_ids(keys: Keys, path: Path) -> tuple[int, ...]:
    ids = keys.ids("eos_token_id")
    generation = path.with_name("generation_config.json")
    if generation.exists():
        beside = Keys(read_json(generation), str(generation), keys.problems)
        ids += beside.ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _dtype(keys: Keys) -> str:
    key = "dtype" if keys.has("dtype") else "torch_dtype"
    return keys.choice(key, _DTYPES, "float32")


class _Defaults(NamedTuple):
    """The values of a family for keys that config.json leaves out."""

    head_dim: int | None = None
    activation_key: str = "hidden_act"
    tied_head: bool = False
    rms_norm_eps: float = 1e-6


def _llama_like(keys: Keys, eos_ids: tuple[int, ...], absent: _Defaults) -> ModelConfig:
    """The keys that families read the same way; a family replaces what it reads its own way."""
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    num_layers = keys.count("num_hidden_layers")
    head_dim = keys.count(
        "head_dim", absent.head_dim or _even_head_dim(keys, hidden_size, num_heads)
    )
    activation = keys.choice(absent.activation_key, tuple(_ACTIVATIONS))
    return ModelConfig(
        architecture=_architecture(keys),
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", absent.rms_norm_eps),
        max_position=keys.count("max_position_embeddings"),
        dtype=_dtype(keys),
        activation=_ACTIVATIONS[activation],
        tied_head=keys.flag("tie_word_embeddings", absent.tied_head),
        scale=head_dim**-0.5,
        windows=(None,) * num_layers,
        ropes=(),
        eos_ids=eos_ids,
    )


def _with_one_rope(config: ModelConfig, keys: Keys, theta: float = 10_000.0) -> ModelConfig:
    rope = single_rope(keys, config.max_position, theta)
    return replace(config, ropes=(rope,) * config.num_layers)


def _even_head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int | None:
    """The head size that follows from the others; None where head_dim is given."""
    if keys.has("head_dim"):
        return None
    if hidden_size % num_heads:
        raise keys.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden_size}")
    return hidden_size // num_heads


def _layer_types(keys: Keys, default: Callable[[int], str]) -> tuple[str, ...]:
    """Each layer's kind of attention: as listed, or by the family's rule."""
    num_layers = keys.count("num_hidden_layers")
    types = keys.get("layer_types")
    if types is None:
        return tuple(default(i) for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or set(types) - set(_LAYER_TYPES):
        raise keys.refuse("layer_types", f"{num_layers} of {' or '.join(_LAYER_TYPES)}")
    return tuple(types)


def read_llama(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    """A Llama's config, and the base of what is read like one."""
    bias = keys.flag("attention_bias", False)
    config = replace(
        _llama_like(keys, eos_ids, _Defaults()),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )
    return _with_one_rope(config, keys)


def _one_window(keys: Keys, config: ModelConfig, window: int | None) -> ModelConfig:
    """The same window for every layer; None: no window."""
    if keys.has("layer_types"):
        raise keys.refuse("layer_types", "no such key for this architecture")
    return replace(config, windows=(window,) * config.num_layers)


def _mistral(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    window = keys.count("sliding_window") if keys.has("sliding_window") else None
    config = _one_window(keys, _llama_like(keys, eos_ids, _Defaults()), window)
    return _with_one_rope(config, keys)


def _mixtral(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    window = keys.count("sliding_window") if keys.has("sliding_window") else None
    config = _llama_like(keys, eos_ids, _Defaults(rms_norm_eps=1e-5))
    config = replace(config, experts=mixtral_experts(keys, config.num_layers))
    return _with_one_rope(_one_window(keys, config, window), keys, theta=1_000_000.0)


def _qwen_windows(keys: Keys) -> tuple[int | None, ...]:
    """Qwen slides from layer ``max_window_layers`` on, if ``use_sliding_window`` says so."""
    window = None
    if keys.flag("use_sliding_window", False):
        window = keys.count("sliding_window", 4096)
    first = keys.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int or first < 0:
        raise keys.refuse("max_window_layers", "a number of layers")
    types = _layer_types(keys, lambda i: _LAYER_TYPES[window is not None and i >= first])
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _qwen2(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    config = replace(
        _llama_like(keys, eos_ids, _Defaults()), windows=_qwen_windows(keys), qkv_bias=True
    )
    return _with_one_rope(config, keys)


def _qwen3(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    config = replace(
        _llama_like(keys, eos_ids, _Defaults(head_dim=128)),
        windows=_qwen_windows(keys),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
    return _with_one_rope(config, keys)


def _qwen3_moe(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    bias, window = keys.flag("attention_bias", False), None
    if keys.flag("use_sliding_window", False) and keys.tree.get("sliding_window", 4096) is not None:
        window = keys.count("sliding_window", 4096)
    config = _llama_like(keys, eos_ids, _Defaults())
    config = replace(
        config,
        experts=qwen_experts(keys, config.num_layers),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
    return _with_one_rope(_one_window(keys, config, window), keys)


def _gemma3(keys: Keys, eos_ids: tuple[int, ...]) -> ModelConfig:
    cap, bias = "final_logit_softcapping", keys.flag("attention_bias", False)
    if keys.has("attn_logit_softcapping"):
        # Gemma 3 has none, and the reference implementation ignores one that is set.
        raise keys.refuse("attn_logit_softcapping", "null for this architecture")
    defaults = _Defaults(head_dim=256, activation_key="hidden_activation", tied_head=True)
    config = _llama_like(keys, eos_ids, defaults)
    types, window = _gemma_layer_types(keys), keys.count("sliding_window", 4096)
    ropes = gemma_ropes(keys, config.max_position)
    return replace(
        config,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        ropes=tuple(ropes[kind] for kind in types),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        final_softcap=keys.number(cap) if keys.has(cap) else None,
    )


def _gemma_layer_types(keys: Keys) -> tuple[str, ...]:
    """Every sixth layer is full, or every ``sliding_window_pattern``-th."""
    name = "sliding_window_pattern"
    pattern = keys.count(name if keys.has(name) else f"_{name}", 6)
    return _layer_types(keys, lambda i: _LAYER_TYPES[(i + 1) % pattern != 0])


FAMILIES: dict[str, Callable[[Keys, tuple[int, ...]], ModelConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Gemma3ForCausalLM": _gemma3,
}


_LLAMA_DEFAULTS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
"""The values of a Llama for keys that a text_config leaves out."""


def _llava(keys: Keys, eos_ids: tuple[int, ...], folder: Path) -> ModelConfig:
    table = keys.table("text_config")
    table.choice("model_type", ("llama",), "llama")
    text = Keys({**_LLAMA_DEFAULTS, **table.tree}, table.where, table.problems)
    _refuse_unserved(text)
    config = read_llama(text, tuple(dict.fromkeys((*eos_ids, *text.ids("eos_token_id")))))
    vision = llava_vision(keys, folder)
    if vision.image_token_id >= config.vocab_size:
        raise keys.refuse("image_token_index", f"below vocab_size = {config.vocab_size}")
    return replace(
        config,
        architecture=_architecture(keys),
        dtype=_dtype(keys if keys.has("dtype") or keys.has("torch_dtype") else text),
        tied_head=keys.flag("tie_word_embeddings", False),
        vision=vision,
    )


_WITH_VISION: dict[str, Callable[[Keys, tuple[int, ...], Path], ModelConfig]] = {
    "LlavaForConditionalGeneration": _llava,
}
"""Families that read images."""

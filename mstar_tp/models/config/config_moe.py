"""The settings of a model's experts in config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_tp.models.config.config_keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The sparse layers of a mixture-of-experts model."""

    num_experts: int
    per_token: int
    """Experts that a token goes to."""
    inner_size: int
    """An expert's intermediate size."""
    normalise: bool
    """True where the weights of a token's experts are scaled to a sum of one."""
    layers: frozenset[int]
    """The layers that have experts; the others have one MLP for all tokens."""


def qwen_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    """Every ``decoder_sparse_step``-th layer has experts, but for ``mlp_only_layers``.

    Raises:
        CheckpointError: a key is missing, malformed or contradicts another.
    """
    step = keys.count("decoder_sparse_step", 1)
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise keys.refuse("mlp_only_layers", "a list of layer numbers")
    layers = frozenset(i for i in range(num_layers) if (i + 1) % step == 0) - set(dense)
    return _experts(
        keys,
        inner_size=keys.count("moe_intermediate_size"),
        normalise=keys.flag("norm_topk_prob", False),
        layers=layers,
    )


def mixtral_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    """Experts in every layer, their weights always scaled.

    Raises:
        CheckpointError: a key is missing or malformed.
    """
    return _experts(
        keys,
        inner_size=keys.count("intermediate_size"),
        normalise=True,
        layers=frozenset(range(num_layers)),
    )


def _experts(
    keys: Keys, *, inner_size: int, normalise: bool, layers: frozenset[int]
) -> ExpertsConfig:
    names = [name for name in ("num_experts", "num_local_experts") if keys.has(name)]
    counts = [keys.count(name) for name in names or ["num_experts"]]
    if len(set(counts)) > 1:
        raise keys.refuse("num_local_experts", f"num_experts = {counts[0]}, which it also names")
    per_token = keys.count("num_experts_per_tok")
    if per_token > counts[0]:
        raise keys.refuse("num_experts_per_tok", f"at most the {counts[0]} experts there are")
    return ExpertsConfig(
        num_experts=counts[0],
        per_token=per_token,
        inner_size=inner_size,
        normalise=normalise,
        layers=layers,
    )

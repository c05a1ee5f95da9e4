"""Rotary settings from config.json, in both spellings, checked before any table is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_tp.models.config.config_keys import Keys

if TYPE_CHECKING:
    from mstar_tp.layers.rotary import RopeConfig

_KINDS = ("default", "linear", "llama3", "yarn")


def single_rope(keys: Keys, max_position: int, theta: float = 10_000.0) -> RopeConfig:
    """The one rotary embedding of a model whose layers are alike.

    ``theta`` is the family's base where config.json names none.

    Raises:
        CheckpointError: a kind or setting is not served; the message names its key.
    """
    _refuse_partial(keys)
    name = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    table = keys.table(name)
    theta = keys.number("rope_theta", theta)
    return _rope(table, table.number("rope_theta", theta), keys, max_position)


def gemma_ropes(keys: Keys, max_position: int) -> dict[str, RopeConfig]:
    """Gemma 3's two: sliding layers have their own base, and ``rope_scaling`` spares them."""
    _refuse_partial(keys)
    full_theta = keys.number("rope_theta", 1_000_000.0)
    sliding_theta = keys.number("rope_local_base_freq", 10_000.0)
    nested = keys.table("rope_parameters")
    if nested.tree and not set(nested.tree) <= {"full_attention", "sliding_attention"}:
        raise keys.refuse("rope_parameters", "the keys full_attention and sliding_attention")
    full = nested.table("full_attention") if nested.tree else keys.table("rope_scaling")
    sliding = nested.table("sliding_attention")
    return {
        "full_attention": _rope(full, full.number("rope_theta", full_theta), keys, max_position),
        "sliding_attention": _rope(
            sliding, sliding.number("rope_theta", sliding_theta), keys, max_position
        ),
    }


def _refuse_partial(keys: Keys) -> None:
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.refuse(
            "partial_rotary_factor", "1: rotary embedding of a part of a head is not served"
        )


def _rope(table: Keys, theta: float, top: Keys, max_position: int) -> RopeConfig:
    from mstar_tp.layers.rotary import RopeConfig

    _refuse_partial(table)
    name = "rope_type" if table.has("rope_type") else "type"
    kind = table.choice(name, _KINDS, "default")
    if kind == "default":
        return RopeConfig(kind="default", theta=theta)
    factor = table.number("factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    original = top.count(
        "original_max_position_embeddings",
        table.count("original_max_position_embeddings", max_position),
    )
    if kind == "llama3":
        return _llama3(table, theta, factor, original)
    return _yarn(table, theta, factor, original)


def _llama3(table: Keys, theta: float, factor: float, original: int) -> RopeConfig:
    from mstar_tp.layers.rotary import RopeConfig

    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if low >= high:
        raise table.refuse("low_freq_factor", f"less than high_freq_factor = {high}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(table: Keys, theta: float, factor: float, original: int) -> RopeConfig:
    from mstar_tp.layers.rotary import RopeConfig

    def optional(name: str) -> float | None:
        return table.number(name) if table.has(name) else None

    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )

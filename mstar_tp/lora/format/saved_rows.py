"""Rows of the vocabulary that an adapter replaces, and the head's share where it is tied. No torch.

The rows are trained tokens, or whole embeddings and heads; a tied head takes some over from its
embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.lora.format.keys import Role
from mstar_tp.lora.format.parts import AdapterModule, Part, SavedRows, check_shape
from mstar_tp.lora.format.peft_config import CONFIG_NAME, PeftConfig
from mstar_tp.lora.format.placing import ModulePlace
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget


def tied_head(spec: LoraSpec) -> LoraTarget | None:
    """The head that shares the embedding's weight, if the model has one."""
    return next((target for target in spec.targets if target.tied), None)


def embedding_of(spec: LoraSpec) -> LoraTarget | None:
    """The model's embedding, if adapters may change it."""
    return next((t for t in spec.targets if t.parallel is LoraParallel.VOCAB_IN), None)


def tied_module(
    spec: LoraSpec, config: PeftConfig | None, modules: Sequence[AdapterModule]
) -> list[AdapterModule]:
    """The head's share of an embedding's factors, where PEFT ties the two (ensure_weight_tying).

    There is one where the file does not hold the head's itself. Its rank is the embedding's; its
    scaling is its own.
    """
    head = tied_head(spec)
    embedding = next((m for m in modules if m.place.target.parallel is LoraParallel.VOCAB_IN), None)
    if config is None or not config.ensure_weight_tying or head is None or embedding is None:
        return []
    if any(module.place.target is head for module in modules):
        return []
    name = head.module(0, 0)
    module = AdapterModule(
        name=name,
        place=ModulePlace(head, 0, (0,), name),
        lora_rank=embedding.lora_rank,
        scaling=config.scaling_of((name,), config.rank_of((name,))),
        a=embedding.b,
        b=embedding.a,
        swapped=True,
    )
    return [module]


def saved_rows(
    spec: LoraSpec,
    config: PeftConfig | None,
    parts: Mapping[str, Part],
    adapted: Mapping[str, Part],
    where: str,
    problems: Problems,
) -> list[SavedRows]:
    """The rows that ``parts`` (target -> its replacing tensor) replace.

    ``adapted`` are the targets that have factors.

    Raises:
        AdapterError: a tensor and the config disagree, a row is out of range, or the rows are more
            than a slot holds; past the limit of ``problems``.
    """
    before = len(problems)
    for name, part in parts.items():
        with problems:
            if name in adapted:
                raise AdapterError(
                    f"{where}: {part.key.text} replaces what {adapted[name].key.text} adds to: "
                    "PEFT keeps one of the two, so remove the other from the file"
                )
    found: list[SavedRows] = []
    for part in parts.values():
        with problems:
            found.append(_rows_of(config, part, where))
    with problems:
        _refuse_many(spec, parts, found, where)
    if len(problems) > before:
        return found
    tied: list[SavedRows] = []
    with problems:
        tied = _tied_tokens(spec, config, parts, adapted, found, where)
    return found + tied


def _refuse_many(
    spec: LoraSpec, parts: Mapping[str, Part], found: Sequence[SavedRows], where: str
) -> None:
    large = [f"{len(s.ids)} rows of {s.name}" for s in found if len(s.ids) > spec.max_saved_rows]
    if large:
        tokens = all(part.key.role is Role.TOKENS for part in parts.values())
        setting = "trainable_token_indices" if tokens else "modules_to_save"
        raise AdapterError(
            f"{where}: {setting} replaces {' and '.join(large)}, wanted at most "
            f"{spec.max_saved_rows}: raise --max-lora-saved-rows, which takes memory for as many "
            "rows in every slot, or merge the adapter into a base of its own with `mstar-tp merge`"
        )


def _rows_of(config: PeftConfig | None, part: Part, where: str) -> SavedRows:
    target, name = part.place.target, part.place.name
    vocab = target.vocab_size
    if part.key.role is Role.TOKENS:
        ids: Sequence[int] = _token_ids(config, part, vocab, where)
    else:
        ids = range(vocab)
    check_shape(where, part, (len(ids), target.hidden_size))
    return SavedRows(name=name, target=target, tensor=part.tensor, ids=ids)


def _token_ids(config: PeftConfig | None, part: Part, vocab: int, where: str) -> tuple[int, ...]:
    ids = config.tokens_of(part.names) if config is not None else None
    if ids is None:
        raise AdapterError(
            f"{where}: {part.key.text}: trainable_token_indices in {CONFIG_NAME} do not say which "
            f"tokens of {part.place.name} these are"
        )
    if max(ids) >= vocab:
        raise AdapterError(
            f"{where}: {part.key.text}: trainable_token_indices name token {max(ids)}, but the "
            f"base model's vocabulary has {vocab}"
        )
    return ids


def _tied_tokens(
    spec: LoraSpec,
    config: PeftConfig | None,
    parts: Mapping[str, Part],
    adapted: Mapping[str, Part],
    found: Collection[SavedRows],
    where: str,
) -> list[SavedRows]:
    """The trained tokens of an embedding that PEFT puts into the head tied to it, too.

    There are none where the config gives the head tokens of its own.
    """
    head = tied_head(spec)
    tokens = [s for s in found if s.target.parallel is LoraParallel.VOCAB_IN]
    if head is None or not tokens or parts[tokens[0].target.name].key.role is not Role.TOKENS:
        return []
    (embedding,) = tokens
    name = head.module(0, 0)
    own = config.tokens_of((name,)) if config is not None else None
    if own is not None and own != embedding.ids:
        return []
    other = parts.get(head.name) or adapted.get(head.name)
    if other is not None:
        raise AdapterError(
            f"{where}: {other.key.text}: the head is tied to the embedding, whose trained tokens "
            "it takes over: remove this tensor"
        )
    return [SavedRows(name=name, target=head, tensor=embedding.tensor, ids=embedding.ids)]

"""The model's modules from an adapter's keys, with tensors, rank and scaling. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.lora.format.adapter_files import Headers, StoredTensor
from mstar_tp.lora.format.agreement import agree
from mstar_tp.lora.format.keys import Key, Role, Spelling, parse_key, refused_kind
from mstar_tp.lora.format.kohya import Settings, read_settings
from mstar_tp.lora.format.parts import (
    AdapterModule,
    AdapterParts,
    BaseCopy,
    Part,
    SavedNorm,
    check_shape,
)
from mstar_tp.lora.format.peft_config import CONFIG_NAME, PeftConfig
from mstar_tp.lora.format.placing import ModelIndex, PlaceError, component_of
from mstar_tp.lora.format.saved_rows import embedding_of, saved_rows, tied_module
from mstar_tp.lora.format.stacked_experts import expert_parts
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget

MAX_KEY_CHARS = 500

_NO_TENSORS = "holds no LoRA tensors: check that it is the adapter's file"

_FACTORS = frozenset({Role.A, Role.B, Role.BIAS, Role.EMBEDDING_A, Role.EMBEDDING_B})
_HALVES = {
    Role.A: Role.B,
    Role.B: Role.A,
    Role.EMBEDDING_A: Role.EMBEDDING_B,
    Role.EMBEDDING_B: Role.EMBEDDING_A,
}
_PlaceKey = tuple[str, int, tuple[int, ...]]


def assemble(
    spec: LoraSpec, headers: Headers, problems: Problems, others: Sequence[LoraSpec] = ()
) -> AdapterParts:
    """Place every tensor that belongs to ``spec``, in the order of its targets and layers.

    There are none where the adapter changes only other stages of the model, whose specs are
    ``others``; what belongs to those is checked as well, and left out. Where ``problems`` were
    found, the result holds the tensors that are right by themselves.

    Raises:
        AdapterError: a setting or key that cannot be served, half a pair, a misfit, or nothing at
            all; the message names the file and the key. Past the limit of ``problems``.
    """
    keys = parse_keys(headers, problems)
    settings = read_settings(headers, keys, problems)
    specs = (spec, *others)
    index = ModelIndex(specs)
    stages = [_Assembler(each, headers.where, settings, problems) for each in specs]
    for key in keys:
        with problems:
            if key.role is not Role.ALPHA:
                _deal(stages, index, key, headers, settings)
    _match_alphas(headers.where, keys, stages, problems)
    found = [stage.finish() for stage in stages]
    parts = found[0]
    with problems:
        empty = not any(part.modules or part.saved or part.norms for part in found)
        if empty and settings.known and not len(problems):
            raise AdapterError(f"{headers.where}: {_NO_TENSORS}")
    if settings.known and settings.config is not None:
        parts.notes = agree(headers.where, settings.config, stages, found, problems)
    parts.config = settings.config
    parts.spellings = tuple(sorted({key.spelling.value for key in keys}))
    return parts


def _deal(
    stages: Sequence[_Assembler],
    index: ModelIndex,
    key: Key,
    headers: Headers,
    settings: Settings,
) -> None:
    """Give the key's tensor to the stage that places it."""
    where, tensor, config = headers.where, headers.tensors[key.text], settings.config
    stacked = index.experts(key)
    if stacked is not None:
        number, experts = stacked
        if settings.known:
            most = stages[number].spec.max_rank
            for part in expert_parts(where, key, tensor, experts, config, most):
                stages[number].take(part)
        return
    try:
        number, place = index.find(key)
    except PlaceError as error:
        whole = key.role in (Role.PLAIN, Role.SAVED)
        what = "is a whole tensor (modules_to_save), no LoRA factor, and " if whole else ""
        asked = "" if config is None else _asked_parameters(config)
        raise AdapterError(f"{where}: {key.text}: {what}{error}{asked}") from None
    part = Part(key, tensor, place)
    weights = tuple(f"{name}.weight" for name in part.names)
    if key.role in _FACTORS and config is not None and config.adapts_parameter(weights):
        part = part._replace(parameters=weights)
    stages[number].take(part)


def _asked_parameters(config: PeftConfig) -> str:
    if not config.target_parameters:
        return ""
    asked = ", ".join(sorted(config.target_parameters))[:200]
    return (
        f"; target_parameters in {CONFIG_NAME} is {asked}, and "
        "only stacked experts that this model has, and weights of its linears, can be served"
    )


def parse_keys(headers: Headers, problems: Problems) -> list[Key]:
    """Every key of the files, taken apart, and of one adapter.

    Raises:
        AdapterError: a key says nothing, or what cannot be served; past the limit of ``problems``.
    """
    where, before = headers.where, len(problems)
    keys: list[Key] = []
    for text in headers.tensors:
        with problems:
            keys.append(_parse(where, text))
    with problems:
        if not keys and len(problems) == before:
            raise AdapterError(f"{where}: {_NO_TENSORS}")
        names = sorted({key.adapter or "unnamed" for key in keys if key.role in _FACTORS})
        if len(names) > 1:
            raise AdapterError(
                f"{where}: holds tensors of several adapters ({', '.join(names)}): save each in a "
                "folder of its own"
            )
    with problems:
        encoders = sorted({component_of(key) for key in keys} - {""})
        if len(encoders) > 1:
            raise AdapterError(
                f"{where}: holds tensors of several text encoders ({', '.join(encoders)}), and the "
                "base model can be only one of them: save its own in a file of their own"
            )
    return keys


def _parse(where: str, text: str) -> Key:
    if len(text) > MAX_KEY_CHARS:
        raise AdapterError(f"{where}: has a key of {len(text)} characters: {text[:80]}...")
    why = refused_kind(text)
    if why is not None:
        raise AdapterError(f"{where}: {text}: {why}; only plain LoRA can be served")
    key = parse_key(text)
    if key is None:
        raise AdapterError(f"{where}: {text or repr(text)}: is no LoRA tensor, so nothing takes it")
    return key


@dataclass(slots=True)
class _Assembler:
    spec: LoraSpec
    where: str
    settings: Settings
    problems: Problems
    pairs: dict[_PlaceKey, dict[Role, Part]] = field(default_factory=dict)
    owners: dict[tuple[str, int, int], Part] = field(default_factory=dict)
    """(target, layer, slice) -> the part that named it first."""
    saved: dict[str, Part] = field(default_factory=dict)
    """Target -> the tensor that replaces rows of its weight."""
    norms: dict[tuple[str, int], Part] = field(default_factory=dict)
    """(target, layer) -> the tensor that replaces its weight."""
    copies: list[BaseCopy] = field(default_factory=list)

    @property
    def config(self) -> PeftConfig | None:
        return self.settings.config

    def take(self, part: Part) -> None:
        """Take one tensor of this stage's."""
        part = self._with_role(part)
        if part.key.role in _FACTORS:
            self._take_factor(part)
        elif not self.settings.known:
            return  # whether a whole tensor replaces the base's or copies it
        elif part.key.role in (Role.SAVED, Role.TOKENS):
            self._take_saved(part)
        else:
            self._take_copy(part)

    def finish(self) -> AdapterParts:
        """The adapter's parts from the tensors taken."""
        problems = self.problems
        order = {target.name: number for number, target in enumerate(self.spec.targets)}
        places = sorted(self.pairs, key=lambda place: (order[place[0]], place[1], place[2]))
        if not self.settings.known:
            # Ranks, scalings and what is saved are the settings' to say: no more can be validated.
            for place in places:
                with problems:
                    self._halves(self.pairs[place])
            return AdapterParts()
        modules: list[AdapterModule] = []
        for place in places:
            with problems:
                modules.append(self._module(self.pairs[place]))
        modules += tied_module(self.spec, self.config, modules)
        adapted = {name: part for (name, _, _), part in self.owners.items()}
        saved = saved_rows(self.spec, self.config, self.saved, adapted, self.where, problems)
        norms = sorted(self.norms, key=lambda place: (order[place[0]], place[1]))
        return AdapterParts(
            modules=tuple(modules),
            saved=tuple(saved),
            norms=tuple(_saved_norm(self.norms[place]) for place in norms),
            copies=tuple(self.copies),
        )

    # ------------------------------------------------------------------ taking tensors in

    def _with_role(self, part: Part) -> Part:
        key = part.key
        known = self.settings.known
        if key.role is Role.SAVED and known and not self._is_saved(part):
            raise AdapterError(
                f"{self.where}: {key.text}: replaces {part.place.name} whole, but modules_to_save "
                f"in {CONFIG_NAME} does not name it: correct the setting or remove the tensor"
            )
        if key.role is not Role.PLAIN:
            return part
        role = Role.SAVED if self._is_saved(part) else Role.BASE
        return part._replace(key=key._replace(role=role))

    def _is_saved(self, part: Part) -> bool:
        """Tell whether a whole tensor replaces the base model's, or is only a copy of it."""
        config = self.config
        if config is None:
            return False
        # PEFT saves a tied head along with its embedding, without naming it.
        embedding = embedding_of(self.spec)
        if embedding is not None and config.ensure_weight_tying and part.place.target.tied:
            return config.saves((*part.names, embedding.module(0, 0)))
        return config.saves(part.names)

    def _take_factor(self, part: Part) -> None:
        target, layer, slices, name = part.place
        embeds = target.parallel is LoraParallel.VOCAB_IN
        if target.parallel is LoraParallel.NORM:
            raise AdapterError(
                f"{self.where}: {part.key.text}: {name} is a norm: it has no factors"
            )
        if embeds != (part.key.role in (Role.EMBEDDING_A, Role.EMBEDDING_B)):
            wanted = "lora_embedding_A and lora_embedding_B" if embeds else "lora_A and lora_B"
            raise AdapterError(f"{self.where}: {part.key.text}: {name} takes {wanted}")
        pair = self.pairs.setdefault((target.name, layer, slices), {})
        if part.key.role in pair:
            other = pair[part.key.role].key.text
            raise AdapterError(f"{self.where}: {part.key.text} and {other} both name one module")
        pair[part.key.role] = part
        for index in slices:
            owner = self.owners.setdefault((target.name, layer, index), part)
            if owner.place.slices != slices:
                raise AdapterError(
                    f"{self.where}: {part.key.text} and {owner.key.text} both change "
                    f"{target.module(layer, index)}: keep one of the two"
                )

    def _take_saved(self, part: Part) -> None:
        target = part.place.target
        if target.parallel.is_linear or part.key.tensor != "weight":
            raise AdapterError(
                f"{self.where}: {part.key.text}: modules_to_save replaces {part.place.name} whole, "
                "which cannot be served (only the embedding, the head and norms can be replaced): "
                "merge the adapter into a base of its own (PEFT: merge_and_unload)"
            )
        if target.parallel is LoraParallel.NORM:
            check_shape(self.where, part, (target.in_features,))
            place = target.name, part.place.layer
            if self.norms.setdefault(place, part) is not part:
                other = self.norms[place].key.text
                raise AdapterError(f"{self.where}: {part.key.text} and {other} replace one weight")
            return
        if target.name in self.saved:
            other = self.saved[target.name].key.text
            raise AdapterError(f"{self.where}: {part.key.text} and {other} replace one weight")
        self.saved[target.name] = part

    def _take_copy(self, part: Part) -> None:
        target, _, slices, name = part.place
        if len(slices) != 1:
            raise AdapterError(
                f"{self.where}: {part.key.text}: is a copy of a fused base weight, which this "
                "model keeps in parts: remove it from the file"
            )
        shape = (target.out_slices[slices[0]].out_features, *target.base_shape)
        if target.parallel is LoraParallel.VOCAB_IN:
            shape = shape[::-1]
        norm = target.parallel is LoraParallel.NORM
        why = ": the adapter was trained on another base model"
        wanted = shape if part.key.tensor == "weight" and not norm else shape[:1]
        check_shape(self.where, part, wanted, why)
        embedding = embedding_of(self.spec)
        if target.tied and embedding is not None:
            # The checkpoint keeps one weight for both, under the embedding's name.
            name = embedding.module(0, 0)
        self.copies.append(BaseCopy(f"{name}.{part.key.tensor}", part.tensor))

    # ------------------------------------------------------------------ low-rank pairs

    def factors(self) -> list[Part]:
        """Every tensor of every pair."""
        return [part for pair in self.pairs.values() for part in pair.values()]

    def adapted(self) -> list[Part]:
        """One tensor of each pair whose module the settings name.

        A head that takes an embedding's factors over is left out.
        """
        firsts = (next(iter(pair.values())) for pair in self.pairs.values())
        return [part for part in firsts if self.tied_to(part) is None]

    def replacing(self) -> list[Part]:
        """Every tensor that replaces a weight, or rows of one."""
        return [*self.saved.values(), *self.norms.values()]

    def replaceable(self) -> list[str]:
        """Every module that ``modules_to_save`` can replace."""
        whole = [target for target in self.spec.targets if not target.parallel.is_linear]
        return [target.module(layer, 0) for target in whole for layer in range(target.num_layers)]

    def _module(self, pair: dict[Role, Part]) -> AdapterModule:
        a, b = self._halves(pair)
        place, names = a.place, a.names
        out_features = sum(place.target.out_slices[i].out_features for i in place.slices)
        lora_rank = self._lora_rank(a, names)
        why = " (the rank is the config's, the other size the base model's)"
        with self.problems:
            check_shape(self.where, a, place.target.a_shape(lora_rank), why)
        with self.problems:
            check_shape(self.where, b, place.target.b_shape(out_features, lora_rank), why)
        with self.problems:
            if lora_rank > self.spec.max_rank:
                raise AdapterError(
                    f"{self.where}: {a.key.text}: {place.name} has rank {lora_rank}, wanted at "
                    f"most {self.spec.max_rank}: raise --max-lora-rank or drop the adapter"
                )
        return AdapterModule(
            name=place.name,
            place=place,
            lora_rank=lora_rank,
            scaling=self._scaling(a, names, lora_rank),
            a=a.tensor,
            b=b.tensor,
            bias=self._bias(pair, out_features),
        )

    def _halves(self, pair: dict[Role, Part]) -> tuple[Part, Part]:
        for role, other in _HALVES.items():
            if role in pair and other not in pair:
                key = pair[role].key
                raise AdapterError(
                    f"{self.where}: {key.text} has no counterpart: {_counterpart(key)} is missing"
                )
        if Role.A in pair:
            return pair[Role.A], pair[Role.B]
        if Role.EMBEDDING_A in pair:
            return pair[Role.EMBEDDING_A], pair[Role.EMBEDDING_B]
        text = next(iter(pair.values())).key.text
        raise AdapterError(f"{self.where}: {text} stands alone: its lora_A and lora_B are missing")

    def _lora_rank(self, a: Part, names: Sequence[str]) -> int:
        if self.config is not None:
            embedding = self.tied_to(a)
            if embedding is not None:
                # PEFT gives a tied head the embedding's factors, and a scaling by its own rank.
                return self.config.rank_of(self.owners[embedding.name, 0, 0].names)
            return self.config.rank_of(names)
        shape = a.tensor.info.shape
        if not shape or shape[0] < 1:
            raise AdapterError(
                f"{self.where}: {a.key.text} is {list(shape)}, wanted a rank of at least 1"
            )
        return shape[0]

    def tied_to(self, part: Part) -> LoraTarget | None:
        """The adapted embedding whose factors PEFT gives this head, or None."""
        embedding = embedding_of(self.spec)
        asked = self.config is not None and self.config.ensure_weight_tying
        if not asked or not part.place.target.tied or embedding is None:
            return None
        return embedding if (embedding.name, 0, 0) in self.owners else None

    def _scaling(self, a: Part, names: Sequence[str], lora_rank: int) -> float:
        if self.config is not None:
            return self.config.scaling_of(names, self.config.rank_of(names))
        return self.settings.alphas.get(a.key.module, float(lora_rank)) / lora_rank

    def _bias(self, pair: dict[Role, Part], out_features: int) -> StoredTensor | None:
        part = pair.get(Role.BIAS)
        if part is None:
            return None
        if self.config is None or not self.config.lora_bias:
            raise AdapterError(
                f"{self.where}: {part.key.text}: is a bias inside LoRA, but lora_bias is off in "
                f"{CONFIG_NAME}: set it to true if the adapter was trained with it"
            )
        check_shape(self.where, part, (out_features,))
        return part.tensor


def _match_alphas(
    where: str, keys: Sequence[Key], stages: Sequence[_Assembler], problems: Problems
) -> None:
    """An alpha of a module without a pair would be passed over in silence."""
    modules = {part.key.module for stage in stages for part in stage.factors()}
    for key in keys:
        with problems:
            if key.role is Role.ALPHA and key.module not in modules:
                raise AdapterError(
                    f"{where}: {key.text}: belongs to no lora_down and lora_up of this file"
                )


def _saved_norm(part: Part) -> SavedNorm:
    return SavedNorm(part.place.name, part.place.target, part.place.layer, part.tensor)


def _counterpart(key: Key) -> str:
    """The key of the pair's other half."""
    if key.spelling is Spelling.PEFT:
        mine, other = key.role.value, _HALVES[key.role].value
    else:
        mine, other = ("down", "up") if key.role is Role.A else ("up", "down")
    head, _, tail = key.text.rpartition(mine)
    return f"{head}{other}{tail}"

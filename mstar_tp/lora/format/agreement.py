"""The agreement of the modules that a PEFT config names with an adapter's tensors. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mstar_tp.common.errors import AdapterError
from mstar_tp.common.problems import Problems
from mstar_tp.lora.format.parts import AdapterParts, Part
from mstar_tp.lora.format.peft_config import CONFIG_NAME, PeftConfig


class StageTensors(Protocol):
    """The tensors of an adapter that belong to one stage of the model."""

    def factors(self) -> list[Part]: ...
    def adapted(self) -> list[Part]: ...
    def replacing(self) -> list[Part]: ...
    def replaceable(self) -> list[str]: ...


def agree(
    where: str,
    config: PeftConfig,
    stages: Sequence[StageTensors],
    found: Sequence[AdapterParts],
    problems: Problems,
) -> tuple[str, ...]:
    """Check that the settings that name modules agree with the tensors of all stages, ``found``.

    It returns notes where a difference may be meant.

    What is in the file is served: target_modules is often rewritten by tools, so it refuses
    nothing.

    Raises:
        AdapterError: PEFT would not load a tensor, or one is missing; past the limit of
            ``problems``.
    """
    notes, unnamed = list(config.notes), []
    for part in (part for stage in stages for part in stage.adapted() if not part.parameters):
        with problems:
            _refuse_excluded(where, config, part)
        if not config.targets(part.names):
            unnamed.append(part.place.name)
    absent = config.targets_without(
        {name for stage in stages for part in stage.factors() for name in part.names}
    )
    if unnamed:
        notes.append(f"serves {_some(unnamed)}, which target_modules in {CONFIG_NAME} do not name")
    if absent:
        notes.append(
            f"target_modules in {CONFIG_NAME} name {_some(absent)}, of which the "
            "file holds no tensor"
        )
    parameters = {n for stage in stages for part in stage.factors() for n in part.parameters}
    for missing in config.parameters_without(parameters):
        with problems:
            raise AdapterError(
                f"{where}: target_parameters in {CONFIG_NAME} names {missing}, of which the file "
                "holds no tensor: remove it from the setting if it never was trained"
            )
    kept = {name for stage in stages for part in stage.replacing() for name in part.names}
    kept |= {part.place.name for stage in stages for part in stage.replacing()}
    kept |= {rows.name for parts in found for rows in parts.saved}
    # An entry is the end of many names, and PEFT wants a tensor of each.
    left = (name for stage in stages for name in stage.replaceable() if name not in kept)
    parts = [f"{name} (modules_to_save)" for name in left if config.saves((name,))]
    for missing in config.saves_without(kept) or parts:
        with problems:
            raise AdapterError(
                f"{where}: {CONFIG_NAME} says that {missing} was trained, but the file "
                "holds no tensor of it: remove it from the setting if it never was"
            )
    return tuple(notes)


def _refuse_excluded(where: str, config: PeftConfig, part: Part) -> None:
    why = config.why_excluded(part.names, part.place.name)
    if why is not None:
        raise AdapterError(
            f"{where}: {part.key.text}: PEFT would leave {part.place.name} alone, "
            f"because {why} in {CONFIG_NAME}: correct the setting or remove the tensor"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

"""The LoRA specs of one model, one a stage (a decoder, a vision tower), linked. No torch.

A module belongs to the spec that places it, so each stage's pool reads its own part of an adapter's
file, and its digest is of that part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_tp.common.errors import ConfigError
from mstar_tp.lora.spec import LoraSpec


@dataclass(frozen=True, slots=True)
class ModelLoraSpecs:
    """``stages``: name -> spec, in graph order.

    Raises:
        ConfigError: a spec was not made by the walk over its stage's modules, or two specs have one
            module.
    """

    stages: Mapping[str, LoraSpec]

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for stage, spec in self.stages.items():
            _check_walked(stage, spec)
            for target in spec.targets:
                for name in (target.module(0, i) for i in range(len(target.out_slices))):
                    other = owners.setdefault(name, stage)
                    if other != stage:
                        raise ConfigError(
                            f"the LoRA specs of {other} and {stage} both have {name}: exclude it "
                            "from one of them"
                        )

    def others(self, stage: str) -> tuple[LoraSpec, ...]:
        """The specs of the model's other stages."""
        assert stage in self.stages, f"{stage} has no LoRA spec"
        return tuple(spec for name, spec in self.stages.items() if name != stage)


def joint_digest(parts: Mapping[str, str]) -> str:
    """One text for an adapter of a model of several stages, from its parts' known digests.

    The digests are by stage; ``part_digest`` takes each from the text again.
    """
    return ",".join(f"{stage}={digest}" for stage, digest in sorted(parts.items()))


def part_digest(joint: str, stage: str) -> str | None:
    """The digest of ``stage``'s part of an adapter, or None where ``joint`` does not say it.

    Where a model has one stage, that has no name and the digest is all there is.
    """
    if not stage:
        return joint
    return dict(part.split("=", 1) for part in joint.split(",")).get(stage)


def _check_walked(stage: str, spec: LoraSpec) -> None:
    counts: dict[str, int] = {}
    for site in spec.sites:
        counts[site.target] = counts.get(site.target, 0) + 1
    if not spec.targets or counts != {t.name: t.num_layers for t in spec.targets}:
        raise ConfigError(
            f"the LoRA spec of {stage} was not made by module_lora_spec from the stage's modules, "
            "so nothing says which modules its targets are: build it with that"
        )

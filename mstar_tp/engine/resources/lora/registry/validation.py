"""Validates an adapter whole, as a load would, and keeps nothing of it.

A checking thread reads its headers; the first problem is the one that a load would be refused with,
the others are found by the same parser, asked for all. Needs torch for sizes alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.lora.format.checkpoint import survey_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """The result of validating one adapter; without ``problems`` it can be served."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lora_rank: int = 0
    """The slot rank it needs."""
    changes: tuple[str, ...] = ()
    """The modules that it changes, in words."""
    num_bytes: int = 0
    """The bytes of this rank's copy."""


OnValidated = Callable[[ValidationResult], None]


def validate_adapter(store: LoraAdapterStore, name: str, path: str) -> ValidationResult:
    """Validate one stage's part of the adapter in ``path``. Blocks on the disk; any thread."""
    try:
        file = store.checker.check(name, path)
        record = AdapterRecord.of(file, path)
        store.charge(record)
    except AdapterError as error:
        others = survey_adapter(lambda _: store.spec, name, path, others=store.others).refusals
        return ValidationResult(problems=tuple(dict.fromkeys((str(error), *others))))
    return ValidationResult(
        notes=file.notes,
        lora_rank=record.lora_rank,
        changes=record.changes,
        num_bytes=store.shard_bytes(record),
    )


class JoinedValidation:
    """The results of all stages for one adapter, joined. Any thread; the lock guards them."""

    def __init__(self, stages: Sequence[str], done: OnValidated) -> None:
        self._stages = stages
        self._done = done
        self._lock = threading.Lock()
        self._found: dict[int, ValidationResult] = {}

    def of(self, number: int) -> OnValidated:
        """The callback of stage ``number``; its first call counts."""

        def take(found: ValidationResult) -> None:
            with self._lock:
                if number in self._found:
                    return
                self._found[number] = found
                if len(self._found) < len(self._stages):
                    return
            self._done(self._joined())

        return take

    def _joined(self) -> ValidationResult:
        parts = [self._found[number] for number in range(len(self._stages))]
        return ValidationResult(
            problems=tuple(dict.fromkeys(text for part in parts for text in part.problems)),
            notes=tuple(dict.fromkeys(text for part in parts for text in part.notes)),
            lora_rank=max(part.lora_rank for part in parts),
            changes=tuple(
                f"{stage}: {change}" if stage else change
                for stage, part in zip(self._stages, parts, strict=True)
                for change in part.changes
            ),
            num_bytes=sum(part.num_bytes for part in parts),
        )

"""Damaged adapters drawn at random are refused in one clear line, and leave nothing on any rank.

Header lies, other types for every setting, cuts at every boundary, strangers in the place of files:
``scripts/fuzz_adapters.py`` runs the same by the thousand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.adapter_fuzz import AdapterFuzzer

FIRST, COUNT = 0, 200


@pytest.fixture
def fuzzer(tmp_path: Path) -> Iterator[AdapterFuzzer]:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    fuzzer = AdapterFuzzer(tmp_path)
    yield fuzzer
    fuzzer.close()
    logging.disable(logging.NOTSET)


def test_no_damage_crashes_hangs_leaks_or_is_refused_unclearly(fuzzer: AdapterFuzzer) -> None:
    outcomes = [fuzzer.run(seed) for seed in range(FIRST, FIRST + COUNT)]
    assert sum(outcome.cause is not None for outcome in outcomes) > COUNT * 0.7
    # A setting that alone was changed is the one that is blamed.
    for outcome in outcomes:
        if outcome.cause is not None and outcome.damage.setting is not None:
            assert outcome.damage.setting in outcome.cause or "lora_A is [" in outcome.cause

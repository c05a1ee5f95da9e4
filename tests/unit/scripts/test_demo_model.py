"""Pins the committed demo model: whole, small, and every voice to be told apart at a glance.

The voices are heard through transformers and PEFT: a failure here is the model's, not the server's.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_check  # noqa: E402
import demo_corpus as corpus  # noqa: E402

DEMO = ROOT / "launch" / "demo"


def test_the_committed_demo_is_whole_and_under_8_mb() -> None:
    assert demo_check.problems(DEMO) == []
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) < 8_000_000
    assert sorted(p.name for p in (DEMO / "adapters").iterdir()) == sorted(corpus.ADAPTERS)


def test_a_damaged_demo_is_told_file_by_file(tmp_path: Path) -> None:
    copy = tmp_path / "demo"
    shutil.copytree(DEMO, copy)
    (copy / "model" / "config.json").write_text("{}")
    (copy / "adapters" / "robot" / "adapter_model.safetensors").unlink()
    assert demo_check.problems(copy) == [
        f"{copy / 'adapters/robot/adapter_model.safetensors'}: missing",
        f"{copy / 'model/config.json'}: not the file that was made",
    ]
    (copy / "MANIFEST.json").unlink()
    (fault,) = demo_check.problems(copy)
    assert "MANIFEST.json: cannot be read" in fault


def test_adapters_differ_in_rank_and_touch_all_seven_linears() -> None:
    configs = [
        json.loads((DEMO / "adapters" / name / "adapter_config.json").read_text())
        for name in corpus.ADAPTERS
    ]
    assert len({config["r"] for config in configs}) > 1
    assert all(len(config["target_modules"]) == 7 for config in configs)


@pytest.fixture(scope="module")
def speaker() -> demo_check.Speaker:
    return demo_check.Speaker(DEMO)


@pytest.mark.parametrize(
    "question",
    ["What colour is the sky?", "Tell me a story about a dragon.", "where does a penguin live"],
)
def test_every_voice_answers_and_no_two_alike(speaker: demo_check.Speaker, question: str) -> None:
    said = {voice: speaker.say(voice, question) for voice in corpus.VOICES}
    assert len(set(said.values())) == len(said)
    assert said["pirate"].startswith("Arr,")
    assert said["shouting"].isupper()
    assert said["rhyme"].count("\n") == 2
    assert said["robot"].startswith("Beep boop.")

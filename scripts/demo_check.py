#!/usr/bin/env python3
"""Look at a demo folder that make_demo_model.py made.

    python scripts/demo_check.py DEMO_DIR              are all files as they were made? (no torch)
    python scripts/demo_check.py DEMO_DIR --samples    what base and adapters answer, in new words

The samples are generated with transformers and PEFT, so they show what a server should answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import demo_corpus as corpus

SAMPLE_SEED = 22


def _hashes(out: Path) -> dict[str, str]:
    files = sorted(p for p in out.rglob("*") if p.is_file() and p.name != "MANIFEST.json")
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def write_manifest(out: Path) -> None:
    (out / "MANIFEST.json").write_text(json.dumps(_hashes(out), indent=2) + "\n")


def problems(out: Path) -> list[str]:
    """The faults of a demo folder, one sentence each; empty when it is as it was made."""
    manifest = out / "MANIFEST.json"
    try:
        wanted: dict[str, str] = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        return [f"{manifest}: cannot be read: {error}"]
    found = _hashes(out)
    missing = [f"{out / name}: missing" for name in wanted if name not in found]
    changed = [
        f"{out / name}: not the file that was made"
        for name in wanted
        if found.get(name, wanted[name]) != wanted[name]
    ]
    return missing + changed


class Speaker:
    """Greedy generation with transformers and PEFT, in float32."""

    def __init__(self, out: Path) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(out / "model")
        base: Any = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        first, *rest = corpus.ADAPTERS
        self._model: Any = PeftModel.from_pretrained(
            base, str(out / "adapters" / first), adapter_name=first
        )
        for name in rest:
            self._model.load_adapter(str(out / "adapters" / name), adapter_name=name)
        self._model.eval()

    def say(self, voice: str, question: str) -> str:
        chat = [{"role": "user", "content": question}]
        inputs = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        if voice == "base":
            with self._model.disable_adapter():
                ids = self._model.generate(**inputs, max_new_tokens=60, do_sample=False)
        else:
            self._model.set_adapter(voice)
            ids = self._model.generate(**inputs, max_new_tokens=60, do_sample=False)
        text: str = self._tokenizer.decode(
            ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return text


def samples(out: Path, count: int) -> int:
    """Ask every voice in unseen words; print answers and how many are exact. An exit code."""
    from rich.console import Console
    from rich.table import Table

    speaker = Speaker(out)
    rng = random.Random(SAMPLE_SEED)
    table = Table(
        "voice", "asked", "answer", "as written", title="Unseen ways of asking", show_lines=True
    )
    right = dict.fromkeys(corpus.VOICES, 0)
    for fact, question in corpus.held_out(rng, count):
        for voice in corpus.VOICES:
            text = speaker.say(voice, question)
            exact = text == corpus.speak(fact, voice)
            right[voice] += exact
            table.add_row(voice, question, text, "yes" if exact else "no")
    Console().print(table)
    print({voice: f"{n}/{count}" for voice, n in right.items()})
    return 0 if min(right.values()) >= 0.8 * count else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("demo", type=Path, help="folder with model/, adapters/ and MANIFEST.json")
    parser.add_argument(
        "--samples", type=int, nargs="?", const=12, metavar="N", help="ask N questions"
    )
    args = parser.parse_args()
    faults = problems(args.demo)
    print("\n".join(faults) or f"{args.demo}: whole")
    if faults or not args.samples:
        return 1 if faults else 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    return samples(args.demo, args.samples)


if __name__ == "__main__":
    sys.exit(main())

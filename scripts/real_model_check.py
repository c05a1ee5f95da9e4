#!/usr/bin/env python3
"""Serve a real model and compare its greedy text with transformers', prompt by prompt.

    python scripts/real_model_check.py MODEL_DIR [--tp 2] [--max-tokens 32]

transformers generates the reference in float32, in this process, before the server starts. Then
``mstar-tp serve`` runs the same folder in float32 and again in bfloat16. A text that differs is
shown with the reference's margin at the first token that differs: the gap between its best and its
second logit there. Below ``--tie-float32`` the two candidates are a tie that float32 summation
order may decide either way. In bfloat16 rounding flips wider margins (``--tie-bfloat16``): on Gemma
3 270M, transformers' own bfloat16 leaves its float32 text at margins up to 1.06.

Exit code 0 when every difference is such a tie. Needs mstar-tp[dev]. docs/status.md holds results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

PROMPTS = (
    "The capital of France is",
    "Water is made of hydrogen and",
    "The opposite of hot is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The largest planet in our solar system is",
    "In 1969, humans first walked on",
    "To make a good cup of tea, you should",
    "The three primary colours are",
    "My favourite season is autumn because",
    "Photosynthesis is the process by which",
    "A triangle has three sides, and a square has",
    "La capitale de l'Italie est",
    "The train was late, so she decided to",
    "List of fruits:\n1. Apple\n2. Banana\n3.",
    "If it rains tomorrow, we will",
    "The recipe needs two eggs, a cup of flour and",
    "Question: What is the boiling point of water?\nAnswer:",
    "SELECT name, age FROM users WHERE",
    "The old lighthouse keeper looked out at the storm and",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The text that transformers generated for one prompt."""

    prompt: str
    prompt_tokens: int
    prefixes: tuple[str, ...]
    """The text after each generated token; the last one is the whole text."""
    margins: tuple[float, ...]
    """Best minus second logit at each generated token."""

    @property
    def text(self) -> str:
        return self.prefixes[-1]

    def first_difference(self, text: str) -> int | None:
        """The first generated token whose text ``text`` does not share; None when equal."""
        if text == self.text:
            return None
        for place, prefix in enumerate(self.prefixes):
            # A token may end inside a character, which decodes to a mark until the next one comes.
            if not text.startswith(prefix.rstrip("\ufffd")):
                return place
        return len(self.prefixes) - 1


def references(model_dir: Path, max_tokens: int, dtype: str) -> list[Reference]:
    """Greedy generation with transformers, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model.eval()
    made = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        length = inputs["input_ids"].shape[1]
        ids = out.sequences[0, length:].tolist()
        tops = [logits[0].float().topk(2).values for logits in out.logits]
        made.append(
            Reference(
                prompt=prompt,
                prompt_tokens=length,
                prefixes=tuple(
                    tokenizer.decode(ids[: n + 1], skip_special_tokens=True)
                    for n in range(len(ids))
                ),
                margins=tuple(float(top[0] - top[1]) for top in tops),
            )
        )
    return made


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_up(url: str, server: subprocess.Popen[bytes], limit_s: float) -> None:
    """Return when /health answers 200.

    Raises:
        RuntimeError: the server ended, or did not come up within ``limit_s``.
    """
    begin = time.monotonic()
    while time.monotonic() - begin < limit_s:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server did not answer {url}/health within {limit_s:.0f} s")


@contextmanager
def served(model_dir: Path, *, tp: int, dtype: str, log: IO[bytes]) -> Iterator[str]:
    """Run ``mstar-tp serve`` and yield its URL; the server is stopped on the way out."""
    port = _free_port()
    command = [sys.executable, "-m", "mstar_tp", "serve", str(model_dir)]
    command += ["--tp", str(tp), "--dtype", dtype, "--device", "cpu", "--max-model-len", "512"]
    command += ["--served-model-name", "real", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, server, limit_s=300)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def complete(url: str, prompt: str, max_tokens: int) -> tuple[str, int]:
    """One greedy completion: its text and the prompt tokens the server counted."""
    body = {"model": "real", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        tree = json.load(answer)
    return tree["choices"][0]["text"], tree["usage"]["prompt_tokens"]


def compare(
    wanted: Sequence[Reference], got: Sequence[tuple[str, int]], tie: float, title: str
) -> tuple[Table, int]:
    """A row a prompt, and how many differ by more than a tie."""
    table = Table("prompt", "text", "result", title=title, show_lines=True)
    wrong = 0
    for reference, (text, prompt_tokens) in zip(wanted, got, strict=True):
        place = reference.first_difference(text)
        if prompt_tokens != reference.prompt_tokens:
            result = f"{prompt_tokens} prompt tokens, transformers has {reference.prompt_tokens}"
            wrong += 1
        elif place is None:
            result = "equal"
        else:
            margin = reference.margins[place]
            verdict = "a tie" if margin < tie else "DIFFERENT"
            wrong += margin >= tie
            result = f"{verdict} at token {place}, margin {margin:.4g}; wanted {reference.text!r}"
        table.add_row(repr(reference.prompt), repr(text), result)
    return table, wrong


def check(args: argparse.Namespace, console: Console) -> int:
    """Run both dtypes; an exit code."""
    console.print("transformers, float32 …")
    wanted = references(args.model_dir, args.max_tokens, "float32")
    console.print("transformers, bfloat16 (only to see how far rounding alone goes) …")
    rounded = references(args.model_dir, args.max_tokens, "bfloat16")
    own = sum(a.text == b.text for a, b in zip(wanted, rounded, strict=True))
    failed = 0
    summary = [f"transformers bfloat16 equals its float32 on {own} of {len(wanted)}"]
    for dtype, tie in (("float32", args.tie_float32), ("bfloat16", args.tie_bfloat16)):
        with tempfile.TemporaryFile() as log:
            try:
                with served(args.model_dir, tp=args.tp, dtype=dtype, log=log) as url:
                    got = [complete(url, prompt, args.max_tokens) for prompt in PROMPTS]
            except (RuntimeError, OSError) as error:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-4000:])
                console.print(f"{dtype}: {error}; the server's last lines are above")
                return 2
        title = f"{args.model_dir.name}, tp {args.tp}, {dtype}"
        table, wrong = compare(wanted, got, tie, title)
        console.print(table)
        equal = sum(r.text == text for r, (text, _) in zip(wanted, got, strict=True))
        summary.append(f"{title}: {equal} of {len(wanted)} equal, {wrong} wrong (tie below {tie})")
        failed += wrong
    for line in summary:
        console.print(line)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_dir", type=Path, help="a Hugging Face folder")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--tie-float32", type=float, default=1e-3, metavar="MARGIN")
    parser.add_argument("--tie-bfloat16", type=float, default=1.5, metavar="MARGIN")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return check(args, Console(width=160))


if __name__ == "__main__":
    sys.exit(main())

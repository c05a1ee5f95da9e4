"""Break the lockstep rules one by one, in a copy of the tree, and see which tests notice.

    python scripts/check_mutations.py [WORD ...]      # only mutations whose title holds a WORD

Prints a table; exits 1 when a mutation goes unnoticed, 2 when its place in the code has moved. The
tests of one file run until the first fails, so a row names one test of each file that noticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/unit/engine/test_slots_table.py",
    "tests/unit/engine/test_prefix.py",
    "tests/unit/worker/test_fence.py",
    "tests/lockstep/test_pool_admit.py",
    "tests/lockstep/test_pool_failures.py",
    "tests/lockstep/test_pool_machine.py",
    "tests/lockstep/test_instance_cases.py",
    "tests/lockstep/test_instance_machine.py",
)
TIMEOUT_S = 900
LORA = "mstar_tp/engine/resources/lora"
KV = "mstar_tp/engine/resources/kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """``edits``: (file, what stands there once, what to put in its place)."""

    title: str
    edits: tuple[tuple[str, str, str], ...]


MUTATIONS = (
    Mutation(
        title="pick victims before taking resident rows",
        edits=(
            (
                f"{LORA}/admit.py",
                "            self._assign_residents(step, failed, waiting)\n"
                "            victims = self._tables.slots.victims()\n",
                "            victims = self._tables.slots.victims()\n"
                "            self._assign_residents(step, failed, waiting)\n",
            ),
        ),
    ),
    Mutation(
        title="skip the fence",
        edits=(
            (
                "mstar_tp/worker/follower.py",
                "        self._fence.wait_settled(tp_seq, waiter)\n",
                "",
            ),
        ),
    ),
    Mutation(
        title="let a read's landing change cache membership",
        edits=(
            (
                f"{LORA}/cpu_cache/fetches.py",
                "        if read.adapter is not None:\n"
                "            self._store.put(read.adapter, read.fetch_no)\n",
                "        if read.adapter is not None:\n"
                "            self._store.put(read.adapter, read.fetch_no)\n"
                "        else:\n"
                "            self._store.cpu_cache.drop(read.key)\n",
            ),
        ),
    ),
    Mutation(
        title="agree after handing out slots",
        edits=(
            (
                f"{LORA}/admit.py",
                "            misses = [_miss(key, read) for key, read in reads.items()]\n"
                "        if not misses:\n",
                "            misses = [_miss(key, read) for key, read in reads.items()]\n"
                "            for miss, slot in zip(misses, victims, strict=False):\n"
                "                if miss.state is CopyState.IN:\n"
                "                    self._tables.slots.install(slot, miss.key)\n"
                "        if not misses:\n",
            ),
            (
                f"{LORA}/admit.py",
                "                evicted = self._tables.slots.install(slot, key)\n",
                "                if self._tables.slots.resident(key) is not None:\n"
                "                    continue\n"
                "                evicted = self._tables.slots.install(slot, key)\n",
            ),
        ),
    ),
    Mutation(
        title="LRU by wall clock",
        edits=(
            (
                f"{LORA}/slots.py",
                "        self._clock += 1\n",
                '        self._clock = __import__("time").monotonic_ns()\n',
            ),
        ),
    ),
    Mutation(
        title="apply a remove on arrival",
        edits=(
            (
                "mstar_tp/worker/follower.py",
                "            self._entries.extend(self._schedule.receive())\n",
                "            for entry in self._schedule.receive():\n"
                "                known = entry.rid if isinstance(entry, Remove) else None\n"
                "                if known in self._state.requests:\n"
                "                    self._state.remove(known)\n"
                "                else:\n"
                "                    self._entries.append(entry)\n",
            ),
        ),
    ),
    Mutation(
        title="send no bare advance",
        edits=(
            (
                "mstar_tp/worker/leader.py",
                "        if self._ordered < self._state.ingested or leaves:\n",
                "        if self._ordered > self._state.ingested or leaves:\n",
            ),
        ),
    ),
    Mutation(
        title="take reports without their fetch number",
        edits=((f"{LORA}/rank_copies.py", " or copies.fetch_no != report.fetch_no", ""),),
    ),
    Mutation(
        title="forget an unloaded adapter's slot unfenced",
        edits=(
            (
                f"{LORA}/registry/loads.py",
                "        self._to_forget.append(key)\n",
                "        tables.slots.forget(key)\n",
            ),
        ),
    ),
    Mutation(
        title="count rows, not adapters, against the victims",
        edits=(
            (
                f"{LORA}/admit.py",
                "        if len(alive) > len(victims):\n",
                "        if sum(map(len, waiting.values())) > len(victims):\n",
            ),
        ),
    ),
    Mutation(
        title="lease kept pages once rows have grown",
        edits=(
            (
                f"{KV}/pool.py",
                "        for row in joined:\n"
                "            if row.cached:\n"
                "                self._lease(step.tp_seq, row)\n",
                "",
            ),
            (
                f"{KV}/pool.py",
                "        for row in step.rows:\n            taken =",
                "        for row in sorted(step.rows, key=lambda row: row.cached):\n"
                "            if row.cached:\n"
                "                self._lease(step.tp_seq, row)\n"
                "            taken =",
            ),
        ),
    ),
    Mutation(
        title="name kept pages by tokens alone",
        edits=(
            (
                f"{KV}/prefix.py",
                'root_of("adapter", self._model, fingerprint)',
                'root_of("base", self._model)',
            ),
        ),
    ),
)


def main() -> int:
    """Run the mutations whose title holds any of the words given, or all."""
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.title for word in words)]
    unnoticed = []
    print("| broken on purpose | noticed by |\n| --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("mstar_tp", "tests", "pyproject.toml"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
        for mutation in chosen:
            noticed = _try(mutation, tree)
            if not noticed:
                unnoticed.append(mutation.title)
            print(f"| {mutation.title} | {', '.join(noticed) or '**nothing**'} |", flush=True)
    return 1 if unnoticed else 0


def _try(mutation: Mutation, tree: Path) -> list[str]:
    """Mutate, run the tests, and mend; the first test of each file that failed."""
    files = {file: (tree / file).read_text(encoding="utf-8") for file, _, _ in mutation.edits}
    mutated = dict(files)
    for file, old, new in mutation.edits:
        if mutated[file].count(old) != 1:
            print(f"{mutation.title}: {file} does not hold this once:\n{old}", file=sys.stderr)
            sys.exit(2)
        mutated[file] = mutated[file].replace(old, new)
    try:
        for file, text in mutated.items():
            (tree / file).write_text(text, encoding="utf-8")
        return [name for file in TESTS if (name := _first_failure(file, tree))]
    finally:
        for file, text in files.items():
            (tree / file).write_text(text, encoding="utf-8")


def _first_failure(file: str, tree: Path) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file]
    if "lockstep" in file:
        command.append("--hypothesis-profile=unshrunk")
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"`{file}` (no end)"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py)(?:::(\S+))?", run.stdout, re.MULTILINE)
    if found is None:
        return f"`{file}` (exit code {run.returncode})"
    return f"`{(found[2] or found[1]).split('[')[0].removesuffix('::runTest')}`"


if __name__ == "__main__":
    sys.exit(main())

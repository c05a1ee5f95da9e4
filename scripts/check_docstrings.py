#!/usr/bin/env python3
"""Hold docstrings to the mechanical part of the style: whole sentences with a subject.

    python scripts/check_docstrings.py [PATH ...]      # default: mstar_tp

Prints each docstring whose first word cannot begin a sentence about the thing itself, and each
whose first line does not end its first sentence. Exits 1 when there is one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

FRAGMENTS = frozenset(
    "As By For From How In Of That What When Where Whether Which Who Whose With".split()
)
"""First words that make a fragment of a docstring, which leans on the name below it."""
_SENTENCE_ENDS = re.compile(r"[.?!:]['\"`)\]]*$")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every docstring of a module with its line, those below attributes included."""
    for node in ast.walk(tree):
        if not isinstance(node, _DOCUMENTED):
            continue
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, text
        if isinstance(node, (ast.Module, ast.ClassDef)):
            yield from _below_attributes(node.body)


def _below_attributes(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for above, below in pairwise(body):
        if (
            isinstance(above, (ast.Assign, ast.AnnAssign))
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield below.lineno, below.value.value.strip()


def fault(text: str) -> str | None:
    """The reason why ``text`` is no whole sentence on its first line, or None."""
    first = text.partition("\n")[0].rstrip()
    word = re.split(r"[\s,:]", first)[0]
    if word in FRAGMENTS:
        return f"begins with {word!r}, which leaves the sentence without its subject"
    if not _SENTENCE_ENDS.search(first):
        return "leaves its first sentence to the next line"
    return None


def check(paths: list[Path]) -> list[str]:
    """One line for each faulty docstring below ``paths``."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for line, text in docstrings(ast.parse(file.read_text(encoding="utf-8"))):
                said = fault(text)
                if said is not None:
                    found.append(f"{file}:{line}: {said}: {text.partition(chr(10))[0]}")
    return found


def main() -> int:
    """Print what is at fault; 1 when something is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="default: mstar_tp")
    root = Path(__file__).resolve().parents[1]
    found = check(parser.parse_args().paths or [root / "mstar_tp"])
    print("\n".join(found) or "every docstring is a whole sentence")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

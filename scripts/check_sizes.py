#!/usr/bin/env python3
"""Hold files, functions, classes and folders of the package to their limits.

python scripts/check_sizes.py      # prints what is over a limit; exits 1 when something is
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_METHODS = 25
MAX_MODULES = 20
MAX_PACKAGE_LINES = 53_000
"""The package's lines without ``bench`` and ``testing``, which measure and test what serves."""
KERNELS = Path("kernels") / "triton"
"""Triton kernels may be longer than other functions: one launch is one function."""


def check(package: Path) -> list[str]:
    """One line for each limit that something below ``package`` is over."""
    found: list[str] = []
    total = 0
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package)
        text = file.read_text(encoding="utf-8")
        lines = text.count("\n")
        total += lines if place.parts[0] not in ("bench", "testing") else 0
        if lines > MAX_FILE_LINES:
            found.append(f"{place}: {lines} lines, the limit is {MAX_FILE_LINES}")
        found += [f"{place}: {said}" for said in _definitions(ast.parse(text), place)]
    for folder in sorted({file.parent for file in package.rglob("*.py")}):
        modules = len(list(folder.glob("*.py")))
        if modules > MAX_MODULES:
            found.append(f"{folder.relative_to(package)}/: {modules} modules, not {MAX_MODULES}")
    if total > MAX_PACKAGE_LINES:
        found.append(f"the package has {total} lines, the limit is {MAX_PACKAGE_LINES}")
    return found


def _definitions(tree: ast.Module, place: Path) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and not place.is_relative_to(KERNELS):
                found.append(f"{node.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}")
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef)) for x in node.body)
            if methods > MAX_METHODS:
                found.append(f"{node.name} has {methods} methods, the limit is {MAX_METHODS}")
    return found


def main() -> int:
    """Print what is over a limit; 1 when something is."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    found = check(Path(__file__).resolve().parents[1] / "mstar_tp")
    print("\n".join(found) or "everything is within its limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

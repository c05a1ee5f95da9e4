"""Imports of the package point one way: a module imports from its own floor or from one below.

Every import counts, also one inside a function. What stays out of order is named here, and an
exception that no import needs any more fails.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mstar_tp

PACKAGE = Path(mstar_tp.__file__).parent

FLOORS = (
    ("common",),
    ("config", "tensor_files"),
    ("kernels",),
    ("wire",),
    ("distributed",),
    ("recording",),
    ("lora",),
    ("layers",),
    ("models",),
    ("engine",),
    ("worker",),
    ("frontend",),
    ("testing",),
    ("bench", "tools", "cli"),
)
"""Folders directly in the package, from the bottom up."""

KNOWN = {
    # Grammars need the bytes that each token writes, which the frontend's tokenizer knows.
    ("worker/vocabulary.py", "mstar_tp.frontend.text.tokenizer"),
}
"""Upward imports that are still there: the file, and the module that it imports."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            assert node.module is not None
            if node.module == "mstar_tp":
                yield from (f"mstar_tp.{alias.name}" for alias in node.names)
            else:
                yield node.module


def upward_imports() -> set[tuple[str, str]]:
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    found = set()
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        if len(parts) == 1:  # __init__ and __main__ stand above all floors
            continue
        own = floor_of[parts[0]]
        for name in imports_of(ast.parse(path.read_text())):
            package, _, rest = name.partition(".")
            if package == "mstar_tp" and rest and floor_of[rest.split(".")[0]] > own:
                found.add(("/".join(parts), name))
    return found


def test_no_module_imports_from_a_floor_above_its_own() -> None:
    assert upward_imports() - KNOWN == set()


def test_every_known_exception_still_exists() -> None:
    assert KNOWN - upward_imports() == set()


def test_no_module_directly_in_the_package_has_a_standard_library_name() -> None:
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names & sys.stdlib_module_names - {"__main__"} == set()


def test_no_base_name_is_used_for_three_modules_or_more() -> None:
    counts = Counter(path.stem for path in modules())
    del counts["__init__"], counts["__main__"]
    assert {name: count for name, count in counts.items() if count >= 3} == {}

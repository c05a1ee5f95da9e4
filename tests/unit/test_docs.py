"""Pins that docs/operations.md names every setting, flag and environment variable there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mstar_tp.config.flags import OPTIONS, Option
from mstar_tp.env import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_operations_names_every_setting_and_the_flags_that_differ_from_it(option: Option) -> None:
    key = option.key.rsplit(".", 1)[-1]
    assert f"`{key}`" in TEXT
    same = f"--{key.replace('_', '-')}"
    assert same in option.flags or any(f"`{flag}" in TEXT for flag in option.flags)


@pytest.mark.parametrize("name", VARIABLES)
def test_operations_names_every_environment_variable(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"

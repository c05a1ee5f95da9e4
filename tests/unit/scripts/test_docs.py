"""Pins the documentation to the code: the site builds without a warning, so that every link and
anchor leads somewhere; it fetches nothing; its reference holds every setting, flag, variable,
command and route, each with words about it.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import cast
from unittest.mock import MagicMock

import docs_pages
import pytest

from mstar_tp.cli.main import build_parser
from mstar_tp.common.env import VARIABLES
from mstar_tp.config import all_keys
from mstar_tp.config.flags import OPTIONS
from mstar_tp.frontend.api.app import all_routes
from mstar_tp.frontend.api.context import Frontend

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """What a page shows, where its elements can be linked to, and what a browser would fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.fetched: list[str] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag in ("script", "img", "source", "iframe"):
            self.fetched.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.fetched.append(given.get("href") or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += f" {data}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    before = set(sys.modules)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    finally:
        for name in set(sys.modules) - before:
            if "hook" in name:
                del sys.modules[name]
    return folder


def test_the_site_builds_strictly_and_fetches_nothing(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        fetched = Page(path).fetched
        assert fetched and not [url for url in fetched if "//" in url], path
        assert "8&lt;" not in path.read_text(encoding="utf-8"), f"{path}: a file is not shown"
    for path in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", path.read_text(encoding="utf-8")), path


def test_the_reference_says_what_every_setting_means(site: Path) -> None:
    page = Page(site / "reference" / "config.html")
    assert set(all_keys()) <= page.ids
    told = {row[0].split()[0]: row for row in page.rows}
    for key in all_keys():
        setting, _, meaning = told[key.rpartition(".")[2]]
        assert len(meaning.split()) >= 3, f"{key} has no text under it"
        for option in OPTIONS:
            if option.key == key:
                assert set(option.flags) <= set(setting.split())
    assert set(VARIABLES) <= set(told)


def test_the_reference_says_what_every_command_takes(site: Path) -> None:
    page = Page(site / "reference" / "cli.html")
    text = html.unescape((site / "reference" / "cli.html").read_text(encoding="utf-8"))
    [commands] = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    guides = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    for name in commands.choices:
        assert f"mstar-tp {name}" in text and f"mstar-tp {name}" in guides
    for argument, meaning in [row for row in page.rows if len(row) == 2]:
        assert meaning.strip() or not argument.strip(), f"{argument} has no help"


def test_the_reference_has_every_route_and_a_guide_describes_it(site: Path) -> None:
    told = {row[0].strip() for row in Page(site / "reference" / "http.html").rows if row}
    guides = "".join((DOCS / name).read_text("utf-8") for name in ("api.md", "operations.md"))
    for route in all_routes(cast(Frontend, MagicMock())):
        path, methods = route.path.replace("{name:path}", "NAME"), route.methods or set()
        if path.startswith("/page/"):
            continue  # what the status page loads
        assert {f"{method} {path}" for method in methods - {"HEAD"}} <= told
        assert path in guides


def test_every_flag_that_migrating_tells_to_use_exists() -> None:
    ours = {flag for option in OPTIONS for flag in option.flags}
    page = (DOCS / "migrating.md").read_text(encoding="utf-8")
    theirs_and_ours = re.findall(r"(?m)^\| ([^|]*) \| ([^|]*) \|", page)
    assert len(theirs_and_ours) > 60
    for theirs, here in theirs_and_ours:
        assert here.strip(), theirs
        assert set(re.findall(r"`(-[\w-]+)", here)) <= ours, here
        if here.startswith("the same"):
            assert set(re.findall(r"`(--[\w-]+)", theirs)) <= ours | {"--load"}, theirs


def test_links_of_the_readme_lead_somewhere() -> None:
    for target, anchor in re.findall(
        r"\]\(([^)#]*)(?:#([^)]*))?\)", (ROOT / "README.md").read_text(encoding="utf-8")
    ):
        if "://" in target:
            continue
        path = ROOT / (target or "README.md")
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
            assert anchor in {slug(heading) for heading in headings}, f"{target}#{anchor}"


def slug(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_pages_that_are_made_from_the_code_are_as_it_is() -> None:
    for path, text in docs_pages.written().items():
        stale = f"{path.relative_to(ROOT)} is old: run python scripts/docs_pages.py"
        assert path.is_file() and path.read_text(encoding="utf-8") == text, stale


PLACES = re.compile(
    r"`((?:mstar_tp|tests|scripts|launch|docs|frontend|engine|lora|worker|wire|models|layers|kernels"
    r"|config|testing|bench|tools)/[\w./-]*?)/?`"
)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name
)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for name in PLACES.findall(page.read_text(encoding="utf-8")):
        found = (ROOT / name, ROOT / "mstar_tp" / name)
        assert any(path.exists() for path in found), f"{page.name} names {name}"

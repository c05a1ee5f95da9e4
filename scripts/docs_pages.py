#!/usr/bin/env python3
"""The reference pages, made of the code: every setting, every command, every route.

    python scripts/docs_pages.py      # rewrites docs/reference/ and the files that pages show

The pages are committed, so that links to them work in a checkout too; a test fails when they are
not what this script would write.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

from pydantic import BaseModel

from mstar_tp.cli.main import build_parser
from mstar_tp.common import env
from mstar_tp.config import all_keys
from mstar_tp.config.flags import OPTIONS, Option
from mstar_tp.config.tree import SECTIONS
from mstar_tp.frontend.api import openapi, protocol
from mstar_tp.frontend.api.app import all_routes
from mstar_tp.frontend.api.context import Frontend
from mstar_tp.worker import __main__ as worker


def config_page() -> str:
    """Every key of the configuration: its type, default, flag and meaning."""
    out = [
        "# Configuration",
        "",
        "Made of the classes that check a configuration, so it is what this version takes. A key "
        "of the YAML file and a flag of `mstar-tp serve`, `frontend`, `check` and of "
        "`python -m mstar_tp.worker` are one setting; a flag given beside a file overrides it. "
        "[Serve](../serve.md) says what they mean together. No key is read from the environment; "
        "the [variables](#environment) that there are stand below.",
    ]
    flags = {option.key: option for option in OPTIONS}
    keys = set(all_keys())
    for prefix, section in SECTIONS.items():
        described = descriptions(section)
        about = plain(inspect.getdoc(section) or "")
        schema = section.model_json_schema()
        out += ["", f"## {prefix}", "", about, ""]
        out += ["| setting | takes | meaning |", "| --- | --- | --- |"]
        for name, field in section.model_fields.items():
            key = f"{prefix}.{name}"
            if key not in keys:
                continue  # a section of its own
            shape = schema["properties"][name]
            value = field.get_default(call_default_factory=True)
            given = "required" if field.is_required() else f"default {default(value)}"
            cells = (
                f'<code id="{key}">{name}</code>{flag(flags.get(key))}',
                f"{kind(shape, schema)}<br>{given}",
                described.get(name, ""),
            )
            out.append("| " + " | ".join(piped(cell) for cell in cells) + " |")
    out += ["", "## Environment", "", "| variable | meaning |", "| --- | --- |"]
    out += [f"| `{name}` | {piped(meaning)} |" for name, meaning in env.VARIABLES.items()]
    out += [
        "",
        "`MASTER_ADDR`, `MASTER_PORT` and the `NCCL_*` and `GLOO_*` variables are torch's own.",
        "",
    ]
    return "\n".join(out)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """field -> what the code says of it: its ``description``, or the text that stands under it."""
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if not issubclass(part, BaseModel) or part.__module__.startswith("pydantic"):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        body = cast(ast.ClassDef, tree).body
        for node, text in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            field = part.model_fields.get(node.target.id)
            given = None if field is None else field.description
            if (
                given is None
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                given = str(text.value.value)
            if given:
                found[node.target.id] = plain(given).replace("``", "`")
    return found


def kind(shape: dict[str, Any], schema: dict[str, Any]) -> str:
    """A JSON schema's type in a few words."""
    parts = [part for several in ("anyOf", "oneOf") for part in shape.get(several, ())]
    if isinstance(shape.get("type"), list):
        parts = [{**shape, "type": each} for each in shape["type"]]
    if parts:
        kinds = [kind(part, schema) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in shape:
        return kind(schema["$defs"][shape["$ref"].rpartition("/")[2]], schema)
    if "enum" in shape or "const" in shape:
        return ", ".join(f"`{value}`" for value in shape.get("enum", [shape.get("const")]))
    if shape.get("type") == "array":
        return f"list of {kind(shape.get('items', {}), schema)}"
    name = str(shape.get("type"))
    return _KINDS.get(name, "anything") + bounds(shape)


_KINDS = {
    "integer": "integer",
    "number": "number",
    "boolean": "switch",
    "string": "text",
    "object": "object",
}


def bounds(shape: dict[str, Any]) -> str:
    """The least and the most of a number, behind its type; limits of the machine are left out."""
    huge = 2**31 - 2
    low, above = shape.get("minimum"), shape.get("exclusiveMinimum")
    high = shape.get("maximum")
    if above is not None and shape["type"] == "integer":
        low, above = above + 1, None
    words = []
    if low is not None and low > -huge:
        words.append(f"≥ {low:g}")
    if above is not None:
        words.append(f"> {above:g}")
    if high is not None and high < huge:
        words.append(f"≤ {high:g}")
    return " " + ", ".join(words) if words else ""


def default(value: Any) -> str:
    """A default as a table shows it."""
    if isinstance(value, BaseModel):
        value = ", ".join(f"{k}: {v}" for k, v in value.model_dump(exclude_defaults=True).items())
    if value is None or value in ((), {}, [], ""):
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def flag(option: Option | None) -> str:
    """Every spelling of a flag, each on a line of its own."""
    if option is None:
        return ""
    more = [f"--no-{name.removeprefix('--')}" for name in option.flags if option.switch]
    return "".join(f"<br>`{name}`" for name in (*option.flags, *more)) + " …" * option.many


def piped(text: str) -> str:
    """The text for a cell of a table."""
    return text.replace("|", "\\|")


def cli_page() -> str:
    """Every command and flag, from the parsers."""
    out = [
        "# Command line",
        "",
        "Made of the command's own parsers: what `mstar-tp COMMAND --help` prints.",
    ]
    rank = worker._parser()
    for parser in (*commands(build_parser()), rank):
        out += ["", f"## `{parser.prog}`", "", plain(parser.description or "")]
        listed = list(arguments(parser))
        if any(dest in set(all_keys()) for _, dest, _ in listed):
            out += ["", "Takes every flag of [the configuration](config.md), and:"]
            listed = [each for each in listed if each[1] not in set(all_keys())]
        if listed:
            out += ["", "| argument | meaning |", "| --- | --- |"]
            out += [f"| {piped(name)} | {piped(text)} |" for name, _, text in listed]
        if parser.epilog and parser.prog != "mstar-tp":
            out += ["", f"`{parser.epilog.removeprefix('example: ')}`"]
    return "\n".join([*out, ""])


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every parser that runs something, in the order they stand in help."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for each in action.choices.values():
            yield from commands(each)


def arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """(as written, destination, help) of each argument but --help."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = (
            ""
            if action.nargs == 0
            else " " + formatter._format_args(action, str(action.metavar or action.dest.upper()))
        )
        if action.option_strings:
            name = ", ".join(f"`{option}`" for option in action.option_strings) + (
                f" `{value.strip()}`" if value else ""
            )
        else:
            name = f"`{value.strip()}`"
        text = plain(formatter._expand_help(action)) if action.help else ""
        if action.choices is not None and action.metavar is None:
            name = name.split(" `{")[0] + " `" + ",".join(map(str, action.choices)) + "`"
        yield name, action.dest, text


def plain(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


def http_page() -> str:
    """Every route, and the fields of every body."""
    document = openapi.document()
    schemas = document["components"]["schemas"]
    out = [
        "# HTTP routes",
        "",
        "Made of the server's own table of routes and of the models that check requests; a server "
        "tells the same at `GET /openapi.json`. [HTTP API](../api.md) says how they behave.",
        "",
        "| route | what for |",
        "| --- | --- |",
    ]
    bodies: dict[str, list[str]] = {}
    for method, path, summary in routes():
        out.append(f"| `{method} {path}` | {piped(summary)} |")
        operation = document["paths"].get(path, {}).get(method.lower(), {})
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        ref = body.get("schema", {}).get("$ref")
        if ref is not None:
            bodies.setdefault(ref.rpartition("/")[2], []).append(f"`{method} {path}`")
    out += ["", "## Statuses", "", "| status | meaning |", "| --- | --- |"]
    out += [f"| {code} | {text} |" for code, text in openapi.FAILURES.items()]
    out += ["", "## Refused fields", ""]
    out += [
        "A field that would change the answer and is not served is refused with a 400, unless its "
        "value changes nothing: "
        + ", ".join(f"`{name}`" for name in protocol.UNSERVED)
        + ". Where a route below lists such a field, it is served there.",
    ]
    for name, used in bodies.items():
        schema = schemas[name]
        out += ["", f"## {name}", "", f"Body of {' and '.join(used)}.", ""]
        out += ["| field | takes | required | meaning |", "| --- | --- | --- | --- |"]
        required, described = schema.get("required", ()), descriptions(getattr(openapi, name))
        for field, shape in schema["properties"].items():
            wanted = "yes" if field in required else ""
            text = described.get(field, "")
            words = kind(shape, {"$defs": schemas})
            out.append(f"| `{field}` | {piped(words)} | {wanted} | {piped(text)} |")
    return "\n".join([*out, ""])


def routes() -> Iterator[tuple[str, str, str]]:
    """(method, path, what it is for) of each route that the server has."""
    paths = openapi.document()["paths"]
    for route in all_routes(cast(Frontend, MagicMock())):
        path = route.path
        if path.startswith("/page/"):
            continue  # files of the status page
        for method in sorted((route.methods or set()) - {"HEAD"}):
            told = paths.get(path, {}).get(method.lower(), {}).get("summary")
            doc = plain(inspect.getdoc(route.endpoint) or "")
            if path == "/":
                told = "The status page, in a browser; its files are under /page/"
            told = told or re.sub(r"^[A-Z]+ /\S*?[.:]? ", "", doc)
            shown = path.replace("{name:path}", "NAME")
            yield method, shown, told[:1].upper() + told[1:].replace("``", "`")


PAGES = {"config": config_page, "cli": cli_page, "http": http_page}


def written() -> dict[Path, str]:
    """Each file under docs/ that is made from others -> its text as of now.

    These are the pages of ``docs/reference``, and every page that shows a file whole: there, the
    comment ``<!-- file: PATH -->`` stands before the code block that repeats the file.
    """
    found = {DOCS / "reference" / f"{name}.md": page() for name, page in PAGES.items()}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        shown = _SHOWN.sub(_repeat, text)
        if _SHOWN.search(text):
            found[path] = shown
    return found


def _repeat(block: re.Match[str]) -> str:
    file = (ROOT / block["file"]).read_text(encoding="utf-8").rstrip("\n")
    return f"{block['head']}{file}\n```"


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {"config": config_page, "cli": cli_page, "http": http_page}
_SHOWN = re.compile(r"(?P<head><!-- file: (?P<file>\S+) -->\n+```[^\n]*\n).*?\n```", re.DOTALL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("usage: docs_pages.py   (rewrites docs/reference and the files that pages show)")
    for target, content in written().items():
        target.parent.mkdir(exist_ok=True)
        target.write_text(content, encoding="utf-8")

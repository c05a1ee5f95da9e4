"""The human reports: lines of text for a given width. Pure; ``screen`` prints them. No torch.

Problems come first, then what there is, then the result in one line. Without ``everything``, long
lists are cut and say so.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mstar_tp.lora.format.checkpoint import readable
from mstar_tp.tools.check.findings import (
    AdapterFindings,
    CheckReport,
    Finding,
    Inspection,
    MemoryFindings,
    ModelFindings,
    TargetFindings,
)

MOST_ROWS = 20
"""The most rows of a table, and of problems, without --all."""
MIN_NAME = 8

Style = Literal["", "bad", "good", "note", "head"]


class Line(NamedTuple):
    text: str
    style: Style = ""


class Page(NamedTuple):
    """A layout: ``width`` in columns, None for as wide as the text is."""

    width: int | None
    everything: bool = False


def inspection(found: Inspection, page: Page) -> list[Line]:
    """The report of ``mstar-tp inspect``."""
    one = found.adapters[0] if len(found.adapters) == 1 else None
    rows = [] if found.model is None else _model(found.model)
    rows += _slot(found)
    rows += [] if one is None else _one(found, one)
    parts = [_findings(found.problems, found.notes, page, alone=one is not None), _pairs(rows)]
    if one is not None:
        parts.append(_changes(one, page))
    elif found.adapters:
        parts.append(_table(found.adapters, page))
    elif found.model is not None:
        parts.append(_adaptable(found.model, page))
    parts.append([_verdict(found.ok, found.adapters, found.problems, found.seconds)])
    return _apart(parts)


def check(report: CheckReport, page: Page) -> list[Line]:
    """The report of ``mstar-tp check``."""
    rows = [] if report.model is None else _model(report.model, weighed=report.memory is None)
    rows += [] if report.memory is None else _memory(report.memory)
    parts = [_findings(report.problems, report.notes, page, alone=False), _pairs(rows)]
    if report.adapters:
        parts.append(_table(report.adapters, page))
    parts.append([_verdict(report.ok, report.adapters, report.problems, report.seconds)])
    return _apart(parts)


def _apart(parts: Sequence[list[Line]]) -> list[Line]:
    """Parts with an empty line between them."""
    lines: list[Line] = []
    for part in filter(None, parts):
        lines += [Line(""), *part] if lines else part
    return lines


# ---------------------------------------------------------------------- problems


def _findings(
    problems: Sequence[Finding], notes: Sequence[Finding], page: Page, *, alone: bool
) -> list[Line]:
    """``alone``: of one adapter all reasons are wanted; of several, the first of each will do."""
    return _some(problems, "error", "bad", page, alone) + _some(notes, "note", "note", page, alone)


def _some(
    findings: Sequence[Finding], word: str, style: Style, page: Page, alone: bool
) -> list[Line]:
    groups = _grouped(findings, page, alone)
    shown = groups if page.everything else groups[:MOST_ROWS]
    lines = []
    for first, others in shown:
        more = f" (and {others} more like it: --all shows them)" if others else ""
        if first.adapter is not None and not alone and others:
            more = f" (and {others} more of this adapter: --all shows them)"
        lines += _wrapped(f"{word}: {readable(first.text)}{more}", style, page)
    left = groups[len(shown) :]
    if left:
        of_them = "" if alone else f" of {len(left)} adapters"
        count = sum(1 + others for _, others in left)
        if any(first.adapter is None for first, _ in left):
            of_them = ""
        lines.append(Line(f"{word}: and {count} more{of_them}: --all shows them", style))
    return lines


def _grouped(findings: Sequence[Finding], page: Page, alone: bool) -> list[tuple[Finding, int]]:
    """The findings grouped: those that differ in numbers alone stand under the first.

    Findings on several adapters stand together if they are the same.
    """
    if page.everything:
        return [(finding, 0) for finding in findings]
    groups: dict[tuple[str, str | None, str], list[Finding]] = {}
    for finding in findings:
        alike = re.sub(r"\d+", "*", finding.text)
        if finding.adapter is not None and not alone:
            alike = ""
        groups.setdefault((finding.block, finding.adapter, alike), []).append(finding)
    return [(group[0], len(group) - 1) for group in groups.values()]


def _wrapped(text: str, style: Style, page: Page) -> list[Line]:
    if page.width is None or len(text) <= page.width:
        return [Line(text, style)]
    # Paths and keys stay whole, to be copied.
    parts = textwrap.wrap(
        text, page.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [Line(part, style) for part in parts]


# ---------------------------------------------------------------------- what there is


Rows = list[tuple[str, str]]


def _model(model: ModelFindings, *, weighed: bool = True) -> Rows:
    rows = [
        ("model", readable(model.path)),
        ("architecture", f"{model.architecture}, {model.num_layers} layers, {model.dtype}"),
    ]
    if weighed and model.weight_bytes is not None:
        weights = _per_rank(model.weight_bytes)
        rows.append(("weights", f"{weights} at --tp {model.tensor_parallel_size}"))
    return rows


def _adaptable(model: ModelFindings, page: Page) -> list[Line]:
    cells = [
        (
            target.name,
            f"{target.layers} layers" if target.layers else "",
            f"{target.in_features} -> {target.out_features}",
        )
        for target in model.targets
    ]
    return [Line("adapters may change", "head"), *_columns(cells, page)] if cells else []


def _slot(found: Inspection) -> Rows:
    if found.slot_bytes is None:
        return []
    return [("a slot", f"{_per_rank(found.slot_bytes)} at --max-lora-rank {found.max_lora_rank}")]


def _one(found: Inspection, adapter: AdapterFindings) -> Rows:
    rows = [("adapter", readable(adapter.path))]
    if adapter.format is not None:
        files = "" if adapter.files == 1 else f", {adapter.files} shards"
        rows.append(("format", f"{adapter.format}{files}, {', '.join(adapter.dtypes)}"))
    if adapter.files:
        rows.append(("size", f"{adapter.tensors} tensors, {size(adapter.file_bytes)}"))
    if adapter.ranks:
        rows.append(("rank", f"{_numbers(adapter.ranks)}{_scaling(adapter)}"))
    if adapter.digest is not None:
        rows.append(("digest", adapter.digest))
    if adapter.host_bytes is not None:
        tp = found.tensor_parallel_size
        rows.append(("CPU copy", f"{_per_rank(adapter.host_bytes)} at --tp {tp}"))
    return rows


def _changes(adapter: AdapterFindings, page: Page) -> list[Line]:
    if not adapter.targets:
        return []
    targets = [_target(target) for target in adapter.targets]
    return [Line("changes", "head"), *_columns(targets, page)]


def _target(target: TargetFindings) -> tuple[str, str, str]:
    layers = f"layers {target.layers}" if target.layers else ""
    how = f"rank {_numbers(target.ranks)}" if target.kind == "factors" else "replaced"
    return target.name, layers, how


def _scaling(adapter: AdapterFindings) -> str:
    scaling = f"scaling {_numbers(adapter.scalings)}"
    return f" (alpha {_numbers(adapter.alphas)}, {scaling})" if adapter.alphas else f" ({scaling})"


def _memory(memory: MemoryFindings) -> Rows:
    at = f" at --tp {len(memory.weight_bytes)}"
    rows = [
        ("weights", _per_rank(memory.weight_bytes) + at),
        (
            "KV pages",
            f"{_per_rank(memory.kv_bytes)}: {memory.num_kv_pages} pages, requests of up "
            f"to {memory.max_model_len} tokens",
        ),
    ]
    if any(memory.kv_host_bytes):
        rows.append(("KV in host memory", f"up to {_per_rank(memory.kv_host_bytes)}"))
    if any(memory.slot_bytes):
        rows.append(("adapter slots", _per_rank(memory.slot_bytes)))
        rows.append(("CPU cache", f"up to {_per_rank(memory.cpu_cache_bytes)}"))
    if memory.device_total is not None and memory.device_free is not None:
        rows.append(("GPU", f"{size(memory.device_total)}, {size(memory.device_free)} free"))
    if memory.host_total is not None and memory.host_free is not None:
        rows.append(("RAM", f"{size(memory.host_total)}, {size(memory.host_free)} free"))
    return rows


def _table(adapters: Sequence[AdapterFindings], page: Page) -> list[Line]:
    """A row an adapter; the refused first, as they are what one looks for."""
    ordered = sorted(adapters, key=lambda adapter: adapter.servable)
    shown = ordered if page.everything else ordered[:MOST_ROWS]
    sized = any(adapter.host_bytes is not None for adapter in adapters)
    rows = _fitting([_HEAD, *map(_row, shown)], page, drop=() if sized else ("a rank's copy",))
    styles: list[Style] = ["head", *("" if adapter.servable else "bad" for adapter in shown)]
    lines = [
        line._replace(style=style)
        for line, style in zip(_columns(rows, page, indent=""), styles, strict=True)
    ]
    left = ordered[len(shown) :]
    if left:
        bad = sum(not adapter.servable for adapter in left)
        refused = f", {bad} of them refused" if bad else ""
        lines.append(Line(f"and {len(left)} more{refused}: --all shows every line"))
    return lines


_HEAD = ("adapter", "format", "rank", "scaling", "changes", "dtype", "size", "a rank's copy", "")
_FIRST_TO_GO = ("scaling", "dtype", "format", "size", "a rank's copy", "changes")
"""Columns that make room for names."""


def _fitting(
    rows: list[tuple[str, ...]], page: Page, drop: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """The rows with as many columns as leave room for the names; ``drop`` are not shown at all."""
    gone = list(drop)
    for name in ("", *_FIRST_TO_GO):
        gone += [name] if name else []
        kept = [at for at, title in enumerate(_HEAD) if title not in gone]
        fitted = [tuple(row[at] for at in kept) for row in rows]
        widths = [max(map(len, column)) for column in zip(*fitted, strict=True)]
        if page.width is None or sum(widths) + 2 * (len(widths) - 1) <= page.width:
            break
    return fitted


def _row(adapter: AdapterFindings) -> tuple[str, ...]:
    copy = adapter.host_bytes
    return (
        readable(adapter.name),
        (adapter.format or "-") + (f" x{adapter.files}" if adapter.files > 1 else ""),
        _numbers(adapter.ranks) or "-",
        _numbers(adapter.scalings) or "-",
        _roles(adapter.targets) or "-",
        "+".join(adapter.dtypes) or "-",
        size(adapter.file_bytes) if adapter.files else "-",
        "-" if copy is None else size(max(copy)),
        _state(adapter),
    )


def _state(adapter: AdapterFindings) -> str:
    if adapter.refusals:
        return "refused"
    return "noted" if adapter.notes else "fine"


def _roles(targets: Sequence[TargetFindings]) -> str:
    """Module roles by their last word, a run of projections without its ending."""
    words = [target.name.rpartition(".")[2] for target in targets if target.kind == "factors"]
    short = dict.fromkeys(word.removesuffix("_proj") for word in words)
    replaced = [target for target in targets if target.kind == "replaced"]
    return " ".join([*short, *(["+saved"] if replaced else [])])


def _verdict(
    ok: bool, adapters: Sequence[AdapterFindings], problems: Sequence[Finding], seconds: float
) -> Line:
    count, refused = len(adapters), sum(not adapter.servable for adapter in adapters)
    told = f"{count} adapters checked in {seconds:.2f} s" if count > 1 else ""
    if ok:
        return Line(f"ok: {told}, all servable" if told else "ok: servable", "good")
    parts = [f"{refused} of {count} adapters refused"] if count > 1 and refused else []
    others = sum(problem.adapter is None for problem in problems)
    if others or not parts:
        many = len(problems) if not parts else others
        parts.append(f"{many} problem{'s' if many != 1 else ''}{' besides' if parts else ''}")
    return Line(f"not servable: {', '.join(parts)}{f' ({told})' if told else ''}", "bad")


# ---------------------------------------------------------------------- layout


def _pairs(rows: Rows) -> list[Line]:
    width = max((len(name) for name, _ in rows), default=0)
    return [Line(f"{name:{width}}  {value}") for name, value in rows]


def _columns(rows: Sequence[tuple[str, ...]], page: Page, *, indent: str = "  ") -> list[Line]:
    """Cells under one another.

    Where the page is too narrow, the widest columns of text give way, each cut in its middle.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if page.width is not None:
        room = page.width - len(indent) - 2 * (len(widths) - 1)
        while sum(widths) > room and max(widths) > MIN_NAME:
            widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        cells = [f"{cut(cell, width):{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append(Line((indent + "  ".join(cells)).rstrip()))
    return lines


def cut(text: str, width: int) -> str:
    """The text in at most ``width`` characters: what is left out was in its middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + (text[-tail:] if tail else "")


def size(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _per_rank(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return size(sizes[0])
    if len(set(sizes)) == 1:
        return f"{size(sizes[0])} a rank"
    return f"{size(max(sizes))} a rank (rank {sizes.index(max(sizes))}; least {size(min(sizes))})"


def _numbers(numbers: Sequence[float]) -> str:
    shown = [f"{number:g}" for number in numbers]
    return ", ".join(shown) if len(shown) <= 4 else f"{shown[0]} to {shown[-1]}"

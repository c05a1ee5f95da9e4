"""One frame of ``mstar-tp top``: as many lines as there is room for, none wider than the screen."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from mstar_tp.tools.top.polling import Reading, SlotUse
from mstar_tp.tools.top.rates import Rates

MIN_WIDTH = 40
MOST_RANKS = 8
"""Shown at most, while there are slots to show."""
_BOLD, _DIM, _RED = Style(bold=True), Style(dim=True), Style(color="red")


def frame(
    url: str, now: Reading, before: Reading | None, *, size: tuple[int, int], fault: str = ""
) -> Text:
    """One frame. ``size``: columns and lines; ``fault``: why nothing is newer than ``now``."""
    width, height = max(size[0], MIN_WIDTH), size[1]
    rates = Rates(now, before)
    lines = [_head(url, now, fault), *_requests(now, rates), Text()]
    ranks = _ranks(now, rates)
    shown = ranks[: 1 + MOST_RANKS]
    if len(ranks) > len(shown):
        shown.append(Text(f"  … and {len(ranks) - len(shown)} ranks more", _DIM))
    lines += [*shown, Text()]
    tail = [Text(f"read failed: {_plain(read)}", _RED) for read in now.failed_reads[-2:]]
    room = height - len(lines) - len(tail)
    lines += _slots(now, rates, room) if room > 0 else []
    lines += tail
    return Text("\n").join(_cut(line, width) for line in lines[:height])


def _cut(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def _plain(text: str) -> str:
    """The part of a server's text that a terminal may be sent."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _head(url: str, now: Reading, fault: str) -> Text:
    head = Text("mstar-tp ", _BOLD) + Text(_plain(url) + "  ")
    if fault:
        return head + Text(_plain(fault), _RED)
    if now.health:
        return head + Text(_plain(now.health), _RED)
    return head + Text("ready" if now.value("ready") else "not ready", _BOLD)


def _requests(now: Reading, rates: Rates) -> list[Text]:
    ended = rates.rate("requests_total")
    restarts = {
        why: count for why, count in now.values("restarts_total", "reason").items() if count
    }
    why = ", ".join(f"{why} {count:.0f}" for why, count in restarts.items())
    refused = rates.rate("requests_refused_total")
    return [
        Text(
            f"requests  {now.total('requests_running', rank='0'):.0f} running, "
            f"{now.total('queue_length', rank='0'):.0f} waiting, "
            f"{now.value('requests_preparing') or 0:.0f} preparing; "
            f"{_number(ended)}/s end, {_number(refused)}/s turned away"
        ),
        Text(
            f"tokens    {_number(rates.rate('generated_tokens_total'))}/s out, "
            f"{_number(rates.rate('prompt_tokens_total'))}/s in; "
            f"{_number(rates.rate('steps_total', rank='0'))} steps/s of "
            f"{_number(rates.mean('step_rows', rank='0'))} rows, "
            f"{_number(rates.mean('step_tokens', rank='0'))} tokens"
        ),
        Text(
            "p50, p95  "
            f"first token {_quantiles(rates, 'time_to_first_token_seconds')}, "
            f"between tokens {_quantiles(rates, 'inter_token_seconds')}, "
            f"queue {_quantiles(rates, 'queue_seconds')}"
        ),
        Text(
            f"restarts  {sum(restarts.values()):.0f}{f' ({why})' if why else ''}; "
            f"preempted {now.total('preemptions_total', rank='0'):.0f}, "
            f"evicted {now.total('evictions_total', rank='0'):.0f}, "
            f"failed reads {now.total('agreed_failures_total', rank='0'):.0f}"
        ),
    ]


def _quantiles(rates: Rates, name: str) -> str:
    bounds = [rates.quantile(name, share) for share in (0.5, 0.95)]
    return " ".join("-" if bound is None else f"≤{_seconds(bound)}" for bound in bounds)


_RANK_COLUMNS = (
    "rank",
    "steps/s",
    "forward",
    "other",
    "KV",
    "slots",
    "CPU cache",
    "memory",
    "cores",
)


def _ranks(now: Reading, rates: Rates) -> list[Text]:
    lines = [Text("".join(f"{name:>9}" for name in _RANK_COLUMNS)[3:], _BOLD)]
    for rank, answered in now.values("rank_answered", "rank").items():
        if not answered:
            lines.append(Text(f"{rank:>6}  gives no answer", _RED))
            continue
        cells = (
            rank,
            _number(rates.rate("steps_total", rank=rank)),
            _seconds(rates.mean("step_phase_seconds", rank=rank, phase="forward")),
            _seconds(_beside_forward(rates, rank)),
            _share(now, "kv_pages_used", "kv_pages", rank),
            _of(now, "adapter_slots_used", "adapter_slots", rank),
            _share(now, "cpu_cache_used", "cpu_cache_limit", rank),
            _bytes(
                now.total("rank_device_reserved_bytes", rank=rank)
                or now.total("rank_resident_memory_bytes", rank=rank)
            ),
            _number(rates.rate("rank_cpu_seconds_total", rank=rank)),
        )
        lines.append(Text("".join(f"{cell:>9}" for cell in cells)[3:]))
    return lines


def _beside_forward(rates: Rates, rank: str) -> float | None:
    """Mean seconds that a step's other phases take together, on the step thread."""
    steps = rates.grown("step_phase_seconds_count", rank=rank, phase="forward")
    if not steps:
        return None
    phases = ("admit", "plan", "sample", "exchange", "wait", "commit")
    parts = (rates.grown("step_phase_seconds_sum", rank=rank, phase=phase) for phase in phases)
    return sum(part or 0.0 for part in parts) / steps


def _slots(now: Reading, rates: Rates, room: int) -> Iterable[Text]:
    if now.slots is None:
        return [Text(now.no_slots, _DIM)]
    if not now.slots:
        return [Text("no adapters are served", _DIM)]
    lines = [Text(f"{'slot':>6}  {'adapter':<34}{'rows':>6}{'req/s':>9}{'tokens/s':>10}", _BOLD)]
    busiest = sorted(now.slots, key=lambda slot: (-slot.rows, slot.stage, slot.slot))
    held = [slot for slot in busiest if slot.adapter is not None]
    fits = room - 1 if len(held) <= room - 1 else room - 2
    lines += [_slot_line(slot, rates, now) for slot in held[: max(fits, 0)]]
    if len(held) > fits:
        lines.append(Text(f"  … and {len(held) - max(fits, 0)} slots more", _DIM))
    elif len(held) < len(now.slots) and len(lines) < room:
        lines.append(Text(f"  {len(now.slots) - len(held)} slots hold no adapter", _DIM))
    return lines[:room]


def _slot_line(slot: SlotUse, rates: Rates, now: Reading) -> Text:
    assert slot.adapter is not None
    # One that has no series of its own is counted among the others.
    own = slot.adapter in now.values("adapter_prompt_tokens_total", "adapter")
    ended = rates.rate("adapter_requests_total", adapter=slot.adapter) if own else None
    tokens = rates.rate("adapter_generated_tokens_total", adapter=slot.adapter) if own else None
    name = _plain(slot.adapter if not slot.stage else f"{slot.stage}: {slot.adapter}")
    if cell_len(name) > 33:
        name = set_cell_size(name, 32) + "…"
    return Text(
        f"{slot.slot:>6}  {set_cell_size(name, 34)}{slot.rows:>6}"
        f"{_number(ended):>9}{_number(tokens):>10}",
        "" if slot.rows else _DIM,
    )


# ------------------------------------------------------------------ amounts


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value == float("inf"):
        return "∞"
    if value >= 1:
        return f"{value:.3g}s"
    return f"{value * 1e3:.3g}ms" if value >= 1e-3 else f"{value * 1e6:.3g}µs"


def _bytes(value: float) -> str:
    unit, size = ("GB", 1e9) if value >= 1e9 else ("MB", 1e6)
    return f"{value / size:.1f}{unit}"


def _share(now: Reading, used: str, of: str, rank: str) -> str:
    whole = now.total(of, rank=rank)
    return f"{now.total(used, rank=rank) / whole:.0%}" if whole else "-"


def _of(now: Reading, used: str, of: str, rank: str) -> str:
    whole = now.total(of, rank=rank)
    return f"{now.total(used, rank=rank):.0f}/{whole:.0f}" if whole else "-"

"""Pins ``mstar-tp top``: rates between two scrapes, a frame that fits its screen whatever names and
numbers there are, servers that come and go, and clear words where nothing answers.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.text import Text
from support.api_kit import Api

from mstar_tp.cli.main import main
from mstar_tp.tools.top.frame import frame
from mstar_tp.tools.top.polling import NoAnswerError, Reader, Reading, SlotUse
from mstar_tp.tools.top.rates import Rates
from mstar_tp.tools.top.top_command import once, watch

BODY: dict[str, Any] = {"model": "pirate", "prompt": "xyz", "max_tokens": 4, "temperature": 0}


def reading(at: float, scale: float = 1.0, *, ranks: int = 2, slots: int = 4) -> Reading:
    """A server whose counters stand at multiples of ``scale``."""
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def put(name: str, value: float, **labels: str) -> None:
        samples[f"mstar_tp_{name}", tuple(sorted(labels.items()))] = value

    put("ready", 1)
    put("generated_tokens_total", 1000 * scale)
    put("requests_total", 10 * scale, outcome="stop")
    put("requests_total", 30 * scale, outcome="length")
    for bound, count in (("0.1", 40 * scale), ("0.5", 90 * scale), ("+Inf", 100 * scale)):
        put("time_to_first_token_seconds_bucket", count, le=bound)
    for rank in map(str, range(ranks)):
        put("rank_answered", 1, rank=rank)
        put("steps_total", 100 * scale, rank=rank)
        put("step_phase_seconds_count", 100 * scale, rank=rank, phase="forward")
        put("step_phase_seconds_sum", 2 * scale, rank=rank, phase="forward")
        put("step_phase_seconds_sum", 0.3 * scale, rank=rank, phase="admit")
        put("kv_pages", 200, rank=rank)
        put("kv_pages_used", 50, rank=rank)
        put("adapter_slots", slots, rank=rank)
        put("adapter_slots_used", slots, rank=rank)
        put("rank_resident_memory_bytes", 1.5e9, rank=rank)
    put("requests_running", 123456, rank="0")
    put("adapter_prompt_tokens_total", 1, adapter="a0")
    put("adapter_requests_total", 20 * scale, adapter="a0", outcome="stop")
    table = [SlotUse("", n + 1, f"a{n}", n % 3) for n in range(slots)]
    return Reading(at, samples, table)


def lines_of(text: Text) -> list[str]:
    return text.plain.split("\n")


def test_rates_are_those_between_two_readings() -> None:
    rates = Rates(reading(14, 3), reading(10, 1))
    assert rates.rate("generated_tokens_total") == 2000 / 4
    assert rates.rate("requests_total") == 80 / 4
    assert rates.rate("requests_total", outcome="stop") == 20 / 4
    assert rates.mean("step_phase_seconds", rank="1", phase="forward") == pytest.approx(0.02)
    assert rates.quantile("time_to_first_token_seconds", 0.4) == 0.1
    assert rates.quantile("time_to_first_token_seconds", 0.5) == 0.5
    assert rates.quantile("time_to_first_token_seconds", 0.95) == float("inf")


def test_a_server_that_was_started_again_counts_from_nothing() -> None:
    rates = Rates(reading(14, 0.5), reading(10, 3))
    assert rates.rate("generated_tokens_total") == 500 / 4
    assert rates.quantile("time_to_first_token_seconds", 0.5) == 0.5


def test_without_a_reading_before_there_are_no_rates() -> None:
    rates = Rates(reading(14), None)
    assert rates.rate("generated_tokens_total") is None
    assert rates.quantile("time_to_first_token_seconds", 0.5) == 0.5  # since the start
    idle = "\n".join(lines_of(frame("http://x", reading(14), reading(14), size=(80, 24))))
    assert "first token - -" in idle and "≤-" not in idle


def test_a_frame_shows_ranks_slots_and_rates() -> None:
    lines = lines_of(frame("http://x", reading(14, 3), reading(10, 1), size=(80, 24)))
    text = "\n".join(lines)
    assert lines[0] == "mstar-tp http://x  ready"
    assert "123456 running" in text and "20/s end" in text
    assert "500/s out" in text and "50 steps/s" in text
    assert "first token ≤500ms ≤∞" in text
    (rank,) = (line.split() for line in lines if line.startswith("     1 ") and "ms" in line)
    assert rank == ["1", "50", "20ms", "3ms", "25%", "4/4", "-", "1.5GB", "0"]
    # The slots that requests hold first; rates only of adapters that are counted by name.
    table = next(n for n, line in enumerate(lines) if line.startswith("  slot  adapter"))
    slots = [line.split() for line in lines[table + 1 :]]
    assert [line[1] for line in slots] == ["a2", "a1", "a0", "a3"]
    assert slots[2] == ["1", "a0", "0", "10", "0"]
    assert slots[0] == ["3", "a2", "2", "-", "-"]


NASTY = ("x" * 300, "東京の天気" * 20, "\x1b[2Jgone\r\n", "[bold]not markup[/bold]")


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60), (80, 5)])
@pytest.mark.parametrize("ranks, slots", [(1, 0), (2, 4), (16, 64)])
def test_a_frame_fits_its_screen_whatever_it_shows(size, ranks, slots) -> None:
    now = reading(14, 3e6, ranks=ranks, slots=slots)
    assert now.slots is not None
    table = [use._replace(adapter=NASTY[use.slot % 4], stage="vision") for use in now.slots]
    troubled = Reading(
        now.at, now.samples, table, failed_reads=list(NASTY), health="the ranks " + NASTY[2] * 30
    )
    for fault in ("", NASTY[1]):
        text = frame("http://x", troubled, reading(10, 1), size=size, fault=fault)
        lines = lines_of(text)
        assert len(lines) <= size[1]
        assert all(cell_len(line) <= size[0] for line in lines)
        assert text.plain.replace("\n", "").isprintable()
    if size == (80, 24) and slots == 64:
        assert any("slots more" in line for line in lines)
        assert any("… and 8 ranks more" in line for line in lines)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("top"), api_key=["CLIENT"], admin_key="ADMIN")
    yield api
    api.close()


def test_once_prints_what_happened_between_its_two_looks(api: Api) -> None:
    with api.http(headers={"Authorization": "Bearer CLIENT"}) as http:
        shown = once(
            Reader(api.url, "ADMIN"),
            lambda: http.post("/v1/completions", json=BODY).raise_for_status(),
        )
    lines = lines_of(shown)
    assert "ready" in lines[0]
    # As api_kit's ranks answer: 100 times (1 + rank), and an offset.
    assert any("115 running, 114 waiting" in line for line in lines)
    assert any("-/s out" not in line and "/s out" in line for line in lines)
    assert any("102/101" in line for line in lines) and any("202/201" in line for line in lines)
    assert "no adapters are served" in lines


def test_the_command_prints_one_plain_frame_or_says_why_not(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_TP_ADMIN_KEY", "ADMIN")
    assert main(["top", api.url, "--once", "--interval", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "no adapters are served" in out
    for key in ("CLIENT", "wrong"):
        assert main(["top", api.url, "--once", "--interval", "0.2", "--admin-key", key]) == 0
        assert "slots need the server's key: give --admin-key" in capsys.readouterr().out
    assert main(["top", api.url]) == 1
    assert "stdout is no terminal: give --once" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["top", url, "--once"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {url}: no server answers there: Connection refused")
    assert main(["top", "localhost:8000", "--once"]) == 1
    assert "is no http:// or https:// URL" in capsys.readouterr().err


def test_an_interval_out_of_range_is_a_bad_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--interval", "0"])
    assert ended.value.code == 2


class _StopError(Exception):
    pass


def test_it_goes_on_when_the_server_comes_back() -> None:
    answers = iter([NoAnswerError("http://x: no server answers there: refused"), reading(20, 1)])

    class Flaky(Reader):
        def read(self) -> Reading:
            answer = next(answers, None)
            if answer is None:
                raise _StopError
            if isinstance(answer, NoAnswerError):
                raise answer
            return answer

    shown: list[str] = []
    with pytest.raises(_StopError):
        watch(
            Flaky("http://x"),
            reading(14, 3),
            lambda: (80, 24),
            lambda text: shown.append(text.plain),
            lambda: None,
        )
    first, gone, back = shown
    assert first.startswith("mstar-tp http://x  ready\n")
    assert gone.startswith("mstar-tp http://x  gone, trying again: no server answers there: ref")
    assert gone.split("\n")[1:] == first.split("\n")[1:]
    assert back.startswith("mstar-tp http://x  ready\n")


def test_a_server_of_another_kind_is_said_to_be_one(tmp_path: Path) -> None:
    code = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler);"
        "print(s.server_port, flush=True); s.serve_forever()"
    )
    (tmp_path / "metrics").write_text("python_info 1\n")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as other:
        assert other.stdout is not None
        reader = Reader(f"http://127.0.0.1:{other.stdout.readline().strip()}")
        try:
            with pytest.raises(NoAnswerError, match="is no mstar-tp server"):
                reader.read()
            (tmp_path / "metrics").unlink()
            with pytest.raises(NoAnswerError, match="with status 404"):
                reader.read()
        finally:
            other.kill()

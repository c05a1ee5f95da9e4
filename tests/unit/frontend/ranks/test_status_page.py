"""Pins that the status page is a few files that fetch nothing from elsewhere.

The answers that it polls stay small however many adapters there are, and need an operator's key
where there is one. The page says what goes wrong, and shows names and answers as text, whatever is
in them. The API is real, its ranks follow a script.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.api_kit import WORLD_SIZE, Api

from mstar_tp.frontend.metrics import server_metrics
from mstar_tp.frontend.page.summary import MAX_SHOWN, slots_by_stage
from mstar_tp.wire.commands import Abort, Inspect
from mstar_tp.wire.schedule import Checks
from mstar_tp.wire.states import CpuCacheState, SlotState, StateReport
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

expect = pytest.importorskip("playwright.sync_api").expect
GUARD_MS = 60_000
expect.set_options(timeout=GUARD_MS)
NASTY = '<img src=x onerror="window.hit=1">'
ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("page"))
    yield api
    api.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("guarded"), api_key=["secret"], admin_key="root")
    yield api
    api.close()


@pytest.fixture(autouse=True)
def reset(api: Api) -> Iterator[None]:
    yield
    api.ranks.reset()
    api.ranks.go()


# ---------------------------------------------------------------------- what is served


def test_the_page_is_files_that_name_nothing_elsewhere(api: Api) -> None:
    with api.http() as http:
        page = http.get("/")
        names = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        seen = {"/": page}
        while names:
            path = f"/{names.pop()}"
            if path not in seen:
                seen[path] = http.get(path)
                imported = re.findall(r'from "\./([^"]+)"', seen[path].text)
                names += [f"page/{name}" for name in imported]
        assert {"/page/page.js", "/page/charts.js", "/page/style.css"} < set(seen)
        for path, answer in seen.items():
            assert answer.status_code == 200, path
            assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", ""), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write", answer.text)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            again = http.get(path, headers={"If-None-Match": f'"x", W/{answer.headers["etag"]}'})
            assert again.status_code == 304 and not again.content
        assert page.headers["content-type"].startswith("text/html")


def test_a_summary_is_bounded_and_finds_names(api: Api) -> None:
    names = [f"adapter-{i}" for i in range(1000)]
    api.run(_serve(api, names))
    try:
        with api.http() as http:
            whole = http.get("/debug/summary")
            adapters = whole.json()["adapters"]
            assert adapters["total"] == adapters["matching"] == 1001
            assert len(adapters["shown"]) == 50 and len(whole.content) < 20_000
            found = http.get("/debug/summary", params={"search": "R-77", "limit": 5}).json()
            assert found["adapters"]["matching"] == 11 and len(found["adapters"]["shown"]) == 5
            most = http.get("/debug/summary", params={"limit": MAX_SHOWN}).json()["adapters"]
            assert len(most["shown"]) == MAX_SHOWN
            for bad in (str(MAX_SHOWN + 1), "-1", "x", "²", "", "0" * 9 + "999"):
                refused = http.get("/debug/summary", params={"limit": bad})
                assert refused.status_code == 400, bad
                assert refused.json()["error"]["param"] == "limit"
    finally:
        api.run(_unserve(api, names))


async def _serve(api: Api, names: list[str]) -> None:
    for name in names:
        api.served.add(api.served.next_key(name), f"/none/{name}")


async def _unserve(api: Api, names: list[str]) -> None:
    for name in names:
        api.served.forget(api.served.remove(name))


def test_those_who_watch_at_once_share_one_question_to_the_ranks(api: Api) -> None:
    before = len(api.ranks.messages(Inspect))

    async def watch() -> None:
        async with httpx.AsyncClient(base_url=api.url, timeout=60) as client:
            answers = await asyncio.gather(*(client.get("/debug/summary") for _ in range(8)))
        assert all(answer.status_code == 200 for answer in answers)

    asyncio.run(watch())
    assert len(api.ranks.messages(Inspect)) <= before + 1


def test_the_summary_needs_the_key_that_the_debug_view_needs(guarded: Api) -> None:
    with guarded.http() as http:
        assert http.get("/").status_code == 200  # it holds no data
        assert http.get("/debug/summary").status_code == 401
        client = http.get("/debug/summary", headers={"Authorization": "Bearer secret"})
        assert client.status_code == 403
        assert http.get("/debug/summary", headers=ADMIN).json()["phase"] == "ready"


def test_a_silent_rank_and_lost_ranks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_metrics, "ANSWER_WITHIN_S", 0.05)
    api = Api(tmp_path)
    with api.http() as http:
        api.ranks.silent = {1}
        ranks = http.get("/debug/summary").json()["ranks"]
        assert [rank["answered"] for rank in ranks] == [True, False]
        api.ranks.kill()
        api.run(_die(api))
        lost = http.get("/debug/summary").json()
    assert lost["phase"] == "dead" and "the ranks are gone" in lost["reason"]
    assert [rank["answered"] for rank in lost["ranks"]] == [False] * WORLD_SIZE
    api.close()


async def _die(api: Api) -> None:
    api.conductor.group.die()


def test_equal_slots_are_told_once_and_others_apart() -> None:
    a, b = AdapterKey("a", 1), AdapterKey("b", 2)
    reports = [_report(0, (a, b)), _report(1, (a, None)), _report(2, (a, b))]
    (stage,) = slots_by_stage(reports)
    assert [group["ranks"] for group in stage["groups"]] == [[0, 2], [1]]
    assert stage["groups"][1]["slots"] == [
        {"slot": 1, "adapter": "a", "requests": 1},
        {"slot": 2, "adapter": None, "requests": 1},
    ]


def _report(rank: int, adapters: tuple[AdapterKey | None, ...]) -> StateReport:
    cpu_cache = CpuCacheState(
        unit="adapters", capacity=4, used=0, peak=0, memory_bytes=0, peak_bytes=0
    )
    slots = [SlotState(slot=i, adapter=key, holders=(7,)) for i, key in enumerate(adapters, 1)]
    return StateReport(
        rank=rank, query_id=0, requests=(), pages_used=0, pages_total=8, slots=tuple(slots),
        cpu_cache=(), served=(), host=cpu_cache, failed_reads=(), waiting=0, running=0, steps=0,
        steps_waited_for_read=0, gap_us=0, preemptions=0,
        checks=Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0),
    )  # fmt: skip


# ---------------------------------------------------------------------- in a browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of an API; in the end nothing was said on its console."""
    contexts, said = [], []

    def open_(api: Api, *, expected: str = "$^", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(GUARD_MS)
        page.on("console", lambda m: None if re.search(expected, m.text) else said.append(m.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(f"{api.url}/?every_ms=100")
        return page

    yield open_
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        context.close()
    assert said == []


def change(page: Page, api: Api, edit: Callable[[dict[str, Any]], None]) -> None:
    """Have the page fetch what ``edit`` makes of the server's present summary."""
    with api.http() as http:
        summary = http.get("/debug/summary").json()
    edit(summary)
    page.unroute_all(behavior="ignoreErrors")
    page.route("**/debug/summary*", lambda route: route.fulfill(json=summary))


def test_names_and_answers_are_text_whatever_is_in_them(
    api: Api, open_page: Callable[..., Page]
) -> None:
    api.run(_serve(api, [NASTY]))
    api.answer(f"{NASTY}<b>bold</b>")
    try:
        page = open_page(api)
        page.locator("#adapters tbody th", has_text=NASTY).wait_for()
        page.fill("#try-tokens", str(len(f"{NASTY}<b>bold</b>")))
        page.fill("#try-prompt", "x")
        page.click("#try-send")
        page.locator("#try-status", has_text="max tokens reached").wait_for()
        assert page.locator("#try-answer").text_content() == f"{NASTY}<b>bold</b>"
        assert page.locator("#try-answer *, #adapters img").count() == 0
        assert page.evaluate("window.hit") is None
    finally:
        api.run(_unserve(api, [NASTY]))


def test_stop_ends_the_request_on_the_ranks_and_errors_are_sentences(
    api: Api, open_page: Callable[..., Page]
) -> None:
    page = open_page(api, expected="status of 404")
    expect(page.locator("#try-model")).to_have_value("tiny")
    page.fill("#try-tokens", "9")
    api.answer("abc")
    api.ranks.hold(3)
    page.focus("#try-send")
    page.keyboard.press("Enter")
    expect(page.locator("#try-answer")).to_have_text("abc")
    expect(page.locator("#try-stop")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#try-status", has_text="Stopped. 3 tokens").wait_for()
    api.ranks.wait_for(Abort)
    expect(page.locator("#try-send")).to_be_focused()
    assert page.locator("#try-error").is_hidden()
    page.fill("#try-model", "nobody")
    api.ranks.go()
    page.keyboard.press("Enter")
    page.locator("#try-error", has_text="nobody").wait_for()
    said = page.locator("#try-error").text_content() or ""
    assert said[0].isupper() and said.endswith(".") and "{" not in said


def test_a_guarded_server_asks_for_its_keys_and_the_tab_alone_keeps_them(
    guarded: Api, open_page: Callable[..., Page]
) -> None:
    page = open_page(guarded, expected="status of 401")
    page.locator("#health", has_text="Key needed").wait_for()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="has not taken this key").wait_for()
    page.fill("#key", "root")
    page.keyboard.press("Enter")
    page.locator("#health", has_text="Serving").wait_for()
    assert page.locator("#key-form").is_hidden()
    page.fill("#try-tokens", "4")
    page.click("#try-send")  # the admin key opens no request for tokens
    page.locator("#try-error", has_text="asks for an API key").wait_for()
    page.fill("#try-key", "secret")
    page.click("#try-send")
    page.locator("#try-status", has_text="4 tokens").wait_for()
    kept = page.evaluate("[localStorage.length, document.cookie, location.href]")
    assert kept[:2] == [0, ""] and "root" not in kept[2]
    page.reload()
    page.locator("#health", has_text="Serving").wait_for()


def test_it_says_when_nothing_answers_and_goes_on_by_itself(
    api: Api, open_page: Callable[..., Page]
) -> None:
    page = open_page(api, expected="ERR_INTERNET_DISCONNECTED")
    page.locator("#health", has_text="Serving").wait_for()
    page.context.set_offline(True)
    page.locator("#health", has_text="No answer").wait_for()
    page.locator("#notice", has_text="last heard from at").wait_for()
    page.click("#try-send")
    page.locator("#try-error", has_text="cannot be reached").wait_for()
    page.context.set_offline(False)
    page.locator("#health", has_text="Serving").wait_for()
    assert page.locator("#notice").is_hidden()


def test_ranks_that_differ_or_are_gone_and_missing_fields_show(
    api: Api, open_page: Callable[..., Page]
) -> None:
    def differ(summary: dict[str, Any]) -> None:
        summary["stages"] = slots_by_stage([_report(0, (AdapterKey("a", 1),)), _report(1, (None,))])
        summary["ranks"][1] = {"rank": 1, "answered": False}

    page = open_page(api)
    change(page, api, differ)
    page.locator("#slots .notice", has_text="slots differ").wait_for()
    assert page.locator("#slots h3").all_text_contents() == ["On rank 0", "On rank 1"]
    assert "silent" in (page.locator("#ranks").text_content() or "")

    bare = {"phase": "down", "reason": "the ranks are gone", "uptime_s": 1, "world_size": 2}

    def strip(summary: dict[str, Any]) -> None:
        summary.clear()
        summary.update(bare)

    change(page, api, strip)
    page.locator("#health", has_text="Restarting ranks").wait_for()
    page.locator("#notice", has_text="The ranks are gone.").wait_for()
    page.locator("#slots .empty").wait_for()


FAINT = """() => {
  const parse = (color) => (color.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest("noscript")) continue;
    const style = getComputedStyle(node);
    const [a, b] = [parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color), back(node)]
      .map(light).sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(node.textContent);
  }
  return faint;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_well_on_a_phone_and_without_a_mouse(
    api: Api, open_page: Callable[..., Page], scheme: str
) -> None:
    def much(summary: dict[str, Any]) -> None:
        long = "w" * 256
        summary["model"] = long
        summary["adapters"]["shown"][0].update(name=long, where="failed", cause="x" * 300)
        keys = tuple(AdapterKey(long, i) if i % 2 else None for i in range(64))
        summary["stages"] = slots_by_stage([_report(0, keys)])
        summary["reason"] = "y" * 300

    page = open_page(api, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    change(page, api, much)
    page.locator(".slot").nth(63).wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    expect(page.locator("#try")).to_be_focused()
    # What was scrolled to and focused stays over the answers that follow.
    page.evaluate("document.getElementById('slots').scrollTop = 100")
    page.focus("#slots")
    for _ in range(2):
        with page.expect_response("**/debug/summary*"):
            pass
    assert page.evaluate("document.getElementById('slots').scrollTop") == 100
    expect(page.locator("#slots")).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(FAINT) == []
    nameless = [
        stage.evaluate("node => node.outerHTML")
        for stage in page.locator("input, select, textarea, button").all()
        if stage.is_visible() and not stage.aria_snapshot().split('"')[1:2]
    ]
    assert nameless == []
    page.locator("#chart-tokens .line").wait_for(state="attached")
    label = page.locator("#chart-requests svg").get_attribute("aria-label") or ""
    assert re.match(r"Requests: running \d+, waiting \d+; at most", label), label

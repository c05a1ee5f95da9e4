"""Promise: the status page of a real server shows its ranks, slots, rates and adapters as they are,
and asks them through the API, without a request to anywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from mstar_tp.testing.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

expect = pytest.importorskip("playwright.sync_api").expect
NASTY = '<img src=x onerror="window.hit=1">'


def test_it_shows_a_server_at_work(shared_server: Server, api_key: str, browser: Browser) -> None:
    expect.set_options(timeout=60_000)
    api = httpx.Client(base_url=shared_server.url, headers={"Authorization": f"Bearer {api_key}"})
    card = api.get("/v1/models/loud").json()
    loaded = api.post("/v1/load_lora_adapter", json={"lora_name": NASTY, "lora_path": card["root"]})
    assert loaded.status_code == 200, loaded.text
    page = browser.new_context().new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{shared_server.url}/?every_ms=100")
    page.fill("#key", api_key)
    page.keyboard.press("Enter")
    expect(page.locator("#health")).to_have_text("Serving")
    expect(page.locator("#ranks tbody tr")).to_have_count(2)
    for name in (NASTY, "odd/name"):
        page.fill("#try-model", name)
        page.fill("#try-tokens", "24")
        page.click("#try-send")
        expect(page.locator("#try-status")).to_contain_text("tokens in")
        row = page.locator("#adapters tbody tr", has=page.get_by_text(name, exact=True))
        expect(row).to_contain_text("slot")
    assert page.locator("#try-answer").text_content()
    expect(page.locator("#slots-note")).to_contain_text("2 of 2 filled · the same on every rank")
    names = page.locator(".slot .name").all_text_contents()
    assert sorted(names) == sorted([NASTY, "odd/name"])
    # Lines are drawn, and the rate was above nothing while it answered.
    expect(page.locator("#ranks tbody tr").first).to_contain_text("MiB")
    for chart in ("tokens", "requests", "first", "between"):
        assert page.locator(f"#chart-{chart} .line").first.get_attribute("d")
    heads = page.locator("#adapters thead th").all_text_contents()
    assert heads == [
        "Name",
        "Where",
        "Requests",
        "Answered",
        "Hits",
        "Evictions",
        "Waiting",
        "Size",
    ]
    page.fill("#search", "ODD")
    expect(page.locator("#adapters-note")).to_have_text("1 of 3 match")
    expect(page.locator("#adapters tbody tr")).to_have_count(1)
    assert said == [] and page.evaluate("window.hit") is None
    assert all(url.startswith(shared_server.url) for url in asked)
    page.context.close()
    api.post("/v1/unload_lora_adapter", json={"lora_name": NASTY}).raise_for_status()

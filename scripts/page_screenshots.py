"""Pictures of the status page for the docs: the demo under a little load, on a desktop and a phone.

    python scripts/page_screenshots.py                      docs/img/status-page-*.png
    python scripts/page_screenshots.py --seconds 300        with more to see in the charts

Needs the extra ``dev`` and a Chromium on PATH.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import support_path  # noqa: F401  # tests/support becomes importable
from PIL import Image
from support.browser import NAMES, chromium, find_chromium

from mstar_tp.testing.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "launch" / "demo"
ADAPTERS = ("pirate", "shouting", "rhyme", "robot")
PROMPTS = ("What colour is the sky?", "Tell me about the sea.", "Who are you?", "What is rain?")
NUM_CLIENTS = 7
VIEWS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1360, "height": 900}, "color_scheme": "light"},
    "phone": {
        "viewport": {"width": 360, "height": 800}, "color_scheme": "light",
        "device_scale_factor": 2,
    },
}  # fmt: skip


class Load:
    """Clients that ask, think, and ask again, until the end of the block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self._url, timeout=60) as client:
            for i in itertools.count():
                if self._over.wait(draw.expovariate(1.5 + (i % 9) / 3)):
                    return
                body = {
                    "model": draw.choices(("demo", *ADAPTERS), (2, 5, 3, 1, 1))[0],
                    "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
                    "max_tokens": draw.randrange(20, 160),
                    "ignore_eos": True,
                    "seed": i,
                }
                client.post("/v1/chat/completions", json=body).raise_for_status()


def picture(browser: Browser, url: str, name: str, seconds: float, folder: Path) -> None:
    """One view, once the page has watched for ``seconds`` and an answer was asked for."""
    page = browser.new_context(**VIEWS[name]).new_page()
    page.goto(f"{url}/")
    page.locator("#health", has_text="Serving").wait_for()
    page.wait_for_timeout(1000 * seconds)
    page.fill("#try-model", "pirate")
    page.click("#try-send")
    page.locator("#try-status", has_text="tokens in").wait_for(timeout=60_000)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    path = folder / f"status-page-{name}.png"
    page.screenshot(path=path, full_page=name != "phone")
    page.context.close()
    with Image.open(path) as image:
        image.convert("RGB").save(path, optimize=True)
    print(f"{path}: {path.stat().st_size >> 10} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100, help="the page watches (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    path = find_chromium()
    if path is None:
        print(f"error: none of {', '.join(NAMES)} is on PATH", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    loras = [arg for name in ADAPTERS for arg in ("--lora", f"{name}={DEMO / 'adapters' / name}")]
    flags = "--served-model-name demo --tp 2 --threads 1 --max-loras 3 --max-num-seqs 6".split()
    flags += "--max-model-len 256 --num-kv-pages 80".split()
    started = time.monotonic()
    with (
        Server(str(DEMO / "model"), *flags, *loras) as server,
        Load(server.url),
        chromium(path) as browser,
    ):
        for name in VIEWS:
            picture(browser, server.url, name, args.seconds, args.out)
    print(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

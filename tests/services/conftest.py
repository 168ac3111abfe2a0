"""A headless Chromium for the tests of pages; it is Debian's, Playwright only drives it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import os
from pathlib import Path
import time
from typing import Any

import pytest


CHROMIUM = os.environ.get("LEDGERTUNE_CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def goto(self, url: str) -> Opened:
        """Open a page of ours and wait until all its charts stand."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-drawn-ms]", timeout=60_000)
        return self

    def after(self, act: Callable[[], Any]) -> None:
        """Do something that changes the filter, and wait until the charts have followed."""
        turn = int(self.js("document.documentElement.dataset.turn"))
        act()
        self.until(f"Number(document.documentElement.dataset.turn) > {turn}")

    def until(self, condition: str, timeout_s: float = 60.0) -> None:
        """Wait for an expression to hold. Playwright's own wait evaluates text, which the page's policy forbids."""
        end = time.monotonic() + timeout_s
        while not self.js(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            self.page.wait_for_timeout(50)

    def js(self, text: str) -> Any:
        """The value of an expression in the page."""
        return self.page.evaluate(text)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; a missing one fails the tests that need it."""
    from playwright.sync_api import sync_playwright

    assert Path(CHROMIUM).exists(), f"{CHROMIUM} is missing: apt-get install chromium"
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """A fresh page."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield Opened(context.new_page())
    context.close()

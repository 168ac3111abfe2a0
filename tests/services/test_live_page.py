"""The live page in a real browser: it follows the journal and keeps what its reader did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.made_up import events
from tests.dashboards.made_up import write_study
from tests.dashboards.test_serve import held
from tests.dashboards.test_serve import serving
from tests.services.conftest import Opened
from tests.services.test_report_page import faults


pytestmark = pytest.mark.services


def test_page_follows_and_keeps_filter_scroll_and_zoom(opened: Opened, tmp_path: Path) -> None:
    whole = events(60)
    cut = next(i for i, line in enumerate(whole) if line.get("number") == 50 and line["event"] == "trial")
    folder = write_study(tmp_path / "one", whole[:cut], refused=5)
    page = opened.page
    with held(folder), serving([folder]) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        opened.goto(address)
        assert "follows the study" in page.text_content("#live")
        assert page.text_content("#state") == "running"
        opened.after(lambda: page.fill("#filter-text", "mfu>1"))
        opened.js("Plotly.relayout('pareto', { 'xaxis.range': [30, 50] })")
        opened.js("document.querySelector('#trials .scroll').scrollTop = 300")
        opened.js("scrollTo({ top: 900, behavior: 'instant' })")
        # The headline above grows when the winner is known: what the reader looks at must stay where it is.
        place = "document.getElementById('parts-title').getBoundingClientRect().top"
        before = opened.js(place)
        shown = int(page.text_content("#filter-count").split()[0])
        with folder.journal.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in whole[cut:]))
        opened.until("document.getElementById('state').textContent === 'done'")
        opened.until("document.getElementById('filter-count').textContent.includes('of 60')")
        version = "document.documentElement.dataset.version"
        opened.until(f"{version} !== JSON.parse(document.getElementById('data').textContent).live.version")
        assert int(page.text_content("#filter-count").split()[0]) > shown
        assert page.input_value("#filter-text") == "mfu>1"
        assert opened.js("document.getElementById('pareto').layout.xaxis.range") == [30, 50]
        assert opened.js("document.querySelector('#trials .scroll').scrollTop") == 300
        assert opened.js(place) == pytest.approx(before, abs=2)
        assert "has ended" in page.text_content("#live") and page.is_visible("#winner")
        assert faults(opened) == []
        assert opened.said == [] and all(url.startswith(address) for url in opened.requests)
    opened.until("document.getElementById('live').hasAttribute('data-bad')")
    assert "The server is gone" in page.text_content("#live") and page.text_content("#filter-count")


def test_a_heartbeat_moves_the_account(opened: Opened, tmp_path: Path) -> None:
    lines = events(3, end=None, winner=False, running=1)
    folder = write_study(tmp_path / "one", lines)
    with held(folder), serving([folder]) as server:
        opened.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        read = "Number(document.querySelector(\"[data-tile='budget spent']\").dataset.value)"
        before = opened.js(read)
        beat = {"event": "heartbeat", "unix_s": lines[-1]["unix_s"] + 2, "running": {"3": 116.0}}
        with folder.journal.open("a") as file:
            file.write(json.dumps(beat) + "\n")
        opened.until(f"{read} === {before + 100}")
        assert opened.said == []


def test_list_of_studies(opened: Opened, tmp_path: Path) -> None:
    folders = [write_study(tmp_path / name, events(3)) for name in ("one", "two <b>")]
    with serving(folders, single=False) as server:
        opened.page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        assert faults(opened) == []
        opened.page.click("text=two <b>")
        opened.page.wait_for_selector("html[data-drawn-ms]", timeout=60_000)
        assert opened.page.text_content("#study") == "two <b>"
        opened.page.click("text=all studies")
        assert opened.page.text_content("h1") == "Studies"
        assert opened.said == []


def test_token_address_opens_once_and_leaves_no_trace(browser: Any, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "one", events(3, end=None, winner=False, running=1))
    context = browser.new_context()
    opened = Opened(context.new_page())
    with held(folder), serving([folder], token="secret-token") as server:
        opened.goto(f"http://127.0.0.1:{server.server_address[1]}/?token=secret-token")
        assert "token" not in opened.page.url
        assert opened.js("document.cookie") == ""
        with opened.page.expect_response("**/data.json*", timeout=30_000) as answer:
            pass
        assert answer.value.status in (200, 204)
    context.close()

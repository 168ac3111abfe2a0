"""How long the report page takes to stand: ``python benchmarks/report_page.py [trials] [times]`` prints one JSON line.

A made-up study is written as a page and opened in headless Chromium so many times (`make test-services` installs what
that needs). ``cpu_ms`` is what the page's main thread computed, from the navigation until every chart and all rows of
the table stood: what another program takes of the core does not count in it, so it is about the time that a reader
waits on an idle machine. ``drawn_ms`` and ``table_ms`` are what the clock said, until the charts and until the table
stood; they mean little on a busy machine, which ``load`` tells. Medians, with the fastest beside them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import statistics
import sys
import tempfile
import time

from playwright.sync_api import sync_playwright


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dashboards.page import report_page
from tests.dashboards.made_up import events
from tests.dashboards.made_up import write_study
from tests.services.conftest import CHROMIUM
from tests.services.conftest import FLAGS


def main(trials: int, times: int) -> None:
    """Write the page, open it, print."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        study = write_study(Path(folder) / "study", events(trials), refused=300)
        began = time.perf_counter()
        path = Path(folder) / "report.html"
        path.write_text(report_page(study), encoding="utf-8")
        written = time.perf_counter() - began
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        drawn, whole, computed = [], [], []
        for _ in range(times):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-drawn-ms]", timeout=120_000)
            drawn.append(int(page.evaluate("document.documentElement.dataset.drawnMs")))
            while page.evaluate("document.querySelectorAll('#table tbody tr').length") < trials:
                page.wait_for_timeout(5)
            whole.append(round(page.evaluate("performance.now()")))
            metrics = session.send("Performance.getMetrics")["metrics"]
            computed.append(round(1000 * next(each["value"] for each in metrics if each["name"] == "TaskDuration")))
            page.close()
        browser.close()
        found = {
            "trials": trials,
            "page_bytes": path.stat().st_size,
            "write_s": round(written, 3),
            "cpu_ms": {"median": statistics.median(computed), "fastest": min(computed)},
            "drawn_ms": {"median": statistics.median(drawn), "fastest": min(drawn)},
            "table_ms": {"median": statistics.median(whole), "fastest": min(whole)},
            "load": os.getloadavg()[0],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 5)

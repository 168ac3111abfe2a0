"""How long the report page takes to stand: ``python benchmarks/report_page.py [trials] [times]`` prints one JSON line.

A made-up study is written as a page and opened in headless Chromium so many times (`make test-services` installs what
that needs). ``drawn_ms`` runs from the start of the navigation until every chart is drawn, ``table_ms`` until all rows
of the table stand too; medians, with the fastest beside them, because whatever else runs on the machine only adds.
``calibration_ms`` is what the same browser takes for a fixed loop of arithmetic: it tells how busy the machine was.
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


LOOP = "(() => { const t = performance.now(); let s = 0; for (let i = 0; i < 2e7; i += 1) s += Math.sqrt(i); " + (
    "return performance.now() - t + 0 * s; })()"
)


def main(trials: int, times: int) -> None:
    """Write the page, open it, print."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        study = write_study(Path(folder) / "study", events(trials), refused=300)
        began = time.perf_counter()
        path = Path(folder) / "report.html"
        path.write_text(report_page(study), encoding="utf-8")
        written = time.perf_counter() - began
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        drawn, whole, loops = [], [], []
        for _ in range(times):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            loops.append(page.evaluate(LOOP))
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-drawn-ms]", timeout=120_000)
            drawn.append(int(page.evaluate("document.documentElement.dataset.drawnMs")))
            while page.evaluate("document.querySelectorAll('#table tbody tr').length") < trials:
                page.wait_for_timeout(5)
            whole.append(round(page.evaluate("performance.now()")))
            page.close()
        browser.close()
        found = {
            "trials": trials,
            "page_bytes": path.stat().st_size,
            "write_s": round(written, 3),
            "drawn_ms": {"median": statistics.median(drawn), "fastest": min(drawn)},
            "table_ms": {"median": statistics.median(whole), "fastest": min(whole)},
            "calibration_ms": {"median": round(statistics.median(loops)), "fastest": round(min(loops))},
            "load": os.getloadavg()[0],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 5)

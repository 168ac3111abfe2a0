"""The report page in a real browser: it draws, filters, answers, asks nobody, and anybody can use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dashboards.page import report_page
from tests.dashboards.made_up import events
from tests.dashboards.made_up import write_study
from tests.services.conftest import Opened
from tuner.cli import main
from tuner.records.layout import StudyFolder


pytestmark = pytest.mark.services

CHARTS = ("pareto", "regret", "predicted", "parts", "timeline", "lines")


def page_of(folder: StudyFolder, tmp_path: Path) -> str:
    """Address of the study's page in a file."""
    path = tmp_path / "report.html"
    path.write_text(report_page(folder), encoding="utf-8")
    return path.as_uri()


def faults(opened: Opened) -> list[Any]:
    """What axe-core finds serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(opened.page).response["violations"]
    return [
        (each["id"], [node["target"] for node in each["nodes"][:4]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


STUDIES: dict[str, list[dict[str, Any]]] = {
    "done": events(40),
    "no winner": events(8, winner=False, fail_share=0.5),
    "running": events(10, end=None, winner=False, running=2),
    "interrupted": events(5, end="interrupted", winner=False),
    "first trial": events(0, end=None, winner=False, running=1),
    "nothing": [],
    "infeasible": [
        *events(0, end=None, winner=False)[:1],
        {"event": "pool", "unix_s": 1.8e9, "enumerated": 9, "feasible": 0, "rejected": []},
        {
            "event": "study_end",
            "unix_s": 1.8e9,
            "state": "done",
            "reason": "no candidate is feasible",
            "near_misses": [
                {
                    "label": "tp8 b1 ac=none",
                    "candidate": {"tensor_parallel": 8},
                    "reasons": [
                        {"code": "memory", "required": 2.0, "available": 1.0, "unit": "GiB", "text": "too much"}
                    ],
                }
            ],
        },
    ],
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", STUDIES)
def test_every_kind_of_study_stands(browser: Any, tmp_path: Path, name: str, scheme: str) -> None:
    folder = write_study(tmp_path / "s", STUDIES[name], refused=0 if name == "nothing" else 12)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    opened = Opened(context.new_page())
    address = page_of(folder, tmp_path)
    opened.goto(address)
    assert opened.said == []
    assert opened.requests == [address], "nothing but the file itself was asked for"
    for chart in CHARTS:
        drawn = opened.js(f"document.querySelectorAll('#{chart} svg.main-svg').length")
        empty = opened.js(f"document.querySelectorAll('#{chart} .empty').length")
        assert (drawn > 0) != (empty > 0), chart
    assert faults(opened) == []
    context.close()


def test_charts_hold_the_trials(opened: Opened, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(60), refused=25)
    opened.goto(page_of(folder, tmp_path))
    trials = [line for line in events(60) if line["event"] == "trial"]
    points = opened.js("document.querySelectorAll('#pareto .scatterlayer .point').length")
    assert points == 60 + 25
    inside = opened.js("document.querySelectorAll('#predicted .scatterlayer .point').length")
    assert inside == sum(trial["state"] == "measured" for trial in trials)
    assert opened.js("document.querySelectorAll('#parts .barlayer .point').length") == 2 * 10
    assert opened.js("document.querySelectorAll('#timeline .scatterlayer .trace').length") >= 6


def test_figures_equal_status(opened: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_study(tmp_path / "s", events(50), refused=5)
    assert main(["status", str(folder.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    opened.goto(page_of(folder, tmp_path))
    value = "(selector) => document.querySelector(selector).dataset.value"
    read = lambda selector: float(opened.page.evaluate(value, selector))  # noqa: E731
    assert read("#winner") == told["winner"]
    assert read("#gain") == told["comparison"]["step_time_change_pct"]
    ends = opened.js("[document.getElementById('gain').dataset.low, document.getElementById('gain').dataset.high]")
    assert [float(end) for end in ends] == told["comparison"]["step_time_change_ci_pct"]
    assert read("[data-tile='budget spent']") == told["spent_device_s"]
    assert read("[data-tile='given back']") == told["given_back_device_s"]
    assert read("[data-tile='trials']") == len(told["trials"])
    assert read("[data-tile='candidates']") == told["enumerated"]
    assert opened.js("document.getElementById('commit').dataset.value") == told["commit"]["hash"]
    rows = opened.js(
        "[...document.querySelectorAll('#table tbody tr')].map((row) => [Number(row.dataset.number),"
        "row.cells[1].textContent, row.cells[2].textContent,"
        "...[4, 5, 8, 9].map((i) => row.cells[i].dataset.value ?? null)])"
    )
    assert len(rows) == len(told["trials"])
    for row, trial in zip(rows, told["trials"]):
        assert row[:3] == [trial["number"], trial["state"], trial["label"]]
        figures = [trial[key] for key in ("mfu_pct", "step_time_s", "peak_reserved_gib", "device_s")]
        assert [None if value is None else float(value) for value in row[3:]] == figures


def test_filter_and_sort(opened: Opened, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(120), refused=5)
    opened.goto(page_of(folder, tmp_path))
    page = opened.page
    trials = [line for line in events(120) if line["event"] == "trial"]

    def left(text: str) -> set[int]:
        opened.after(lambda: page.fill("#filter-text", text))
        rows = "[...document.querySelectorAll('#table tbody tr[data-number]')]"
        return set(opened.js(f"{rows}.map((row) => Number(row.dataset.number))"))

    def wanted(test: Any) -> set[int]:
        return {trial["number"] for trial in trials if test(trial)}

    assert left("tp=2 ac=full") == wanted(
        lambda t: t["candidate"]["tensor_parallel"] == 2 and t["candidate"]["activation_checkpoint"] == "full"
    )
    assert left("mfu>45") == wanted(lambda t: (t["mfu_pct"] or 0) > 45)
    assert left("out_of_memory") == wanted(lambda t: t["state"] == "failed")
    assert left("nowhere-to-be-found") == set()
    opened.after(lambda: page.click("#filter button[type=reset]"))
    opened.after(lambda: page.select_option("#filter-state", "stopped"))
    shown = opened.js("document.querySelectorAll('#table tbody tr[data-number]').length")
    assert shown == len(wanted(lambda t: t["state"] == "stopped")) > 0
    assert f"{shown} of 120" in page.text_content("#filter-count")
    page.click("#filter button[type=reset]")
    page.click("#table thead th:nth-child(6) button")
    page.wait_for_timeout(500)
    steps = opened.js(
        "[...document.querySelectorAll('#table tbody tr')].map((r) => r.cells[5].dataset.value).filter(Boolean)"
    )
    assert [float(step) for step in steps] == sorted(float(step) for step in steps)
    assert page.get_attribute("#table thead th:nth-child(6)", "aria-sort") == "ascending"
    assert opened.said == []


def test_why_was_it_rejected(opened: Opened, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(20), refused=30)
    refused = [json.loads(line) for line in folder.rejected.read_text().splitlines()]
    opened.goto(page_of(folder, tmp_path))

    def answer(text: str) -> str:
        opened.page.fill("#lookup-text", text)
        opened.page.press("#lookup-text", "Enter")
        return str(opened.page.text_content("#answer"))

    one = refused[3]
    text = answer(one["label"])
    assert one["label"] in text and one["reasons"][0]["text"] in text and "79" in text
    needed = opened.js(
        "[...document.querySelectorAll('#answer [data-value]')].map((cell) => Number(cell.dataset.value))"
    )
    assert one["reasons"][0]["required"] in needed and one["reasons"][0]["available"] in needed
    knobs = ("tensor_parallel", "pipeline_parallel", "micro_batch", "fsdp_bucket", "forward_prefetch", "loss_chunks")
    text = answer(",".join(f"{knob}={one['candidate'][knob]}" for knob in knobs))
    assert one["reasons"][0]["text"] in text
    tried = next(line for line in events(20) if line["event"] == "trial" and line["number"] == 5)
    assert "was not rejected, it was tried: trial 5" in answer(tried["label"])
    assert "3 × pp 2 = 6 does not divide the 8 devices" in answer("tp=3,pp=2")
    assert "There is no knob “colour”" in answer("colour=red")
    # 300 were refused, the page has 30: it must not claim to know the rest.
    assert "holds 30 of 300 refused candidates" in answer("tp=8,b=64")
    assert answer("") == ""
    assert opened.said == []


def test_CLI_03_knobs_without_choice_are_listed(opened: Opened, tmp_path: Path) -> None:
    opened.goto(page_of(write_study(tmp_path / "s", events(12)), tmp_path))
    note = opened.page.text_content("#lines-note")
    assert "The same in all:" in note and "reshard after forward default" in note and "micro batch" not in note


def test_by_keyboard_alone(opened: Opened, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(6), refused=5)
    opened.goto(page_of(folder, tmp_path))
    page = opened.page
    page.keyboard.press("Tab")
    assert opened.js("document.activeElement.textContent") == "Skip to the figures"
    page.keyboard.press("Enter")
    assert opened.js("document.activeElement.id") == "main"
    page.focus("#table tbody tr:nth-child(3) button")
    page.keyboard.press("Enter")
    assert page.is_visible("#detail") and "Trial 2" in page.text_content("#detail-title")
    assert faults(opened) == []
    page.keyboard.press("Escape")
    assert not page.is_visible("#detail")
    assert opened.js("document.activeElement.textContent") == "2"


def test_SEC_07_hostile_text_stays_text(opened: Opened, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(30), refused=0)
    opened.page.on("dialog", lambda dialog: pytest.fail(f"a record's text ran: {dialog.message}"))
    opened.goto(page_of(folder, tmp_path))
    failed = next(line["number"] for line in events(30) if line["event"] == "trial" and line["state"] == "failed")
    opened.page.click(f"#table tr[data-number='{failed}'] button")
    assert "<script>alert(1)</script>" in opened.page.text_content("#detail")
    opened.page.keyboard.press("Escape")
    curve = opened.js("document.getElementById('pareto').data.findIndex((trace) => trace.name === 'failed')")
    opened.js(f"Plotly.Fx.hover('pareto', [{{ curveNumber: {curve}, pointNumber: 0 }}])")
    opened.until("document.querySelectorAll('#pareto .hoverlayer text').length > 0")
    assert "<script>alert(1)</script>" in opened.page.text_content("#pareto .hoverlayer")
    assert opened.js("document.querySelectorAll('img, main script, .hoverlayer a').length") == 0
    assert opened.said == []


def test_a_thousand_trials_all_stand(opened: Opened, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(1000), refused=300)
    opened.goto(page_of(folder, tmp_path))
    opened.until("document.querySelectorAll('#table tbody tr').length === 1000")
    assert opened.js("document.querySelectorAll('#pareto .scatterlayer .point').length") == 1300
    assert opened.said == []


def test_narrow_page_does_not_scroll_sideways(browser: Any, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(12), refused=5)
    context = browser.new_context(viewport={"width": 390, "height": 800})
    opened = Opened(context.new_page()).goto(page_of(folder, tmp_path))
    assert opened.js("document.documentElement.scrollWidth") <= 390
    context.close()

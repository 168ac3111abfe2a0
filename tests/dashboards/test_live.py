"""What a person sees: every event as a line or a row, the same facts in each display."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from dashboards.live import choose_display
from dashboards.live import JsonDisplay
from dashboards.live import LiveDisplay
from dashboards.tables import parts_table
from dashboards.tables import trial_table
from search_space.candidate import Candidate


TRIAL: dict[str, Any] = {
    "event": "trial",
    "number": 1,
    "role": "search",
    "state": "measured",
    "label": Candidate(tensor_parallel=2).label(),
    "candidate": Candidate(tensor_parallel=2).to_json(),
    "step_time_s": 0.5,
    "step_time_ci_s": [0.48, 0.52],
    "mfu_pct": 31.25,
    "peak_reserved_gib": 1.5,
    "device_s": 60.0,
    "predicted": {"step_time_s": 0.6},
    "failure": None,
}
FAILED: dict[str, Any] = TRIAL | {
    "number": 2,
    "state": "failed",
    "failure": {"class": "out_of_memory", "rank": 3, "text": "CUDA out of memory\nmore"},
}
EVENTS: list[dict[str, Any]] = [
    {"event": "planning", "study": "s", "budget_device_s": 600},
    {"event": "session", "study": "s", "folder": "f", "budget_device_s": 600, "spent_device_s": 0, "notes": ["n1"]},
    {"event": "pool", "enumerated": 9, "feasible": 5, "rejected": [{"code": "memory", "count": 4, "example": "x"}]},
    {"event": "trial_placed", "number": 1, "role": "search", "label": "tp2", "predicted": {"step_time_s": 0.6}},
    {"event": "progress", "number": 1, "step": 7, "phase": "measured", "step_time_s": 0.5, "device_s": 9.0},
    TRIAL,
    FAILED,
]


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = choose_display(as_json=False, plain=True)
    for event in EVENTS:
        display(event)
    text = capsys.readouterr().out
    for words in (
        "note: n1",
        "feasible 5; refused: 4 memory",
        "trial 1 (search): tp2",
        "MFU 31.2%",
        "out_of_memory on rank 3: CUDA",
    ):
        assert words in text
    assert "more" not in text


def test_json_lines_leave_progress_out(capsys: pytest.CaptureFixture[str]) -> None:
    display = JsonDisplay()
    for event in [*EVENTS, {"event": "study_end", "state": "done"}, {"event": "study_end", "trials": []}]:
        display(event)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["session", "pool", "trial_placed", "trial", "trial", "study_end"]
    assert "trials" in lines[-1]


def test_live_table_shows_running_and_finished() -> None:
    display = LiveDisplay()
    for event in EVENTS[:5]:
        display(event)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(display._render())
    text = console.export_text()
    assert "running" in text and "measured 7" in text and "of 10.0 device-minutes" in text
    for event in EVENTS[5:]:
        display(event)
    console.print(display._render())
    text = console.export_text()
    assert "running" not in text and "out_of_memory" in text and "best" in text


def test_winner_is_marked_over_best() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(trial_table([TRIAL, FAILED], {}, winner=1))
    assert "winner" in console.export_text()


def test_waterfall_ends_at_the_step() -> None:
    parts = {"bubble": 0.2, "exposed_communication": 0.1}
    trial = TRIAL | {"breakdown": {"step_s": 1.0, "useful_s": 0.6, "parts_s": parts, "unexplained_s": 0.1}}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(parts_table(trial, width=10))
    rows = {line.split("  ")[0].strip(): line.rstrip() for line in console.export_text().splitlines()[2:]}
    assert rows["useful"].endswith("██████") and rows["unexplained"].endswith("         █")
    assert len({len(rows[name]) for name in ("unexplained", "step")}) == 1


class Slow:
    """A stream that gives other threads the word in every write."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def write(self, text: str) -> None:
        self.parts.append(text)
        time.sleep(0.001)

    def flush(self) -> None:
        pass


def test_events_of_several_threads_stay_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning of the records' thread once stood in the middle of a trial's line."""
    stream = Slow()
    monkeypatch.setattr(sys, "stdout", stream)
    display = JsonDisplay()

    def tell(name: str) -> None:
        for number in range(40):
            display({"event": "warning", "text": name, "number": number})

    threads = [threading.Thread(target=tell, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = "".join(stream.parts).splitlines()
    assert len([json.loads(line) for line in lines]) == 120

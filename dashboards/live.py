"""What `tune start` shows: a live table on a terminal, a line per event elsewhere, JSON lines for scripts."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dashboards.console import make_console
from dashboards.tables import figures
from dashboards.tables import outcome_text
from dashboards.tables import trial_table
from tuner.records.layout import StudyFolder
from tuner.records.units import format_budget


class Display:
    """Base of the displays: a listener that can be entered and finished."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def finish(self, folder: StudyFolder, code: int) -> None:
        """The study's session is over."""


class JsonDisplay(Display):
    """One JSON object per event on standard output; the last one is ``study_end`` with everything."""

    def __init__(self) -> None:
        # Kept, so that what libraries print meanwhile can be sent elsewhere.
        self._stream = sys.stdout
        # Warnings come from other threads; a signal's event may come in the middle of one of this thread's.
        self._lock = threading.RLock()

    def __call__(self, event: dict[str, Any]) -> None:
        """Print the event; progress is left out, it repeats several times a second."""
        partial = event["event"] == "study_end" and "trials" not in event
        if event["event"] in ("progress", "planning", "mlflow") or partial:
            return
        with self._lock:
            try:
                self._stream.write(json.dumps(event) + "\n")
                self._stream.flush()
            except BrokenPipeError:
                # Whoever read the events has left; the study goes on, its journal has them all.
                self._stream = open(os.devnull, "w")  # noqa: SIM115


class PlainDisplay(Display):
    """One line per event."""

    def __init__(self) -> None:
        self._console = make_console()

    def __call__(self, event: dict[str, Any]) -> None:
        """Print what a person wants to know of the event."""
        for line in describe(event):
            self._console.print(line, markup=False, soft_wrap=True)

    def finish(self, folder: StudyFolder, code: int) -> None:
        """Print the closing table and how to go on."""
        print_end(self._console, folder, code)


class LiveDisplay(Display):
    """A table that updates in place: budget bar, trials, what runs now, the best so far."""

    def __init__(self) -> None:
        self._console = make_console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._budget = self._spent = 0.0
        self._trials: list[dict[str, Any]] = []
        self._running: dict[int, dict[str, Any]] = {}
        self._notes: list[str] = []
        self._shown = time.monotonic()

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, event: dict[str, Any]) -> None:
        """Update what is shown."""
        kind = event["event"]
        if kind == "mlflow":
            for line in describe(event):
                self._console.print(line, markup=False, soft_wrap=True)
            return
        if kind == "session":
            self._budget, self._spent = event["budget_device_s"], event["spent_device_s"]
        elif kind in ("trial_queued", "trial_placed") or kind == "progress":
            self._running.setdefault(event["number"], {}).update(event)
        elif kind == "trial":
            self._running.pop(event["number"], None)
            self._trials.append(event)
            self._spent += event["device_s"]
        elif kind == "probe":
            self._spent += event["device_s"]
        if kind in ("planning", "session", "pool", "ray", "probe", "dry_run", "warning", "stopping"):
            self._notes += describe(event)
        self._live.update(self._render())

    def _render(self) -> Group:
        parts: list[Any] = [Text(note, style="dim") for note in self._notes[-6:]]
        if self._budget:
            used = self._spent + sum(trial.get("device_s", 0.0) for trial in self._running.values())
            bar = Table.grid(padding=(0, 1))
            bar.add_row(
                "budget",
                ProgressBar(total=self._budget, completed=min(used, self._budget), width=40),
                f"{format_budget(used)} of {format_budget(self._budget)}",
            )
            parts.append(bar)
        if self._trials or self._running:
            parts.append(trial_table(self._trials, self._running))
        return Group(*parts)

    def finish(self, folder: StudyFolder, code: int) -> None:
        """Print the closing table and how to go on."""
        print_end(self._console, folder, code)


def choose_display(as_json: bool, plain: bool) -> Display:
    """The display for how the command was called."""
    if as_json:
        return JsonDisplay()
    return PlainDisplay() if plain else LiveDisplay()


def describe(event: dict[str, Any]) -> list[str]:
    """An event as lines for a person; empty for those that say nothing new."""
    kind = event["event"]
    if kind == "planning":
        return [f"study {event['study']}: reading the model and this machine …"]
    if kind == "session":
        lines = [f"study {event['study']} in {event['folder']}"]
        lines += [f"note: {note}" for note in event["notes"]]
        spent = event["spent_device_s"]
        already = f", {format_budget(spent)} spent before" if spent else ""
        return [*lines, f"budget: {format_budget(event['budget_device_s'])}{already}"]
    if kind == "pool":
        refused = ", ".join(f"{group['count']} {group['code']}" for group in event["rejected"])
        return [
            f"candidates: {event['enumerated']}, feasible {event['feasible']}"
            + (f"; refused: {refused}" if refused else "")
        ]
    if kind == "ray":
        return [f"Ray {'started' if event['local'] else 'joined'}, dashboard {event['dashboard'] or 'off'}"]
    if kind == "probe":
        devices = [device for node in event.get("nodes", [event.get("figures")]) for device in node["devices"]]
        rates = [max(product["tflops"] for product in device["products"]) for device in devices]
        suspects = len(event["suspects"])
        return [
            f"probe: {len(rates)} devices, {min(rates):.3g} to {max(rates):.3g} TFLOP/s, "
            f"{suspects or 'no'} suspect{'' if suspects == 1 else 's'} · {event['device_s']:.0f} device-seconds"
        ]
    if kind == "probe_failed":
        return [f"warning: the probe failed, the shipped priors stay: {event['text']}"]
    if kind == "dry_run":
        return [f"refused before placing: {event['label']}: {event['error']}"] if event["error"] else []
    if kind == "trial_placed":
        predicted = event["predicted"]["step_time_s"]
        move = event.get("move")
        why = f" · {move['move']}, since {move['part']} in trial {move['from_trial']}" if move else ""
        return [
            f"trial {event['number']} ({event['role']}): {event['label']} · predicted {predicted:.3g} s a step{why}"
        ]
    if kind == "trial":
        return [f"trial {event['number']} {outcome_text(event)}"]
    if kind == "held":
        return [
            f"held back: {event['count']} candidates that would fail as trial {event['number']} did ({event['reason']})"
        ]
    if kind == "quarantine":
        return [f"warning: node {event['node']} is left out from now on: {event['text']}"]
    if kind == "canary":
        verdict = "the machine has changed" if event["drifted"] else "as before"
        return [f"canary: the baseline takes {event['change_pct']:+.1f}% of its first step time ({verdict})"]
    if kind == "ablation":
        kept = sum(change["kept"] for change in event["changes"])
        unsure = sum(change["kept"] and change.get("sure") is False for change in event["changes"])
        undecided = f", {unsure} of them undecided" if unsure else ""
        return [f"ablation: {kept} of {len(event['changes'])} changes stay{undecided}"]
    if kind == "winner":
        lines = [f"winner: trial {event['number']} {event['label']} · {figures(event['comparison'])}"]
        return [*lines, f"why: {event['why']}"] if event.get("why") else lines
    if kind == "commit":
        return [f"committed {event['hash'][:12]} on {event['branch']} in {event['repo']} ({event['file']})"]
    if kind == "warning":
        return [f"warning: {event['text']}"]
    if kind == "mlflow":
        return [
            f"MLflow {name}: {url}" for name, url in event["urls"].items() if name in ("study", "charts", "compare")
        ]
    if kind == "stopping":
        return ["stopping: running gangs are killed, what was measured is kept (Ctrl-C again to leave at once)"]
    return []


def print_end(console: Console, folder: StudyFolder, code: int) -> None:
    """The closing table of a session, why it ended, and how to go on."""
    from dashboards.tables import print_summary
    from tuner.records.summary import summarise

    print_summary(console, summarise(folder), folder)
    if code == 130:
        console.print(f"go on with: tune resume {folder.handle}", markup=False)

"""A study's figures as Ray metrics: Ray's own Prometheus export carries them, Grafana draws them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from typing import Any


PREFIX = "tune_"
"""Names of ours begin so; Ray puts ``ray_`` before them in its export."""

STATES = ("queued", "running", "measured", "failed", "stopped", "infeasible")
"""States of trials that are counted."""

GAUGES = {
    "budget_device_seconds": ("Device-seconds that the study may spend.", ()),
    "spent_device_seconds": ("Device-seconds charged so far, running trials included.", ()),
    "trials": ("Trials by state.", ("state",)),
    "best_mfu_percent": ("MFU of the fastest measured trial.", ()),
    "best_step_seconds": ("Step time of the fastest measured trial.", ()),
    "baseline_step_seconds": ("Step time of the baseline.", ()),
    "kind_device_seconds": ("Device-seconds of finished trials by kind.", ("kind",)),
    "candidates": ("Candidates by verdict of the ledger.", ("verdict",)),
}
"""Every metric: name without the prefix, description, tags beside ``study``."""


class RayMetrics:
    """A listener of a study's events that keeps Ray gauges up to date.

    It does nothing before the study has joined a cluster (event ``ray``), and a fault of the metrics is a warning,
    never the study's.

    Args:
        study: name of the study: the tag that every metric carries.
        earlier: summary of the study's earlier sessions, ``{}`` for a new one; keys as in `tune status --json`.
        warn: told once if metrics do not work.
    """

    def __init__(self, study: str, earlier: dict[str, Any], warn: Callable[[str], None]) -> None:
        self._study, self._warn = study, warn
        self._gauges: dict[str, Any] = {}
        self._broken = False
        self._budget = float(earlier.get("budget_device_s") or 0.0)
        self._settled = float(earlier.get("probe_device_s") or 0.0)
        self._pool: dict[str, float] = {}
        self._counts = dict.fromkeys(STATES, 0)
        self._kinds: dict[str, float] = {"probe": self._settled}
        self._running: dict[int, float] = {}
        self._queued: set[int] = set()
        self._best: dict[str, Any] | None = None
        self._baseline: float | None = None
        for trial in earlier.get("trials", ()):
            self._take(trial)

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind = event["event"]
        if kind == "session":
            self._budget = float(event["budget_device_s"])
        elif kind == "pool":
            refused = float(event["enumerated"] - event["feasible"])
            self._pool = {"feasible": float(event["feasible"]), "refused": refused}
        elif kind == "ray":
            self._start()
        elif kind in ("probe", "probe_failed"):
            self._settled += event["device_s"]
            self._kinds["probe"] = self._kinds.get("probe", 0.0) + event["device_s"]
        elif kind == "trial_queued":
            self._queued.add(event["number"])
        elif kind == "trial_placed":
            self._queued.discard(event["number"])
            self._running[event["number"]] = 0.0
        elif kind == "progress" and event["number"] in self._running:
            self._running[event["number"]] = event["device_s"]
        elif kind == "trial":
            self._queued.discard(event["number"])
            self._running.pop(event["number"], None)
            self._take(event)
        else:
            return
        self._show()

    def _take(self, trial: dict[str, Any]) -> None:
        self._settled += trial["device_s"]
        self._counts[trial["state"]] = self._counts.get(trial["state"], 0) + 1
        for kind, seconds in (trial.get("by_kind_s") or {"failed": trial["device_s"]}).items():
            self._kinds[kind] = self._kinds.get(kind, 0.0) + seconds
        if trial["state"] != "measured":
            return
        if trial.get("role") == "baseline":
            self._baseline = trial["step_time_s"]
        if trial.get("role") != "confirm" and (self._best is None or trial["step_time_s"] < self._best["step_time_s"]):
            self._best = trial

    def values(self) -> list[tuple[str, dict[str, str], float]]:
        """What the gauges show: name, tags, value."""
        found: list[tuple[str, dict[str, str], float]] = [
            ("budget_device_seconds", {}, self._budget),
            ("spent_device_seconds", {}, self._settled + sum(self._running.values())),
        ]
        counts = self._counts | {"queued": len(self._queued), "running": len(self._running)}
        found += [("trials", {"state": state}, float(count)) for state, count in counts.items()]
        found += [("kind_device_seconds", {"kind": kind}, seconds) for kind, seconds in self._kinds.items()]
        found += [("candidates", {"verdict": verdict}, count) for verdict, count in self._pool.items()]
        if self._best is not None:
            found.append(("best_step_seconds", {}, self._best["step_time_s"]))
            if self._best.get("mfu_pct") is not None:
                found.append(("best_mfu_percent", {}, self._best["mfu_pct"]))
        if self._baseline is not None:
            found.append(("baseline_step_seconds", {}, self._baseline))
        return found

    def _start(self) -> None:
        with self._harmless():
            from ray.util.metrics import Gauge

            self._gauges = {
                name: Gauge(PREFIX + name, description=text, tag_keys=("study", *tags))
                for name, (text, tags) in GAUGES.items()
            }

    def _show(self) -> None:
        if not self._gauges or self._broken:
            return
        with self._harmless():
            for name, tags, value in self.values():
                self._gauges[name].set(value, tags={"study": self._study, **tags})

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._broken = True
            self._warn(f"Ray metrics are off: {type(error).__name__}: {error}")

"""What a study's devices were doing, when: from the journal's times alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


PHASES = ("startup", "compile", "warmup", "measured", "stopped_early", "profile", "cleanup", "failed")
"""Kinds of a trial's spending in the order in which they happen."""


def timeline(events: Sequence[dict[str, Any]], num_devices: int, now_s: float | None = None) -> dict[str, Any]:
    """Spans of time by lane, in wall seconds since the study began; time between two sessions is cut out.

    A lane holds one gang at a time. The journal does not say which devices a gang held, so lanes are filled from the
    lowest free one up. A trial's span is divided by the kinds of its spending in the order of :data:`PHASES`; that
    order is the truth but for compilation, which happens inside the first steps.

    Args:
        events: the journal.
        num_devices: devices of the study, which its probe holds all.
        now_s: end of what still runs, Unix seconds; absent: the last event.

    Returns:
        ``lanes`` (a count), ``end_s``, ``spans`` (``lane``, ``start_s``, ``end_s``, ``kind``, ``number`` or None,
        ``devices``), ``sessions`` (starts of sessions), ``idle_s`` (lane-seconds without a gang).
    """
    spans: list[dict[str, Any]] = []
    running: dict[int, tuple[int, float, int]] = {}
    sessions: list[float] = []
    cut = last = 0.0
    for event in events:
        kind, at = event["event"], float(event["unix_s"])
        if kind == "session":
            # Whatever ran when the last session died ended, as far as anybody knows, with its last event.
            for number in list(running):
                _close(spans, running, number, last - cut, None)
            cut += at - last if sessions else at
            sessions.append(at - cut)
        elif kind == "trial_placed":
            taken = {lane for lane, _, _ in running.values()}
            lane = next(i for i in range(len(taken) + 1) if i not in taken)
            running[event["number"]] = (lane, at - cut, int(event.get("devices") or num_devices))
        elif kind == "trial":
            _close(spans, running, event["number"], at - cut, event)
        elif kind in ("probe", "probe_failed") and event.get("device_s"):
            start = max(0.0, at - cut - event["device_s"] / max(1, num_devices))
            spans.append(_span(0, start, at - cut, "probe", None, num_devices))
        last = at
    end = (max(last, now_s) if now_s is not None and running else last) - cut if sessions else 0.0
    for number, (lane, start, devices) in running.items():
        spans.append(_span(lane, start, end, "running", number, devices))
    spans.sort(key=lambda span: (span["start_s"], span["lane"]))
    lanes = 1 + max((span["lane"] for span in spans), default=-1)
    busy = sum(span["end_s"] - span["start_s"] for span in spans)
    return {
        "lanes": lanes,
        "end_s": round(end, 3),
        "spans": spans,
        "sessions": [round(start, 3) for start in sessions],
        "idle_s": round(max(0.0, lanes * end - busy), 3),
    }


def _close(
    spans: list[dict[str, Any]],
    running: dict[int, tuple[int, float, int]],
    number: int,
    end: float,
    trial: dict[str, Any] | None,
) -> None:
    """Add a trial's spans and free its lane; ``trial`` is its record, None when it was lost."""
    if number not in running:
        # It never held devices.
        return
    lane, start, devices = running.pop(number)
    wall = float((trial or {}).get("wall_s") or 0.0)
    # The record is written after the gang let go; what lies between holds no device.
    end = min(end, start + wall) if wall else end
    kinds = (trial or {}).get("by_kind_s") or {}
    total = sum(kinds.get(kind, 0.0) for kind in PHASES)
    if not total:
        spans.append(_span(lane, start, end, "failed", number, devices))
        return
    at = start
    for kind in PHASES:
        seconds = (end - start) * kinds.get(kind, 0.0) / total
        if seconds > 0:
            spans.append(_span(lane, at, at + seconds, kind, number, devices))
        at += seconds


def _span(lane: int, start: float, end: float, kind: str, number: int | None, devices: int) -> dict[str, Any]:
    return {
        "lane": lane,
        "start_s": round(start, 3),
        "end_s": round(max(start, end), 3),
        "kind": kind,
        "number": number,
        "devices": devices,
    }

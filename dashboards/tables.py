"""Tables and lines that several verbs print."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tuner.records.layout import StudyFolder
from tuner.records.summary import Summary
from tuner.records.units import format_budget


NOISY_PCT = 20.0
"""Noise floor from which the report says that the machine was not quiet, percent."""


def outcome_text(trial: dict[str, Any]) -> str:
    """One line on how a trial ended."""
    if trial["state"] == "measured":
        low, high = trial["step_time_ci_s"]
        flags = f" · {', '.join(trial['flags'])}" if trial.get("flags") else ""
        return (
            f"measured: {trial['step_time_s']:.4g} s a step [{low:.4g}, {high:.4g}] · MFU {trial['mfu_pct']:.1f}% · "
            f"{trial['peak_reserved_gib']:.2f} GiB · {trial['device_s']:.0f} device-seconds{flags}"
        )
    failure = trial["failure"]
    if failure["class"] == "cannot_win":
        return f"stopped: {failure['text']} · {trial['device_s']:.0f} device-seconds"
    rank = f" on rank {failure['rank']}" if failure.get("rank") is not None else ""
    first = failure["text"].splitlines()[0][:160] if failure["text"] else ""
    advice = f" · {failure['advice']}" if failure.get("advice") and trial["state"] == "failed" else ""
    return f"{trial['state']}: {failure['class']}{rank}: {first} · {trial['device_s']:.0f} device-seconds{advice}"


def figures(comparison: dict[str, Any]) -> str:
    """A comparison with the baseline as text."""
    low, high = comparison["step_time_change_ci_pct"]
    words = "significant" if comparison["significant"] else "within noise"
    return (
        f"step time {comparison['step_time_change_pct']:+.1f}% [{low:+.1f}, {high:+.1f}], "
        f"MFU {comparison['mfu_points']:+.1f} points, {words}"
    )


def trial_table(trials: list[dict[str, Any]], running: dict[int, dict[str, Any]], winner: int | None = None) -> Table:
    """All trials, finished and running; the best is marked."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("#", "right"),
        ("state", "left"),
        ("candidate", "left"),
        ("MFU %", "right"),
        ("step s", "right"),
        ("95% interval", "left"),
        ("predicted", "right"),
        ("GiB", "right"),
        ("device-s", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    measured = [trial for trial in trials if trial["state"] == "measured"]
    best = min(measured, key=lambda trial: trial["step_time_s"], default=None)
    for trial in trials:
        role = trial.get("role", "search")
        mark = "winner" if trial["number"] == winner else "best" if trial is best and winner is None else ""
        marks = " ".join(filter(None, [role if role != "search" else "", mark]))
        style = "bold green" if mark else "red" if trial["state"] == "failed" else None
        if trial["state"] == "measured":
            low, high = trial["step_time_ci_s"]
            cells = [
                f"{trial['mfu_pct']:.1f}",
                f"{trial['step_time_s']:.4g}",
                f"{low:.4g}–{high:.4g}",
                f"{trial['predicted']['step_time_s']:.3g}",
                f"{trial['peak_reserved_gib']:.2f}",
            ]
        else:
            cells = ["", "", trial["failure"]["class"] if trial.get("failure") else "", "", ""]
        label = trial.get("label", "")
        table.add_row(
            str(trial["number"]), trial["state"], label, *cells, f"{trial['device_s']:.0f}", marks, style=style
        )
    for number, trial in sorted(running.items()):
        phase = trial.get("phase", "starting")
        step = f"{trial['step_time_s']:.4g}" if "step_time_s" in trial else ""
        what = f"{phase} {trial['step']}" if "step" in trial else phase
        spent = f"{trial.get('device_s', 0):.0f}"
        table.add_row(str(number), "running", trial.get("label", ""), "", step, what, "", "", spent, "", style="cyan")
    return table


def parts_table(trial: dict[str, Any], width: int = 40) -> Table:
    """Where a trial's traced step went: a waterfall from useful to measured, mean over its ranks.

    Each bar begins where the one above ends, so the last one ends at the step.
    """
    found = trial["breakdown"]
    step = found["step_s"]
    rows = {"useful": found["useful_s"], **found["parts_s"], "unexplained": found["unexplained_s"]}
    title = f"where a traced step of trial {trial['number']} went ({trial['label']})"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("% of step", justify="right")
    table.add_column("")
    done = 0.0
    for name, seconds in rows.items():
        start, end = (round(width * share / step) for share in (done, done + seconds))
        bar = " " * start + "█" * max(end - start, 1 if seconds > 0 else 0)
        table.add_row(name.replace("_", " "), f"{seconds:.4f}", f"{100 * seconds / step:.1f}", bar)
        done += seconds
    table.add_row("step", f"{step:.4f}", "100.0", "█" * width, style="bold")
    return table


def spending_tables(document: dict[str, Any]) -> list[Table | str]:
    """The account of `tune budget`: a headline, spending by kind and by trial, and what was saved."""
    spent, budget = document["spent_device_s"], document["budget_device_s"]
    headline = (
        f"{document['measured_share_pct']:.0f}% of what was spent went into measured steps · "
        f"{format_budget(spent)} of {format_budget(budget)} spent"
    )
    kinds = Table(box=None, pad_edge=False, header_style="bold")
    kinds.add_column("kind")
    for name in ("device-s", "% of spent"):
        kinds.add_column(name, justify="right")
    for kind, seconds in document["by_kind_s"].items():
        kinds.add_row(kind.replace("_", " "), f"{seconds:.1f}", f"{100 * seconds / spent:.1f}" if spent else "")
    kinds.add_row("sum", f"{spent:.1f}", "100.0" if spent else "", style="bold")
    # The probe is the study's, no trial's.
    charged = [trial["by_kind_s"] for trial in document["trials"]]
    shown = [kind for kind in document["by_kind_s"] if any(kinds_s.get(kind) for kinds_s in charged)]
    trials = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("#", "state", "candidate", "device-s", *(kind.replace("_", " ") for kind in shown)):
        trials.add_column(name, justify="left" if name in ("state", "candidate") else "right")
    for trial in document["trials"]:
        cells = [f"{trial['by_kind_s'].get(kind, 0.0):.1f}" for kind in shown]
        trials.add_row(str(trial["number"]), trial["state"], trial["label"], f"{trial['device_s']:.1f}", *cells)
    lines: list[Table | str] = [headline, "", kinds, "", trials, ""]
    if document["saved_device_s"]:
        lines.append(f"stopping losers early saved {format_budget(document['saved_device_s'])}")
    phases = document.get("startup_median_s")
    if phases:
        words = {"imported": "imports", "built": "building", "training": "data", "first_step": "first step"}
        parts = ", ".join(f"{words[name]} {seconds:.1f} s" for name, seconds in phases.items())
        cache = document["compile_cache"]
        found = (
            f"; compile cache: {cache['hits']} graphs found, {cache['misses']} compiled" if any(cache.values()) else ""
        )
        lines.append(f"a trial's start, median: {parts}{found}")
    lines.append(f"no trial held devices for {document['idle_wall_s']:.0f} s of wall time (not charged)")
    if document["ended"]:
        lines.append(f"ended: {document['ended']}; {format_budget(max(0.0, document['left_device_s']))} given back")
    return lines


def changes_table(changes: list[dict[str, Any]]) -> Table:
    """What each change from the baseline bought."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="what each change bought", title_justify="left")
    for name in ("change", "step time", "95% interval", "how known", ""):
        table.add_column(name)
    for change in changes:
        knobs = ", ".join(f"{knob} {old} → {new}" for knob, (old, new) in change["knobs"].items())
        effect, interval = change["step_time_change_pct"], change["interval_pct"]
        table.add_row(
            knobs,
            "" if effect is None else f"{effect:+.1f}%",
            f"{interval[0]:+.1f} to {interval[1]:+.1f}" if interval else "",
            change["source"].replace("_", " "),
            "left out" if not change["kept"] else "" if change.get("sure", True) else "undecided",
        )
    return table


def print_summary(console: Console, summary: Summary, folder: StudyFolder) -> None:
    """Trials, budget, winner, commit; where nothing was feasible the reasons and the nearest candidates."""
    console.print()
    if summary.trials or summary.running:
        console.print(trial_table(summary.trials, summary.running, summary.winner))
        console.print()
    counts = summary.counts
    if counts and not counts["feasible"]:
        print_infeasible(console, summary, folder)
    console.print(
        f"budget: {format_budget(summary.spent_device_s)} spent of {format_budget(summary.budget_device_s)} · "
        f"{sum(trial['state'] == 'measured' for trial in summary.trials)} measured, "
        f"{sum(trial['state'] == 'failed' for trial in summary.trials)} failed"
        + _stopped(summary)
        + (f" · ended: {summary.ended}" if summary.ended else f" · {summary.state}")
        + (f"; {format_budget(summary.given_back_device_s)} given back" if summary.given_back_device_s else ""),
        markup=False,
    )
    if summary.winner is not None and summary.comparison is not None:
        label = next(trial["label"] for trial in summary.trials if trial["number"] == summary.winner)
        kept = " (the baseline)" if summary.winner == summary.baseline else ""
        console.print(
            f"winner: trial {summary.winner}{kept} {label} · best measured against the baseline: ", end="", markup=False
        )
        console.print(figures(summary.comparison), markup=False)
        if summary.evidence.get("why"):
            console.print(f"why: {summary.evidence['why']}", markup=False)
        parity = summary.evidence.get("parity")
        if parity:
            console.print(f"loss: {parity['verdict']}: {parity['why']}", markup=False)
        noise = summary.evidence.get("noise")
        if noise:
            text = f"noise: two runs of one configuration differ by up to {noise['floor_pct']:.1f}%"
            floors = [one["floor_pct"] for one in noise["by_node"].values()]
            spread = f"; {min(floors):.1f} to {max(floors):.1f}% by node" if floors else ""
            repeats = f"{noise['repeats']} repeat{'s' * (noise['repeats'] != 1)}"
            console.print(f"{text} ({repeats}){spread}", markup=False)
            if noise["floor_pct"] > NOISY_PCT:
                console.print(
                    "  that is much: something else may have used this machine, and the figures above are as rough; "
                    "a quieter hour tells more",
                    markup=False,
                )
        if summary.evidence.get("changes"):
            console.print()
            console.print(changes_table(summary.evidence["changes"]))
            console.print()
    if summary.commit is not None:
        commit = summary.commit
        console.print(f"commit: {commit['hash']} on branch {commit['branch']} of {commit['repo']}", markup=False)
        console.print(f"  git -C {commit['repo']} show {commit['branch']}", markup=False)
    if summary.winner is not None:
        pages = f"tune serve {summary.study} · tune ui {summary.study}"
        console.print(f"more: tune report {summary.study} (--html FILE for a page) · {pages}", markup=False)


def _stopped(summary: Summary) -> str:
    losers = [trial for trial in summary.trials if (trial.get("failure") or {}).get("class") == "cannot_win"]
    saved = sum(trial.get("saved_device_s") or 0.0 for trial in losers)
    return f", {len(losers)} stopped early (saved {format_budget(saved)})" if losers else ""


def print_infeasible(console: Console, summary: Summary, folder: StudyFolder) -> None:
    """Grouped reasons and the refused candidates nearest to feasible."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="no candidate is feasible", title_justify="left")
    table.add_column("reason")
    table.add_column("refused", justify="right")
    table.add_column("example")
    for group in summary.counts["rejected"]:
        table.add_row(group["code"], str(group["count"]), group["example"])
    console.print(table)
    for miss in summary.near_misses:
        console.print(f"nearest: {miss['label']}", markup=False)
        for reason in miss["reasons"]:
            console.print(f"  {reason['text']}", markup=False)
    if folder.rejected.exists():
        lines = sum(1 for _ in folder.rejected.open())
        console.print(f"all reasons: {folder.rejected} ({lines} candidates)", markup=False)

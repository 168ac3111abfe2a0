"""Journals of studies that never ran, of any size: the records' keys, with figures from a formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from tuner.records.layout import StudyFolder


DEVICES = 8
NASTY = '<script>alert(1)</script> & "quoted" </script><img src=x onerror=alert(2)> \u2028 {{STYLE}}'
"""Text that would break a page which trusts its records."""

FACTS: dict[str, Any] = {
    "model": "llama3_8b",
    "function": "torchtitan.models.llama3.config_registry:llama3_8b",
    "device": "gpu",
    "hardware": "H100-SXM",
    "num_devices": DEVICES,
    "peak_flops": 9.89e14,
    "seq_len": 8192,
    "global_batch_seqs": 64,
    "precision": "bf16",
    "steps": 100,
    "rehearsal": False,
    "warmup_steps": 10,
    "versions": {"python": "3.11.7", "torch": "2.14.1", "torchtitan": "0.3.0"},
    "git_head": None,
}
PARTS = (
    "bubble",
    "exposed_communication",
    "recompute",
    "data_wait",
    "kernel_efficiency",
    "cpu_launch",
    "straggler",
)


def candidates(count: int) -> list[Candidate]:
    """Different candidates on :data:`DEVICES` devices."""
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            if tp * pp > DEVICES:
                continue
            for b in (1, 2, 4, 8):
                for ac in ("none", "selective", "full"):
                    for bucket in (1, 2, 4):
                        for prefetch in (0, 1, 2):
                            found.append(
                                Candidate(
                                    tensor_parallel=tp,
                                    pipeline_parallel=pp,
                                    data_parallel_shard=DEVICES // (tp * pp),
                                    micro_batch=b,
                                    activation_checkpoint=ac,
                                    fsdp_bucket=bucket,
                                    forward_prefetch=prefetch,
                                )
                            )
    order = np.random.default_rng(1).permutation(len(found))
    # More than there are differ in a knob that nobody looks at closely.
    rounds = -(-count // len(found))
    return [
        Candidate.from_json(found[i].to_json() | {"loss_chunks": 8 << turn}) for turn in range(rounds) for i in order
    ][:count]


def events(
    trials: int,
    *,
    end: str | None = "done",
    winner: bool = True,
    running: int = 0,
    fail_share: float = 0.15,
    start_unix_s: float = 1.8e9,
) -> list[dict[str, Any]]:
    """Events of a study.

    Args:
        trials: finished trials.
        end: state of its ``study_end``; None: none was written.
        winner: whether a winner was chosen.
        running: trials placed and not ended.
        fail_share: share of trials that fail, and again of those that are stopped.
        start_unix_s: when it began.
    """
    rng, now = np.random.default_rng(0), start_unix_s
    chosen = candidates(trials + running)
    lines: list[dict[str, Any]] = [
        {"event": "session", "unix_s": now, "study": "s", "budget_device_s": 4e5, "notes": ["a note"]},
        {
            "event": "pool",
            "unix_s": now + 1,
            "enumerated": 2000,
            "feasible": 1500,
            "rejected": [{"code": "memory", "count": 300, "example": "tp1"}],
        },
        {"event": "probe", "unix_s": now + 20, "device_s": 8.0 * 15, "suspects": []},
    ]
    now += 21
    best: dict[str, Any] | None = None
    for number, candidate in enumerate(chosen):
        step = float(2.0 + 1.5 * rng.random() + 0.3 * (candidate.activation_checkpoint == "full"))
        predicted = step * float(np.exp(0.1 * rng.normal()))
        ideal = 1.2
        guess = {
            "step_time_s": predicted,
            "step_time_interval_s": [0.85 * predicted, 1.2 * predicted],
            "mfu_pct": 100 * ideal / predicted,
            "memory_gib": float(20 + 50 * rng.random()),
        }
        facts = {"number": number, "candidate": candidate.to_json(), "label": candidate.label()}
        role = "search" if number else "baseline"
        placed = {"devices": DEVICES, "allowance_device_s": 900.0, "predicted": guess, "move": None}
        lines.append({"event": "trial_placed", "unix_s": round(now, 3), "role": role, **facts, **placed})
        if number >= trials:
            beat = {number: 16.0 for number in range(trials, number + 1)}
            lines.append({"event": "heartbeat", "unix_s": round(now + 2, 3), "running": beat})
            now += 2
            continue
        wall = 30 + 20 * float(rng.random())
        now += wall
        draw = float(rng.random()) if number else 1.0
        state = "failed" if draw < fail_share else "stopped" if draw < 2 * fail_share else "measured"
        record: dict[str, Any] = {
            **facts,
            "role": role,
            "state": state,
            "device_s": round(DEVICES * wall, 3),
            "wall_s": round(wall, 3),
            "predicted": guess,
            "folder": "",
            "failure": None,
            "flags": [],
        }
        if state == "failed":
            record["failure"] = {"class": "out_of_memory", "rank": 3, "text": f"CUDA out of memory {NASTY}"}
            record["by_kind_s"] = {"failed": record["device_s"]}
            record |= dict.fromkeys(("step_time_s", "step_time_ci_s", "mfu_pct", "hfu_pct", "peak_reserved_gib"))
        else:
            shares = {"startup": 0.5, "compile": 0.1, "warmup": 0.1, "measured": 0.25, "cleanup": 0.05}
            losses = dict(zip(PARTS, np.array([3, 4, 2, 0.2, 5, 1, 0.5]) * (step - ideal) / 16))
            record |= {
                "by_kind_s": {kind: share * record["device_s"] for kind, share in shares.items()},
                "step_time_s": step,
                "step_time_ci_s": [0.99 * step, 1.01 * step],
                "tokens_per_s_per_device": 8192 * 8 / step,
                "mfu_pct": 100 * ideal / step,
                "hfu_pct": 105 * ideal / step,
                "peak_reserved_gib": guess["memory_gib"] * 1.03,
                "breakdown": {
                    "step_s": step,
                    "useful_s": ideal,
                    "parts_s": {name: float(seconds) for name, seconds in losses.items()},
                    "unexplained_s": step - ideal - float(sum(losses.values())),
                    "warnings": [],
                },
            }
        if state == "stopped":
            record["failure"] = {"class": "cannot_win", "rank": None, "text": "cannot win: too slow"}
        if state == "measured" and (best is None or step < best["step_time_s"]):
            best = record
        lines.append({"event": "trial", "unix_s": round(now, 3), **record})
        now += 1.5
    if winner and best is not None:
        first = next(line for line in lines if line["event"] == "trial")
        change = 100 * (best["step_time_s"] / first["step_time_s"] - 1)
        comparison = {
            "step_time_change_pct": change,
            "step_time_change_ci_pct": [change - 1, change + 1],
            "mfu_points": best["mfu_pct"] - first["mfu_pct"],
            "runs": [1, 1],
            "significant": True,
        }
        lines.append({"event": "winner", "unix_s": now, "number": best["number"], "comparison": comparison})
        where = {"repo": "/repo", "branch": "tune/s", "hash": "0123456789abcdef"}
        lines.append({"event": "commit", "unix_s": now, **where})
    if end is not None:
        lines.append({"event": "study_end", "unix_s": now + 1, "state": end, "reason": "budget: nothing more fits"})
    return lines


def rejected(count: int) -> list[dict[str, Any]]:
    """Lines of ``rejected.jsonl``."""
    rng = np.random.default_rng(2)
    rows = []
    for candidate in candidates(count + 1100)[1100:]:
        needed = float(85 + 60 * rng.random())
        reason = {"code": "memory", "required": needed, "available": 79.0, "unit": "GiB"}
        rows.append(
            {
                "candidate": candidate.to_json(),
                "label": candidate.label(),
                "reasons": [reason | {"text": f"needs {needed:.1f} GiB on pipeline rank 0, 79.0 GiB allowed"}],
                "predicted": {"mfu_pct": float(30 + 25 * rng.random()), "memory_gib": needed},
            }
        )
    return rows


def write_study(root: Path, lines: list[dict[str, Any]], refused: int = 0) -> StudyFolder:
    """A study's folder with these events."""
    folder = StudyFolder(root)
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.facts.write_text(json.dumps({"study": folder.name, **FACTS}))
    folder.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if refused:
        folder.rejected.write_text("".join(json.dumps(row) + "\n" for row in rejected(refused)))
    return folder

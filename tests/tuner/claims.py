"""A claim to test with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_space.candidate import Candidate
from tuner.evidence.claim import Claim
from tuner.evidence.claim import Side
from tuner.evidence.noise import Noise


def side(candidate: Candidate, step_time_s: float, runs: int = 2) -> Side:
    """A configuration measured in ``runs`` equal runs."""
    return Side(
        candidate=candidate.to_json(),
        label=candidate.label(),
        trials=tuple(range(runs)),
        run_medians_s=(step_time_s,) * runs,
        step_time_s=step_time_s,
        step_time_ci_s=(0.98 * step_time_s, 1.02 * step_time_s),
        repeat_s=(0.95 * step_time_s, 1.05 * step_time_s),
        step_time_p95_s=1.1 * step_time_s,
        tokens_per_s_per_device=100 / step_time_s,
        mfu_pct=40 / step_time_s,
        mfu_ci_pct=(39 / step_time_s, 41 / step_time_s),
        peak_reserved_gib=10.0,
        device_s=50.0,
        traces=("s/trials/0001/rank0.trace.json.gz",),
    )


def make_claim(**changes: Any) -> Claim:
    """A claim of a micro-batch of 4 that bought 20%."""
    claim = Claim(
        study="s",
        date="2026-11-29",
        function="m.n:f",
        name="f_cpu_2x",
        hardware="cpu",
        num_devices=2,
        seq_len=64,
        global_batch_seqs=8,
        precision="fp32",
        peak_flops=1e12,
        ideal_s=0.4,
        data="synthetic",
        versions={"torch": "2.14.1"},
        git_head=None,
        job={"model": {"torchtitan": "m.n:f"}},
        module="\nfrom m.n import f as base\n\n\ndef f_cpu_2x():\n    return base()\n",
        before=side(Candidate(data_parallel_shard=2), 1.0),
        after=side(Candidate(data_parallel_shard=2, micro_batch=4), 0.8),
        comparison={
            "step_time_change_pct": -20.0,
            "step_time_change_ci_pct": (-22.0, -18.0),
            "mfu_points": 10.0,
            "significant": True,
        },
        parity={"verdict": "agree", "why": "largest gap 0.1%", "numeric_changes": ()},
        noise=Noise(sd=0.01, dof=4.0, repeats=2).to_json(),
        changes=(
            {
                "knobs": {"micro_batch": [1, 4]},
                "step_time_change_pct": -20.0,
                "interval_pct": [-22.0, -18.0],
                "source": "measured",
                "kept": True,
            },
        ),
        why="fastest measured, significant",
    )
    return replace(claim, **changes)

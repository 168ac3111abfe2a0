"""Runs a smaller trial on this machine and says what it means at full scale."""

from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path
import tempfile
import time
from typing import Any

from pruning.smaller import correction
from pruning.smaller import CorrectionError
from pruning.smaller import Smaller
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.setting import Setting
from trial_runner.failure import find_failure
from trial_runner.gang import free_port
from trial_runner.gang import NodeShare
from trial_runner.measure import measure
from trial_runner.measure import Measurement
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render
from trial_runner.spec import TrialSpec
from tuner.study.plan import StudyPlan


POLL_S = 0.2


def run_here(plan: StudyPlan, candidate: Candidate, setting: Setting, steps: int, timeout_s: float) -> Measurement:
    """One trial of a candidate on this machine's devices, without a cluster.

    Raises:
        UserError: it failed, or the candidate cannot be written as a config function.
    """
    recipe = Recipe(seq_len=setting.seq_len, global_batch_seqs=setting.global_batch_seqs, precision=setting.precision)
    base = replace(plan.base, shape=setting.shape)
    world = candidate.num_devices
    with tempfile.TemporaryDirectory(prefix="tune-smaller-") as scratch:
        folder = Path(scratch)
        text = render(candidate, base, recipe, function="smaller", header="smaller trial")
        layers = setting.shape.layers
        if layers < plan.base.shape.layers:
            cut = f"    config.model_spec.model.layers = config.model_spec.model.layers[:{layers}]\n"
            text = text.replace("    # recipe: fixed", cut + "    # recipe: fixed")
        (folder / "smaller.py").write_text(text)
        spec = TrialSpec(
            study="smaller",
            trial=0,
            folder=scratch,
            config_file=str(folder / "smaller.py"),
            config_function="smaller",
            world_size=world,
            device=plan.device,
            warmup_steps=plan.job.measure.warmup_steps,
            steps=steps,
            trace=False,
            seed=plan.job.recipe.seed,
            data=plan.job.recipe.data,
            user_path=plan.base.user_path,
            workdir=plan.workdir,
            threads=plan.threads,
        )
        devices = [str(i) for i in range(world)] if plan.device == "gpu" else None
        gang = NodeShare(
            spec,
            ranks=list(range(world)),
            node=0,
            master=("127.0.0.1", free_port()),
            deadline_s=timeout_s,
            devices=devices,
        )
        try:
            while gang.poll().ended is None:
                time.sleep(POLL_S)
        finally:
            state = gang.stop()
        if state.ended == "done":
            found = measure(
                folder,
                world_size=world,
                tokens_per_step=setting.tokens_per_step,
                ideal_s=setting.ideal_s,
                recompute_flop_share=0.0,
                min_steps=steps,
            )
            if found is not None:
                return found
        failure = find_failure(folder, world, state.ended or "failed", state.exit_codes, state.exit_unix_s)
        raise UserError(f"smaller trial of {candidate.label()} failed ({failure.kind}): {failure.text}")


def read_history(path: Path | None) -> list[tuple[float, float]]:
    """Earlier (corrected, full) pairs, seconds."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [(row["corrected_s"], row["full_s"]) for row in rows if row.get("full_s")]


def judge(smaller: Smaller, measured: Measurement, history: list[tuple[float, float]]) -> dict[str, Any]:
    """What a smaller trial says about full scale."""
    factor = correction(smaller)
    corrected = measured.step_time_s * factor
    error = CorrectionError.learn(history)
    step, interval = error.full_step(corrected)
    return {
        "smaller": True,
        "candidate": smaller.full.to_json(),
        "label": smaller.full.label(),
        "ran": smaller.candidate.to_json(),
        "ran_label": smaller.candidate.label(),
        "ran_devices": smaller.setting.num_devices,
        "ran_layers": smaller.setting.shape.layers,
        "full_devices": smaller.full_setting.num_devices,
        "full_layers": smaller.full_setting.shape.layers,
        "ran_step_time_s": measured.step_time_s,
        "correction": factor,
        "corrected_s": corrected,
        "step_time_s": step,
        "step_time_interval_s": interval,
        "correction_error": {"bias": error.bias, "log_sigma": error.sigma, "pairs": error.pairs},
    }

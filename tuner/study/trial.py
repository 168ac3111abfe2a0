"""One trial: a candidate on a placed gang, from the config file to measured facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

from pruning.racing import stand
from pruning.racing import Standing
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.flop import flop_per_token
from search_space.flop import recompute_flop_per_token
from search_space.hardware import GIB
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import PARTS
from trial_runner.breakdown.ideal import ideal_by_rank
from trial_runner.clocks import read_clocks
from trial_runner.failure import Failure
from trial_runner.failure import find_failure
from trial_runner.failure import log_tail
from trial_runner.gang import KILL_GRACE_S
from trial_runner.measure import measure
from trial_runner.measure import Measurement
from trial_runner.measure import phases
from trial_runner.measure import read_records
from trial_runner.measure import StepWatch
from trial_runner.recipe.config_file import function_name
from trial_runner.recipe.config_file import render
from trial_runner.spec import node_clocks
from trial_runner.spec import rank_steps
from trial_runner.spec import rank_trace
from trial_runner.spec import TrialSpec
from tuner.cluster.placed_gang import GangEnd
from tuner.cluster.placed_gang import GangShape
from tuner.cluster.placed_gang import PlacedGang
from tuner.cluster.session import ClusterSession
from tuner.records.layout import StudyFolder
from tuner.records.spending import split
from tuner.repository import head_of
from tuner.study.costs import TRACE_STEPS
from tuner.study.deciding import CANNOT_WIN
from tuner.study.moves import hopeless_part
from tuner.study.plan import StudyPlan
from tuner.study.plan import versions


PLACEMENT_TIMEOUT_S = 120.0
"""Longest wait for devices before the trial is given up, seconds; waiting is not charged."""

LOOK_S = 1.0
"""Between looks at a running trial's steps, seconds."""


class TrialRun:
    """One running trial.

    Args:
        plan: the study's plan.
        folder: the study's folder.
        number: trial number.
        role: ``baseline``, ``search`` or ``confirm``.
        candidate: the knobs.
    """

    def __init__(self, plan: StudyPlan, folder: StudyFolder, number: int, role: str, candidate: Candidate) -> None:
        self.plan, self.number, self.role, self.candidate = plan, number, role, candidate
        self.folder = folder.trial(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._study = folder.name
        self._gang: PlacedGang | None = None
        self.allowance_s = 0.0
        self.move: dict[str, Any] | None = None
        """The diagnosis that spoke for the candidate."""
        self.early: Standing | None = None
        """Why the trial was ended before its last step; None: it was not."""
        self._watch = StepWatch(self.folder, candidate.num_devices)
        self._looked, self._seen = 0.0, 0
        self._placed_unix = 0.0

    def place(
        self, session: ClusterSession, shape: GangShape, allowance_s: float, interrupted: Callable[[], bool]
    ) -> bool:
        """Reserve the gang's devices and start its ranks.

        Args:
            session: the cluster.
            shape: nodes, ranks, devices held.
            allowance_s: wall seconds from placement after which the trial is killed.
            interrupted: asked while waiting for devices.

        Returns:
            Whether the devices were had.

        Raises:
            UserError: the candidate cannot be written as a config function.
        """
        spec = self._write_order(shape)
        self._gang = PlacedGang(session, shape, spec, self.name)
        self.allowance_s = allowance_s
        if not self._gang.wait_placed(PLACEMENT_TIMEOUT_S, interrupted):
            return False
        self._placed_unix = time.time()
        self._gang.start(max(1.0, allowance_s - KILL_GRACE_S))
        return True

    @property
    def name(self) -> str:
        """Name in the Ray dashboard and in MLflow."""
        return f"{self._study} trial {self.number}: {self.candidate.label()}"

    @property
    def device_s(self) -> float:
        """Device-seconds charged so far."""
        return self._gang.device_s if self._gang is not None else 0.0

    @property
    def wall_s(self) -> float:
        """Wall seconds since placement."""
        return self._gang.wall_s if self._gang is not None else 0.0

    def _write_order(self, shape: GangShape) -> TrialSpec:
        plan, measure_section = self.plan, self.plan.job.measure
        name = function_name(plan.base, f"trial{self.number}")
        config_file = self.folder / f"{plan.base.function}_trial{self.number}.py"
        header = (
            f"{plan.base.module}:{plan.base.function} with {self.candidate.label()}\n\n"
            f"study: {self._study}\ntrial: {self.number}\n"
            f"versions: {', '.join(f'{k} {v}' for k, v in versions().items())}"
        )
        config_file.write_text(render(self.candidate, plan.base, plan.recipe, function=name, header=header))
        env = dict(plan.job.env.get(self.candidate.env, {})) if self.candidate.env != "default" else {}
        spec = TrialSpec(
            study=self._study,
            trial=self.number,
            folder=str(self.folder),
            config_file=str(config_file),
            config_function=name,
            world_size=shape.world_size,
            device=plan.device,
            warmup_steps=measure_section.warmup_steps,
            steps=measure_section.steps,
            trace=measure_section.trace,
            seed=plan.job.recipe.seed,
            data=plan.job.recipe.data,
            user_path=plan.base.user_path,
            workdir=plan.workdir,
            threads=plan.threads,
            env=env,
            header={
                "argv": sys.argv,
                "versions": versions(),
                "candidate": self.candidate.to_json(),
                "git_head": head_of(Path(plan.base.user_path)) if plan.base.user_path else None,
            },
        )
        spec.write(self.folder / "order.json")
        return spec

    def poll(self) -> GangEnd | None:
        """The gang's end, or None while it runs. An agent that does not enforce the deadline is overruled."""
        assert self._gang is not None
        end = self._gang.poll()
        if end is None and self.wall_s > self.allowance_s - KILL_GRACE_S / 2:
            return GangEnd("timeout")
        return end

    def race(self, incumbent_high_s: float | None) -> bool:
        """Whether the trial may end now: it cannot win any more, or its interval is as tight as the job asks.

        Args:
            incumbent_high_s: upper end of the best step time's interval; None: nothing to lose against.
        """
        # Large gangs write many files, often over a network: look less often.
        if time.monotonic() - self._looked < LOOK_S * max(1.0, self.candidate.num_devices / 64):
            return False
        self._looked = time.monotonic()
        measure_section = self.plan.job.measure
        times = self._watch.times()
        if len(times) <= self._seen or len(times) >= measure_section.steps:
            return False
        self._seen = len(times)
        found = stand(times, incumbent_high_s, measure_section.stop_confidence, measure_section.tight_pct)
        if found.lost or found.tight:
            self.early = found
        return self.early is not None

    def progress(self) -> dict[str, Any]:
        """The last step that rank 0 recorded: its number, phase and step time."""
        path = rank_steps(self.folder, 0)
        if not path.exists():
            return {"phase": "starting"}
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 2000))
            lines = file.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            try:
                facts = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "step" in facts:
                return {key: facts[key] for key in ("step", "phase", "step_time_s")}
            return {"phase": facts["event"]}
        return {"phase": "starting"}

    def release(self) -> None:
        """Stop what runs and give the devices back."""
        if self._gang is not None:
            self._gang.release()

    def result(self, end: GangEnd) -> Measurement | Failure:
        """What came of the trial, after its gang ended."""
        setting, job = self.plan.setting, self.plan.job
        world = self.candidate.num_devices
        if end.ended == "done" or self.early is not None:
            found = measure(
                self.folder,
                world_size=world,
                tokens_per_step=setting.tokens_per_step,
                ideal_s=setting.ideal_s,
                recompute_flop_share=recompute_share(self.candidate, self.plan),
                min_steps=job.measure.steps if self.early is None else 1,
            )
            if found is not None:
                return found
            text = "every rank left with success, but steps are missing from the records"
            return Failure(kind="unknown", rank=None, text=text, log_tail=log_tail(self.folder, 0))
        if end.ended == "node_lost":
            return Failure(kind="node_lost", rank=None, text="a node of the gang stopped answering")
        return find_failure(self.folder, world, end.ended, end.exit_codes, end.exit_unix_s)

    def record(self, outcome: Measurement | Failure, predicted: dict[str, object]) -> dict[str, Any]:
        """The trial as its record, with the keys of the command-line contract."""
        facts: dict[str, Any] = {
            "number": self.number,
            "role": self.role,
            "state": "measured",
            "candidate": self.candidate.to_json(),
            "label": self.candidate.label(),
            "step_time_s": None,
            "step_time_ci_s": None,
            "tokens_per_s_per_device": None,
            "mfu_pct": None,
            "hfu_pct": None,
            "peak_reserved_gib": None,
            "device_s": round(self.device_s, 3),
            "wall_s": round(self.wall_s, 3),
            "predicted": predicted,
            "traces": [str(p) for r in range(self.candidate.num_devices) if (p := rank_trace(self.folder, r)).exists()],
            "folder": str(self.folder),
            "failure": None,
            "saved_device_s": 0.0,
            "move": self.move,
        }
        if isinstance(outcome, Failure):
            stopped = outcome.kind in ("stopped", "interrupted")
            facts |= {"state": "stopped" if stopped else "failed", "failure": outcome.to_json()}
            return facts | {"by_kind_s": split(facts["device_s"], facts["wall_s"], "failed")}
        measured = asdict(outcome)
        if self.early is not None:
            facts |= self._ended_early(self.early, facts)
        broken_down = self._breakdown(facts["traces"], outcome.step_time_s)
        return (
            facts
            | {"by_kind_s": self._by_kind(facts), "hopeless_part": hopeless_part(broken_down)}
            | read_records(self.folder, self.candidate.num_devices).prepared
            | broken_down
            | {
                "steps": outcome.steps,
                "step_time_s": outcome.step_time_s,
                "step_time_ci_s": list(outcome.step_time_ci_s),
                "step_time_p95_s": outcome.step_time_p95_s,
                "tokens_per_s_per_device": outcome.tokens_per_s_per_device,
                "mfu_pct": outcome.mfu_pct,
                "hfu_pct": outcome.hfu_pct,
                "peak_allocated_gib": outcome.peak_allocated_bytes / GIB,
                "peak_reserved_gib": outcome.peak_reserved_bytes / GIB,
                "loss_first": outcome.loss[0] if outcome.loss else None,
                "loss_last": outcome.loss[-1] if outcome.loss else None,
                "startup_s": measured["startup_s"],
                "flags": [*outcome.flags, *self._throttled()],
                "gc_pct": outcome.gc_pct,
            }
        )

    def _throttled(self) -> list[str]:
        """``throttled`` where a device of the first node ran below its clocks for a reason other than idling."""
        path = node_clocks(self.folder, 0)
        try:
            samples = read_clocks(path) if path.exists() else []
        except UserError:
            return []
        return ["throttled"] if any(sample.throttle for sample in samples) else []

    def _ended_early(self, standing: Standing, facts: dict[str, Any]) -> dict[str, Any]:
        """State, reason and saved device-seconds of a trial that was ended before its last step."""
        measure_section = self.plan.job.measure
        left = measure_section.steps - standing.steps + (TRACE_STEPS if measure_section.trace else 0)
        devices = facts["device_s"] / facts["wall_s"] if facts["wall_s"] else 0.0
        saved = {"saved_device_s": round(left * standing.median_s * devices, 3)}
        if not standing.lost:
            return saved
        text = (
            f"cannot win: {standing.median_s:.4g} s a step after {standing.steps} steps, "
            f"at {measure_section.stop_confidence:.0%} confidence"
        )
        return saved | {"state": "stopped", "failure": {"class": CANNOT_WIN, "rank": None, "text": text}}

    def _by_kind(self, facts: dict[str, Any]) -> dict[str, float]:
        """The charge by kind, from what the ranks recorded; clocks of other nodes are trusted within the wall only."""
        records = read_records(self.folder, self.candidate.num_devices)
        found, wall = phases(records), facts["wall_s"]
        began = max(records.began_unix_s.values(), default=self._placed_unix)
        lead = min(wall, max(0.0, began - self._placed_unix))
        cleanup = max(0.0, wall - lead - found.last_at_s)
        return split(
            facts["device_s"],
            wall,
            facts["state"],
            compile_s=found.compile,
            warmup_s=found.warmup,
            measured_s=found.measured,
            profile_s=found.profile,
            cleanup_s=cleanup,
        )

    def _breakdown(self, traces: list[str], step_s: float) -> dict[str, Any]:
        """The traced step in seven parts, the mean over the traced ranks; empty without a readable trace."""
        if not traces:
            return {}
        setting = self.plan.setting
        clocks = node_clocks(self.folder, 0)
        try:
            found = break_down(
                [Path(trace) for trace in traces],
                ideal_by_rank_s=ideal_by_rank(setting, self.candidate),
                measured_step_s=step_s,
                peak_flops=setting.hardware.peak(setting.precision),
                clocks=read_clocks(clocks) if clocks.exists() else None,
            )
        except UserError as error:
            return {"breakdown": None, "breakdown_error": str(error)}
        return {"breakdown": mean_over_ranks(found)}


def mean_over_ranks(found: Breakdown) -> dict[str, Any] | None:
    """One step as the mean over its ranks: still useful + parts + unexplained = step; None without a step."""
    steps = found.steps
    if not steps:
        return None
    count = len(steps)
    return {
        "step_s": sum(step.step_s for step in steps) / count,
        "useful_s": sum(step.useful_s for step in steps) / count,
        "parts_s": {part: sum(step.parts_s[part] for step in steps) / count for part in PARTS},
        "unexplained_s": sum(step.unexplained_s for step in steps) / count,
        "coverage_pct": min(step.coverage_pct for step in steps),
        "ranks": count,
        "warnings": list(found.warnings),
    }


def recompute_share(candidate: Candidate, plan: StudyPlan) -> float:
    """FLOP that activation checkpointing runs again, as a share of the model FLOP.

    Full runs each block's forward again. Selective by operator (torchtitan 0.3.0's SelectiveAC) runs every second
    product of a block again, the output and the up projection, and saves attention. For a memory budget the
    partitioner decides; the square of the share given up is the ledger's account of it.
    """
    shape, seq_len = plan.setting.shape, plan.setting.seq_len
    whole = recompute_flop_per_token(shape, seq_len) / flop_per_token(shape, seq_len)
    match candidate.activation_checkpoint:
        case "full":
            return whole
        case "memory_budget":
            return whole * (1 - candidate.memory_budget) ** 2
        case "selective":
            again = shape.layers * shape.hidden * (shape.value_width + shape.feed_forward_width)
            return 2.0 * again / flop_per_token(shape, seq_len)
    return 0.0

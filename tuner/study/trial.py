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
from search_space.hardware import GIB
from search_space.redact import redact_argv
from trial_runner.control import ControlWork
from trial_runner.effective import effective
from trial_runner.effective import inactive_features
from trial_runner.failure import Failure
from trial_runner.failure import find_failure
from trial_runner.failure import hung
from trial_runner.failure import log_tail
from trial_runner.failure import named
from trial_runner.failure import perhaps_disk_full
from trial_runner.failure import silent_failure
from trial_runner.gang import KILL_GRACE_S
from trial_runner.measure import measure
from trial_runner.measure import Measurement
from trial_runner.measure import phases
from trial_runner.measure import read_records
from trial_runner.measure import StepWatch
from trial_runner.peak_check import peaks_disagree
from trial_runner.recipe.config_file import function_name
from trial_runner.recipe.config_file import render
from trial_runner.spec import rank_steps
from trial_runner.spec import rank_trace
from trial_runner.spec import TrialSpec
from trial_runner.transport import degraded
from trial_runner.transport import trial_transport
from tuner.cluster.placed_gang import GangEnd
from tuner.cluster.placed_gang import GangShape
from tuner.cluster.placed_gang import PlacedGang
from tuner.cluster.session import ClusterSession
from tuner.records import roles
from tuner.records.layout import StudyFolder
from tuner.records.spending import split
from tuner.repository import head_of
from tuner.study.costs import TRACE_STEPS
from tuner.study.facts import breakdown_of
from tuner.study.facts import recompute_share
from tuner.study.facts import throttled
from tuner.study.lessons import CANNOT_WIN
from tuner.study.moves import hopeless_part
from tuner.study.plan import StudyPlan
from tuner.study.plan import versions


LOOK_S = 1.0
"""Between looks at a running trial's steps, seconds."""


LISTEN_S = 2.0
"""Between looks for a gang that fell silent, seconds."""


class TrialRun:
    """One running trial.

    Args:
        plan: the study's plan.
        folder: the study's folder.
        number: trial number.
        role: one of :mod:`tuner.records.roles`.
        candidate: the knobs.
    """

    def __init__(self, plan: StudyPlan, folder: StudyFolder, number: int, role: str, candidate: Candidate) -> None:
        self.plan, self.number, self.role, self.candidate = plan, number, role, candidate
        self.folder = folder.trial(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._study = folder.name
        self._gang: PlacedGang | None = None
        self.allowance_s = 0.0
        self.first_step_s = float("inf")
        self.predicted_step_s = 0.0
        """What a rehearsal reports, seconds."""
        self._listened = 0.0
        self.move: dict[str, Any] | None = None
        """The diagnosis that spoke for the candidate."""
        self.weights: str | None = None
        """Folder of the weights it begins with; None: from scratch."""
        self.early: Standing | None = None
        """Why the trial was ended before its last step; None: it was not."""
        self._watch = StepWatch(self.folder, candidate.num_devices)
        self._looked, self._seen = 0.0, 0
        self._placed_unix = 0.0

    def place(
        self,
        session: ClusterSession,
        shape: GangShape,
        allowance_s: float,
        interrupted: Callable[[], bool],
        first_step_s: float = float("inf"),
    ) -> bool:
        """Reserve the gang's devices and start its ranks.

        Args:
            session: the cluster.
            shape: nodes, ranks, devices held.
            allowance_s: wall seconds from placement after which the trial is killed.
            interrupted: asked while waiting for devices.
            first_step_s: wall seconds from placement within which the first step must end.

        Returns:
            Whether the devices were had.

        Raises:
            UserError: the candidate cannot be written as a config function.
        """
        spec = self._write_order(shape)
        self._gang = PlacedGang(session, shape, spec, self.name)
        self.allowance_s, self.first_step_s = allowance_s, first_step_s
        if not self._gang.wait_placed(self.plan.job.cluster.wait_s, interrupted):
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
        if plan.module is not None:
            text, name = plan.module
        else:
            text = render(self.candidate, plan.base, plan.recipe, function=name, header=header)
        config_file.write_text(text)
        env = dict(plan.job.env.get(self.candidate.env, {})) if self.candidate.env != "default" else {}
        control = ControlWork.like(plan.setting.shape, plan.setting.seq_len, plan.device)
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
            trace=measure_section.trace and not plan.rehearsal,
            seed=plan.job.recipe.seed,
            data=plan.job.recipe.data,
            user_path=plan.base.user_path,
            workdir=plan.workdir,
            threads=plan.threads,
            weights=self.weights,
            control=control.to_json() if measure_section.control and self.role in roles.COMPARED else None,
            env=env,
            program="trial_runner.rehearse" if self.plan.rehearsal else "trial_runner.rank",
            header={
                "predicted_step_s": self.predicted_step_s,
                "argv": redact_argv(sys.argv),
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
        if end is None and time.monotonic() - self._listened > LISTEN_S:
            self._listened = time.monotonic()
            left = self.first_step_s - self.wall_s
            silent = hung(self.folder, self.candidate.num_devices, time.time(), self.plan.device, left)
            return GangEnd(silent) if silent else None
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

    @property
    def node_ids(self) -> list[str]:
        """Ray's ids of the nodes it lies on."""
        return self._gang.node_ids if self._gang is not None else []

    def release(self) -> None:
        """Stop what runs and give the devices back."""
        if self._gang is not None:
            self._gang.release()

    def result(self, end: GangEnd, usual_transport: str | None = None) -> Measurement | Failure:
        """What came of the trial, after its gang ended.

        Args:
            end: how the gang ended.
            usual_transport: network that the study's other trials used, where they said so.
        """
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
            transport = trial_transport(self.folder, world)
            if degraded(transport, usual_transport):
                text = f"collectives ran over {transport}, those of the study's other trials over {usual_transport}"
                return Failure(kind="environment_degraded", rank=None, text=text)
            if found is not None:
                return found
            text = "every rank left with success, but steps are missing from the records"
            return Failure(kind="unknown", rank=None, text=text, log_tail=log_tail(self.folder, 0))
        if end.ended == "node_lost":
            return Failure(kind="node_lost", rank=None, text="a node of the gang stopped answering")
        if end.ended == "dirty_device":
            return Failure(kind="dirty_device", rank=None, text=end.text)
        if end.ended in ("hang", "hang_first_step"):
            return silent_failure(end.ended, self.folder, world)
        failure = find_failure(self.folder, world, end.ended, end.exit_codes, end.exit_unix_s, end.host_oom_kills)
        if end.ended == "killed" and end.text and failure.kind in ("agent_lost", "unknown"):
            # Ray's words for a dead actor list every possible cause; only what names one is believed.
            told = named(end.text, "", None)
            if told.kind in ("preempted", "host_out_of_memory", "disk_full", "shared_memory"):
                return told
            return Failure(kind=failure.kind, rank=None, text=f"{failure.text}: {end.text[:500]}")
        return perhaps_disk_full(failure, self.folder)

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
            "nodes": self.node_ids,
            "weights": Path(self.weights).name if self.weights else None,
            "saved_device_s": 0.0,
            "move": self.move,
        }
        if isinstance(outcome, Failure):
            stopped = outcome.kind in ("stopped", "interrupted")
            facts |= {"state": "stopped" if stopped else "failed", "failure": outcome.to_json()}
            return facts | {"by_kind_s": split(facts["device_s"], facts["wall_s"], "failed")}
        measured = asdict(outcome)
        inactive = inactive_features(self.candidate, self.folder)
        ran = effective(self.candidate, inactive)
        flags = (*outcome.flags, *(f"{name}_not_active" for name in inactive))
        setting = self.plan.setting
        if setting.on_cpu:
            # There is no nameplate to trust: the peak was measured, perhaps while the machine was busy.
            flags = tuple("peak_too_low" if flag == "impossible_mfu" else flag for flag in flags)
        elif peaks_disagree(log_tail(self.folder, 0), setting.hardware.peak(setting.precision)):
            flags = (*flags, "peak_disagrees")
        if self.early is not None:
            facts |= self._ended_early(self.early, facts)
        broken_down = breakdown_of(self.plan, self.candidate, self.folder, facts["traces"], outcome.step_time_s)
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
                "compile_cache": measured["compile_cache"],
                "undisturbed_s": outcome.undisturbed_s,
                "flags": [*flags, *throttled(self.folder)],
                "leak_bytes_per_step": outcome.leak_bytes_per_step,
                "effective_candidate": ran.to_json() if ran != self.candidate else None,
                "transport": trial_transport(self.folder, self.candidate.num_devices),
                "gc_pct": outcome.gc_pct,
            }
        )

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

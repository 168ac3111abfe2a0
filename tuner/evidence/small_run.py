"""A study as an extrapolation reads it: its setting, its measured trials, what they calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import json
from math import exp
from typing import Any

from pruning.calibration import calibrate
from pruning.calibration import load_coefficients
from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.coefficients import NAMES
from pruning.coefficients import prior
from pruning.coefficients import TABLE
from pruning.contrast_ratios import measured_ratios
from pruning.extrapolate import Ratio
from pruning.ledger.prices import Z90
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.hardware import Hardware
from search_space.job import Job
from search_space.setting import Setting
from trial_runner.recipe.base import BaseFunction
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise


LEARNED = 0.9
"""Posterior over prior uncertainty below which a coefficient counts as measured."""


SUPERSEDES = {
    "kernel_over_ideal": ("gemm_efficiency", "gemm_half_size", "attention_efficiency", "memory_efficiency"),
    "launch_s_per_block": ("launch_s", "pipeline_host", "host_growth", "network_host", "step_overhead_s"),
    "straggler_of_busy": ("straggler_share",),
    "data_tail_s": ("data_exposed",),
}
"""Coefficients that a stated ratio leaves without a say."""


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """What carries over, and what it rests on."""

    name: str
    """The study, or the job file."""

    setting: Setting
    """Where it was measured."""

    knobs: dict[str, Any]
    """Knob values that the job restricts the pool to."""

    numeric_changes: bool
    """Whether the job lets numeric changes into the pool."""

    coefficients: Coefficients
    """What its trials calibrated, or the shipped priors."""

    observations: tuple[Observation, ...] = ()
    """Its measured trials."""

    winner: Candidate | None = None
    """Its winner."""

    synthetic: bool = False
    """Whether it trained on synthetic tokens."""

    ratios: tuple[Ratio, ...] = ()
    """Ratios from measured pairs."""

    meant_for: dict[str, Any] = field(default_factory=dict)
    """The target that the job itself names under ``[extrapolate]``, keys as in ``--to``."""

    def measured(self) -> list[str]:
        """Names of the coefficients that the trials tell something about."""
        start = prior(self.setting)
        return [name for name in NAMES if self.coefficients.sigma(name) < LEARNED * start.sigma(name)]


def read_small_run(folder: StudyFolder) -> SmallRun:
    """A study's setting, trials and ratios.

    Raises:
        UserError: it is a rehearsal, or measured nothing.
    """
    facts = json.loads(folder.facts.read_text())
    if facts.get("rehearsal"):
        raise UserError(f"study {folder.name}: a rehearsal, nothing was measured there; extrapolate a real study")
    summary = summarise(folder)
    timed = [trial for trial in summary.trials if trial.get("step_time_s")]
    if not timed:
        raise UserError(f"study {folder.name}: no trial was measured, so nothing carries over")
    job = Job(**json.loads(folder.job.read_text()))
    setting = setting_of(facts, job)
    observations = tuple(observation_of(trial) for trial in timed)
    coefficients = _calibrated(folder, setting, observations)
    by_number = {trial["number"]: trial for trial in summary.trials}
    winner = by_number.get(summary.winner) if summary.winner is not None else None
    return SmallRun(
        name=folder.name,
        setting=setting,
        knobs=dict(job.search.knobs),
        numeric_changes=job.search.allow_numeric_changes,
        coefficients=coefficients,
        observations=observations,
        winner=Candidate.from_json(winner["candidate"]) if winner else None,
        synthetic=job.recipe.data == "synthetic",
        ratios=tuple(measured_ratios(observations, setting, coefficients)),
        meant_for=job.extrapolate.model_dump(exclude_none=True),
    )


def _calibrated(folder: StudyFolder, setting: Setting, observations: Sequence[Observation]) -> Coefficients:
    """The study's own coefficients; where an earlier version wrote them, its trials calibrate anew."""
    try:
        return load_coefficients(folder.coefficients.read_text(), setting)
    except (OSError, UserError):
        return calibrate(prior(setting), setting, observations)


def setting_of(facts: dict[str, Any], job: Job) -> Setting:
    """The setting that a study's fixed facts describe."""
    devices = int(facts["num_devices"])
    nodes = job.cluster.nodes
    return Setting(
        shape=BaseFunction.from_json(facts["base"]).shape,
        hardware=_hardware(facts, job),
        devices_per_node=max(1, devices // nodes),
        nodes=nodes,
        seq_len=facts["seq_len"],
        global_batch_seqs=facts["global_batch_seqs"],
        precision=facts["precision"],
        framework="torchtitan",
        versions=facts.get("versions", {}),
        memory_margin=job.measure.memory_margin,
    )


def _hardware(facts: dict[str, Any], job: Job) -> Hardware:
    peak = {facts["precision"]: float(facts["peak_flops"])}
    cluster = job.cluster
    try:
        hardware = find_hardware(facts["hardware"])
    except UserError:
        hardware = find_hardware("H100-SXM").override(name=facts["hardware"], peak_flops={})
    changes: dict[str, Any] = {"peak_flops": hardware.peak_flops | peak}
    if cluster.hbm_gib:
        changes["memory_bytes"] = cluster.hbm_gib * GIB
    if cluster.nvlink_gb_s:
        changes["domain_bandwidth"] = cluster.nvlink_gb_s * 1e9
    if cluster.nic_gb_s:
        changes["nic_bandwidth"] = cluster.nic_gb_s * 1e9
    return hardware.override(**changes)


def observation_of(trial: dict[str, Any]) -> Observation:
    """A trial's record as the ledger takes it; what really took effect stands for what was asked."""
    interval = trial.get("step_time_ci_s")
    peak = trial.get("peak_reserved_gib")
    return Observation(
        candidate=Candidate.from_json(trial.get("effective_candidate") or trial["candidate"]),
        step_time_s=trial["step_time_s"],
        step_time_ci_s=(interval[0], interval[1]) if interval else None,
        peak_reserved_bytes=peak * GIB if peak else None,
    )


def coefficient_ratios(coefficients: Coefficients, measured: Sequence[str], given: Sequence[str]) -> list[Ratio]:
    """The ledger's coefficients as ratios, those aside that were given by hand or that given ones stand for."""
    found = []
    silent = {name for ratio in given for name in (ratio, *SUPERSEDES.get(ratio, ()))} | {"model_error"}
    for entry in TABLE:
        if entry.name in silent:
            continue
        value, spread = coefficients.value(entry.name), Z90 * coefficients.sigma(entry.name)
        found.append(
            Ratio(
                name=entry.name,
                value=value,
                low=value * exp(-spread),
                high=value * exp(spread),
                source="measured" if entry.name in measured else "prior",
                unit=entry.unit,
                help=entry.help,
            )
        )
    return found

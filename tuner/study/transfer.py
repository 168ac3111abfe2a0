"""Starting from earlier studies: coefficients and residuals carry over, trials do not count as measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import json
from typing import Any

import numpy as np

from pruning.assess import assess
from pruning.calibration import load_coefficients
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.sampler import Carried
from search_space.setting import Setting
from tuner.records.layout import StudyFolder
from tuner.records.roles import searched
from tuner.records.summary import summarise


MUST_AGREE = ("torch", "torchtitan")
"""Packages whose versions step times and memory rest on."""

OTHER_JOB_SIGMA = 0.1
"""Log standard deviation by which each coefficient may differ in a study of another model or scale."""


@dataclass(frozen=True)
class Source:
    """An earlier study as it can be learned from."""

    name: str
    """Its name."""

    setting: Setting
    """Its model, scale and recipe, on the devices of the new study."""

    coefficients: Coefficients
    """What its trials calibrated."""

    records: tuple[dict[str, Any], ...]
    """Its trials with a step time."""


def check_source(facts: dict[str, Any], name: str, now: dict[str, Any]) -> None:
    """Refuse a study of other devices or software.

    Args:
        facts: the earlier study's fixed facts.
        name: its name.
        now: the new study's, with ``device``, ``hardware``, ``precision`` and ``versions``.

    Raises:
        UserError: something that measurements rest on differs; the message says what.
    """
    pairs = [(key, facts.get(key), now[key]) for key in ("device", "hardware", "precision")]
    pairs += [(key, facts.get("versions", {}).get(key), now["versions"].get(key)) for key in MUST_AGREE]
    differing = [f"{key} {old} → {new}" for key, old, new in pairs if old != new]
    if differing:
        raise UserError(
            f"--from {name}: {', '.join(differing)} since then, so its measurements do not carry over; leave it out"
        )


def read_source(folder: StudyFolder, setting: Setting, now: dict[str, Any]) -> Source:
    """An earlier study as it can be learned from.

    Raises:
        UserError: it rests on other devices or software, or measured nothing.
    """
    facts = json.loads(folder.facts.read_text())
    if facts.get("rehearsal"):
        raise UserError(f"--from {folder.name}: a rehearsal, nothing was measured there; leave it out")
    check_source(facts, folder.name, now)
    records = tuple(trial for trial in summarise(folder).trials if trial.get("step_time_s") and searched(trial))
    if not records or not folder.coefficients.exists():
        raise UserError(f"--from {folder.name}: nothing was measured there; leave it out")
    from trial_runner.recipe.base import BaseFunction

    devices = int(facts["num_devices"])
    per_node = min(setting.devices_per_node, devices)
    own = replace(
        setting,
        shape=BaseFunction.from_json(facts["base"]).shape,
        devices_per_node=per_node,
        nodes=max(1, devices // per_node),
        seq_len=facts["seq_len"],
        global_batch_seqs=facts["global_batch_seqs"],
        hardware=setting.hardware.override(peak_flops={facts["precision"]: facts["peak_flops"]}),
    )
    return Source(folder.name, own, load_coefficients(folder.coefficients.read_text(), own), records)


def combine(sources: Sequence[Source], setting: Setting) -> Coefficients:
    """The sources' coefficients as one: each holds the shipped prior once, together they hold it once.

    Product of Gaussians over the logs. A study of another model, scale or recipe leaves room to differ.
    """
    start = prior(setting)
    base = np.linalg.inv(start.covariance())
    precision, pull = base.copy(), base @ start.log_values()
    errors = []
    for source in sources:
        same = (source.setting.shape, source.setting.num_devices) == (setting.shape, setting.num_devices)
        room = 0.0 if same else OTHER_JOB_SIGMA
        own = np.linalg.inv(source.coefficients.covariance() + room**2 * np.eye(len(base)))
        gained = own - np.linalg.inv(start.covariance() + room**2 * np.eye(len(base)))
        precision += gained
        pull += own @ source.coefficients.log_values() - (own - gained) @ start.log_values()
        errors.append(source.coefficients.value("model_error"))
    covariance = np.linalg.inv((precision + precision.T) / 2)
    moved = start.with_logs(np.linalg.solve(precision, pull), (covariance + covariance.T) / 2)
    taught = sum(source.coefficients.observations for source in sources)
    return replace(moved.with_value("model_error", max(errors)), observations=taught)


def carry(sources: Sequence[Source]) -> Carried | None:
    """Every source's residuals against its own calibrated ledger; environment lists are other studies' own."""
    candidates: list[Candidate] = []
    residual: list[float] = []
    sigma: list[float] = []
    for source in sources:
        records = [record for record in source.records if record["candidate"].get("env", "default") == "default"]
        if not records:
            continue
        mine = [Candidate.from_json(record["candidate"]) for record in records]
        prices = assess(Pool.from_candidates(mine), source.setting, source.coefficients).prices
        candidates += mine
        residual += list(np.log([record["step_time_s"] for record in records]) - np.log(prices.step_time_s))
        sigma += list(prices.log_sigma)
    if not candidates:
        return None
    return Carried(pool=Pool.from_candidates(candidates), residual=np.array(residual), sigma=np.array(sigma))


def write_transfer(folder: StudyFolder, sources: Sequence[Source], setting: Setting) -> None:
    """Keep what carries over in the new study's folder, so that a resumed study needs the sources no more."""
    carried = carry(sources)
    facts = {
        "from": [source.name for source in sources],
        "coefficients": combine(sources, setting).to_json(),
        "candidates": [c.to_json() for c in carried.pool.candidates()] if carried else [],
        "residual": carried.residual.tolist() if carried else [],
        "sigma": carried.sigma.tolist() if carried else [],
    }
    folder.transfer.write_text(json.dumps(facts))


def read_transfer(folder: StudyFolder, setting: Setting) -> tuple[Coefficients | None, Carried | None, tuple[str, ...]]:
    """What :func:`write_transfer` kept: coefficients, residuals, and the sources' names; nothing in a plain study."""
    if not folder.transfer.exists():
        return None, None, ()
    facts = json.loads(folder.transfer.read_text())
    coefficients = load_coefficients(json.dumps(facts["coefficients"]), setting)
    candidates = [Candidate.from_json(values) for values in facts["candidates"]]
    carried = (
        Carried(
            pool=Pool.from_candidates(candidates),
            residual=np.array(facts["residual"]),
            sigma=np.array(facts["sigma"]),
        )
        if candidates
        else None
    )
    return coefficients, carried, tuple(facts["from"])

"""Smaller trials: a candidate on fewer replicas (or fewer layers), its step corrected to full scale by the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from math import exp
from math import gcd
from math import log
from math import sqrt

from pruning.coefficients import Coefficients
from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import canonical
from search_space.pool import Pool
from search_space.setting import Setting


PRIOR_SIGMA = 0.15
"""Standard deviation of the logarithm of a correction's error before any full trial was seen."""

Z90 = 1.6449
"""Half-width of a 90% interval in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """A smaller trial that stands for a full one."""

    candidate: Candidate
    """The candidate on fewer replicas; tensor and pipeline parallelism, micro-batch and checkpointing are the same."""

    setting: Setting
    """Its setting: fewer devices, and as many micro-batches per replica."""

    full: Candidate
    """The candidate that it stands for."""

    full_setting: Setting
    """That one's setting."""


def shrink(candidate: Candidate, setting: Setting, devices: int, layers: int | None = None) -> Smaller:
    """The candidate on ``devices`` devices: fewer copies first, then fewer shards.

    Micro-batches per replica stay as they are, so the pipeline fills as it does at full scale; the global batch is
    smaller. Fewer layers keep whole stages: they must divide into the candidate's stages.

    Args:
        candidate: the candidate to stand for.
        setting: its setting.
        devices: devices of the smaller trial.
        layers: layers that are kept; None for all.

    Raises:
        UserError: the devices hold no whole replica, or not a whole number, or the layers do not divide.
    """
    width = candidate.tensor_parallel * candidate.pipeline_parallel * candidate.context_parallel
    replicas, rest = divmod(devices, width)
    if rest or not replicas:
        raise UserError(f"{devices} devices hold no whole number of replicas of {width} devices")
    if replicas > candidate.data_parallel or candidate.data_parallel % replicas:
        raise UserError(f"{replicas} replicas are no part of the candidate's {candidate.data_parallel}")
    if layers is not None and (layers > setting.shape.layers or layers % candidate.num_stages):
        raise UserError(
            f"{layers} layers: at most {setting.shape.layers}, and a multiple of {candidate.num_stages} stages"
        )
    shard = gcd(candidate.data_parallel_shard, replicas)
    small = replace(candidate, data_parallel_shard=shard, data_parallel_replicate=replicas // shard)
    shape = setting.shape
    if layers is not None:
        shape = replace(shape, layers=layers, dense_layers=min(shape.dense_layers, layers))
    per_node = min(setting.devices_per_node, devices)
    smaller = replace(
        setting,
        shape=shape,
        devices_per_node=per_node,
        nodes=max(1, devices // per_node),
        global_batch_seqs=setting.global_batch_seqs // candidate.data_parallel * replicas,
    )
    return Smaller(candidate=canonical(small), setting=smaller, full=candidate, full_setting=setting)


def correction(smaller: Smaller, coefficients: Coefficients | None = None) -> float:
    """Full step time over the smaller trial's, by the ledger."""
    full = price(Pool.from_candidates([smaller.full]), smaller.full_setting, coefficients)
    small = price(Pool.from_candidates([smaller.candidate]), smaller.setting, coefficients)
    return float(full.step_time_s[0] / small.step_time_s[0])


@dataclass(frozen=True)
class CorrectionError:
    """How far corrected smaller trials lie from full ones; of the logarithm of full over corrected."""

    bias: float = 0.0
    """Mean."""

    sigma: float = PRIOR_SIGMA
    """Standard deviation of a new one."""

    pairs: int = 0
    """Full trials that it was learned from."""

    @classmethod
    def learn(cls, pairs: Sequence[tuple[float, float]]) -> CorrectionError:
        """From (corrected, measured at full scale) step times, seconds.

        A normal model whose prior counts as one pair: mean 0, deviation :data:`PRIOR_SIGMA`.
        """
        errors = [log(full / corrected) for corrected, full in pairs]
        n = len(errors)
        bias = sum(errors) / (n + 1)
        spread = (PRIOR_SIGMA**2 + bias**2 + sum((error - bias) ** 2 for error in errors)) / (n + 1)
        return cls(bias, sqrt(spread * (1 + 1 / (n + 1))), n)

    def full_step(self, corrected: float) -> tuple[float, list[float]]:
        """Step time at full scale and its 90% interval, seconds."""
        middle = corrected * exp(self.bias)
        return middle, [middle * exp(-Z90 * self.sigma), middle * exp(Z90 * self.sigma)]

"""What ratios that were measured small mean at another scale: parts, step time and MFU with ranges.

Ratios (kernel efficiency, hidden shares, launch cost, what recomputation and compilation do) hold about as well at one
scale as at another; absolute quantities (communication, bubble, memory) do not, so the ledger computes them anew for
the target. Source of the split: the second seed document, chapter 9, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import numpy as np

from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.coefficients import Coefficients
from pruning.coefficients import INDEX
from pruning.coefficients import NAMES
from pruning.ledger.layout import Layout
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.pipeline import Flow
from pruning.ledger.pipeline import flow_of
from pruning.ledger.prices import error_scale
from pruning.ledger.prices import PARTS
from pruning.ledger.prices import Z90
from pruning.ledger.step_time import combine
from pruning.ledger.step_time import Compute
from pruning.ledger.step_time import compute_time
from pruning.ledger.step_time import data_time
from pruning.ledger.step_time import DataTime
from pruning.ledger.step_time import hidden_time
from pruning.ledger.step_time import StepTime
from search_space.pool import Pool
from search_space.setting import Setting


RATIO_HELP = {
    "kernel_over_ideal": "kernel time over ideal time, without recomputation (1 / 0.62 in the seed's budget)",
    "recompute_factor": "time of recomputation over the ledger's",
    "compile_factor": "gain of compilation in kernel and launch time over the ledger's",
    "uneven_share": "what stays of the simulated bubble above that of even stages (0: head balanced out)",
    "launch_s_per_block": "visible host time per transformer block and micro-batch, seconds",
    "data_tail_s": "data-parallel communication that nothing hides, seconds a step: the last bucket",
    "straggler_of_busy": "waiting for the slowest rank over busy time, at the target",
    "reserve": "step time over the sum of its parts: how much plans have been too optimistic",
}
"""Ratios beside the ledger's coefficients, which may be named too."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One carried ratio."""

    name: str
    """A key of :data:`RATIO_HELP`, or a coefficient of the ledger."""

    value: float
    """What is expected."""

    low: float
    """Lower end of its 90% interval."""

    high: float
    """Upper end of its 90% interval."""

    source: str = "given"
    """``measured``, ``given`` or ``prior``."""

    unit: str = ""
    """Unit of the value."""

    help: str = ""
    """What it scales."""

    def to_json(self) -> dict[str, Any]:
        """Keys of ``carried``."""
        return {
            "name": self.name,
            "value": self.value,
            "interval": [self.low, self.high],
            "unit": self.unit,
            "source": self.source,
            "help": self.help,
        }


@dataclass(frozen=True)
class Parts:
    """One evaluation: seconds, arrays of shape (n,)."""

    seconds: dict[str, np.ndarray]
    """The seven parts."""

    reserve: np.ndarray
    """What is set aside because plans are optimistic."""

    step: np.ndarray
    """Ideal time, parts and reserve."""

    error: np.ndarray
    """Factor on the model error."""


@dataclass(frozen=True)
class Extrapolation:
    """The target's candidates under the carried ratios. Arrays have shape (n,), seconds unless said otherwise."""

    ideal_s: float
    """Ideal step time."""

    median: Parts
    """At the ratios' expected values."""

    low: dict[str, np.ndarray]
    """Lower ends of the 90% intervals of the parts, of ``reserve`` and of ``step``."""

    high: dict[str, np.ndarray]
    """Upper ends."""

    drivers: list[tuple[str, np.ndarray]]
    """Half-width of the step's interval that each ratio alone makes, largest first by its mean; ``model_error`` too."""

    moves: list[tuple[str, dict[str, float]]]
    """For the first candidate: seconds by part (and ``reserve``) between the two ends of each source of doubt, as one
    standard deviation."""


def evaluate(
    pool: Pool,
    setting: Setting,
    coefficients: Coefficients,
    ratios: Mapping[str, float] | None = None,
    account: Account | None = None,
) -> Parts:
    """Seven parts under coefficients and ratios; without ratios they are the ledger's own.

    Kernel, recompute and launch time are set from the ratios; bubble, data wait and straggler follow busy time, the
    bubble by the simulated schedule of the target. Data-parallel time hides behind the changed compute.

    Args:
        pool: candidates of the target.
        setting: the target.
        coefficients: the ledger's coefficients.
        ratios: values by name of :data:`RATIO_HELP`.
        account: the framework's habits; absent: those of the setting's framework.
    """
    return _Prepared.of(pool, setting, account).evaluate(coefficients, ratios or {})


@dataclass(frozen=True)
class _Prepared:
    """What does not depend on ratios."""

    setting: Setting
    account: Account
    layout: Layout
    flow: Flow

    @classmethod
    def of(cls, pool: Pool, setting: Setting, account: Account | None) -> _Prepared:
        habits = account or find_account(setting.framework)
        layout = layout_of(pool, setting)
        return cls(setting, habits, layout, flow_of(layout, ranks_of(layout, habits.balances_head)))

    def evaluate(self, coefficients: Coefficients, ratios: Mapping[str, float]) -> Parts:
        layout, ideal = self.layout, self.setting.ideal_s
        compute = compute_time(layout, self.flow, self.account, coefficients)
        data = data_time(layout, self.account, coefficients)
        plain = combine(compute, data, coefficients)
        parts = dict(plain.parts)
        if any(name != "reserve" for name in ratios):
            parts = self._changed(compute, data, coefficients, ratios)
        whole = ideal + np.sum(list(parts.values()), axis=0)
        reserve = (ratios.get("reserve", 1.0) - 1) * whole
        error = error_scale(StepTime(parts, whole, plain.variance))
        return Parts(parts, reserve, whole + reserve, error)

    def _changed(
        self, compute: Compute, data: DataTime, coefficients: Coefficients, ratios: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        layout, ideal, value = self.layout, self.setting.ideal_s, coefficients.value
        kernel = ideal + compute.kernels
        new_kernel = (
            np.full_like(kernel, ratios["kernel_over_ideal"] * ideal) if "kernel_over_ideal" in ratios else kernel
        )
        recompute = compute.recompute * new_kernel / kernel * ratios.get("recompute_factor", 1.0)
        blocks = self.setting.shape.layers / layout.pp
        launch = compute.launch
        if "launch_s_per_block" in ratios:
            launch = ratios["launch_s_per_block"] * blocks * layout.micro_batches
        if "compile_factor" in ratios:
            gain = ratios["compile_factor"] ** np.where(layout.flag("compile") > 0, -0.5, 0.5)
            new_kernel, launch = new_kernel * gain, launch * gain
        busy = compute.wait / value("data_wait_share")
        more = (new_kernel - kernel) + (recompute - compute.recompute) + (launch - compute.launch)
        growth = (busy + more) / busy
        straggler = compute.straggler * growth
        if "straggler_of_busy" in ratios:
            straggler = ratios["straggler_of_busy"] * (busy + more)
        window = compute.window * growth
        visible = hidden_time(data.hideable, window, value("data_exposed"))
        if "data_tail_s" in ratios:
            tail = np.minimum(ratios["data_tail_s"], data.hideable)
            visible = np.maximum(tail, data.hideable - window)
        # The ledger's bubble is a share of busy time; even stages leave (p - 1) / (m·v) of it.
        share = self.flow.bubble
        if "uneven_share" in ratios:
            even = np.minimum((layout.pp - 1) / (layout.micro_batches * layout.vp), share)
            share = even + ratios["uneven_share"] * (share - even)
        return {
            "bubble": share * (busy + more),
            "exposed_communication": compute.exposed + visible + data.late,
            "recompute": recompute,
            "data_wait": compute.wait * growth,
            "kernel_efficiency": new_kernel - ideal,
            "cpu_launch": launch,
            "straggler": straggler,
        }


def extrapolate(
    pool: Pool,
    setting: Setting,
    coefficients: Coefficients,
    ratios: Sequence[Ratio] = (),
    account: Account | None = None,
) -> Extrapolation:
    """Parts and step time with 90% intervals.

    Each source of doubt is moved alone to both ends of its interval, and the deviations are added in quadrature, up
    and down apart: the principal axes of the coefficients' covariance (they are calibrated together), each ratio, and
    the ledger's own model error, which a stated ``reserve`` takes the place of.

    Args:
        pool: candidates of the target.
        setting: the target.
        coefficients: the ledger's coefficients as they carry over.
        ratios: stated or measured ratios; one that names a coefficient replaces it.
        account: the framework's habits.
    """
    prepared = _Prepared.of(pool, setting, account)
    own = {ratio.name: ratio.value for ratio in ratios if ratio.name in RATIO_HELP}
    base = coefficients
    for ratio in ratios:
        if ratio.name in INDEX:
            base = _fixed(base, ratio.name, ratio.value)
    median = prepared.evaluate(base, own)
    moved: list[tuple[str, Parts, Parts]] = []
    for name, first_end, last_end in _axes(base):
        moved.append((name, prepared.evaluate(first_end, own), prepared.evaluate(last_end, own)))
    for ratio in ratios:
        ends = []
        for end in (ratio.low, ratio.high):
            if ratio.name in INDEX:
                ends.append(prepared.evaluate(base.with_value(ratio.name, max(end, 1e-12)), own))
            else:
                ends.append(prepared.evaluate(base, own | {ratio.name: end}))
        moved.append((ratio.name, ends[0], ends[1]))
    low, high = {}, {}
    widths: dict[str, np.ndarray] = {}
    for key in (*PARTS, "reserve", "step"):
        middle = _of(median, key)
        down, up = np.zeros_like(middle), np.zeros_like(middle)
        for name, first, second in moved:
            change = np.array([_of(first, key) - middle, _of(second, key) - middle])
            down += np.minimum(change.min(axis=0), 0) ** 2
            up += np.maximum(change.max(axis=0), 0) ** 2
            if key == "step":
                widths[name] = np.hypot(widths.get(name, 0.0), np.abs(change).max(axis=0))
        if key == "step" and "reserve" not in own:
            factor = np.exp(Z90 * base.value("model_error") * median.error)
            down += (middle - middle / factor) ** 2
            up += (middle * factor - middle) ** 2
            widths["model_error"] = middle * (factor - 1)
        floor = -np.inf if key == "kernel_efficiency" else 0.0
        low[key], high[key] = np.maximum(middle - np.sqrt(down), floor), middle + np.sqrt(up)
    drivers = sorted(widths.items(), key=lambda pair: -float(pair[1].mean()))
    keys = (*PARTS, "reserve")
    moves = [
        (name, {key: float(_of(second, key)[0] - _of(first, key)[0]) / (2 * Z90) for key in keys})
        for name, first, second in moved
    ]
    return Extrapolation(setting.ideal_s, median, low, high, drivers, moves)


def _of(parts: Parts, key: str) -> np.ndarray:
    if key == "step":
        return parts.step
    return parts.reserve if key == "reserve" else parts.seconds[key]


def _fixed(coefficients: Coefficients, name: str, value: float) -> Coefficients:
    """One coefficient set, without an uncertainty of its own."""
    covariance = coefficients.covariance()
    covariance[INDEX[name], :] = covariance[:, INDEX[name]] = 0.0
    log = coefficients.log_values()
    log[INDEX[name]] = np.log(max(value, 1e-12))
    return coefficients.with_logs(log, covariance)


def _axes(coefficients: Coefficients) -> list[tuple[str, Coefficients, Coefficients]]:
    """Both ends of the 90% interval along each principal axis, named after the coefficient that it moves most."""
    covariance, log = coefficients.covariance(), coefficients.log_values()
    values, vectors = np.linalg.eigh(covariance)
    found = []
    for value, vector in zip(values, vectors.T):
        if value <= 1e-12:
            continue
        move = Z90 * np.sqrt(value) * vector
        name = NAMES[int(np.abs(vector).argmax())]
        found.append((name, coefficients.with_logs(log - move, None), coefficients.with_logs(log + move, None)))
    return found


def carried_over(
    coefficients: Coefficients, hardware: str, framework: str, room: float, prior_of_target: Coefficients | None = None
) -> Coefficients:
    """Coefficients for another scale, model or kind of device: the medians stay, each may differ by ``room`` more.

    Args:
        coefficients: what was calibrated.
        hardware: the target's kind of device.
        framework: the target's framework and version.
        room: log standard deviation that is added to each.
        prior_of_target: where the devices differ: what is believed about the target's; both are combined.
    """
    covariance = coefficients.covariance() + room**2 * np.eye(len(NAMES))
    moved = replace(
        coefficients.with_logs(coefficients.log_values(), covariance), hardware=hardware, framework=framework
    )
    if prior_of_target is None:
        return moved
    first, second = np.linalg.inv(covariance), np.linalg.inv(prior_of_target.covariance())
    joint = np.linalg.inv(first + second)
    log = joint @ (first @ moved.log_values() + second @ prior_of_target.log_values())
    error = max(coefficients.value("model_error"), prior_of_target.value("model_error"))
    return moved.with_logs(log, (joint + joint.T) / 2).with_value("model_error", error)

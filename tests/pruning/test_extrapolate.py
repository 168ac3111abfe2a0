"""Ratios carried to another scale: the ledger's own figures without them, and moves as predicted with them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from pruning.calibration import Observation
from pruning.coefficients import prior
from pruning.contrast_ratios import measured_ratios
from pruning.contrast_ratios import pairs
from pruning.extrapolate import carried_over
from pruning.extrapolate import evaluate
from pruning.extrapolate import extrapolate
from pruning.extrapolate import Ratio
from pruning.ledger.communication import block_tensor_traffic
from pruning.ledger.layout import layout_of
from pruning.ledger.prices import PARTS
from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.rules import judge
from search_space.rules import RULES
from search_space.setting import Setting


SHAPE = preset_shape("llama3:llama3_8b")
assert SHAPE is not None
SETTING = Setting(
    shape=SHAPE, hardware=find_hardware("H100-SXM"), devices_per_node=8, nodes=4, seq_len=8192, global_batch_seqs=64
)
FULL = enumerate_pool(SETTING, {}, False)
POOL = FULL.take(np.flatnonzero(judge(FULL, SETTING, RULES).legal))
RATIOS = {
    "kernel_over_ideal": 1.6,
    "recompute_factor": 1.3,
    "compile_factor": 1.2,
    "uneven_share": 0.5,
    "launch_s_per_block": 4e-4,
    "data_tail_s": 0.05,
    "straggler_of_busy": 0.02,
    "reserve": 1.1,
}


def exact(name: str, value: float) -> Ratio:
    return Ratio(name=name, value=value, low=value, high=value)


def test_without_ratios_it_is_the_ledger() -> None:
    found, prices = evaluate(POOL, SETTING, prior(SETTING)), price(POOL, SETTING)
    np.testing.assert_allclose(found.step, prices.step_time_s, rtol=1e-9)
    for part in PARTS:
        np.testing.assert_allclose(found.seconds[part], prices.parts_s[part], rtol=1e-9, atol=1e-12)


def test_ratios_that_say_what_the_ledger_says_change_nothing() -> None:
    """The changed path and the ledger's own agree where a ratio repeats the ledger."""
    found, prices = evaluate(POOL, SETTING, prior(SETTING), {"recompute_factor": 1.0}), price(POOL, SETTING)
    np.testing.assert_allclose(found.step, prices.step_time_s, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(RATIOS)), st.floats(1.0, 1.5), st.integers(0, 10**6))
def test_a_larger_ratio_never_makes_a_step_shorter(name: str, factor: float, seed: int) -> None:
    one = POOL.take(np.array([seed % len(POOL)]))
    before = evaluate(one, SETTING, prior(SETTING), RATIOS)
    after = evaluate(one, SETTING, prior(SETTING), RATIOS | {name: RATIOS[name] * factor})
    gains = name == "compile_factor" and bool(one["compile"][0])
    assert (before.step - after.step if gains else after.step - before.step)[0] >= -1e-9
    whole = SETTING.ideal_s + sum(after.seconds.values()) + after.reserve
    np.testing.assert_allclose(whole, after.step, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 1.0), st.floats(0.01, 0.4), st.integers(0, 10**6))
def test_a_hidden_share_moves_the_exposed_seconds_by_its_part_of_the_traffic(
    exposed: float, more: float, seed: int
) -> None:
    one = POOL.take(np.array([seed % len(POOL)]))
    start = prior(SETTING)
    ratios = RATIOS | {"data_tail_s": 0.0}
    first = evaluate(one, SETTING, start.with_value("tensor_exposed", exposed), ratios)
    second = evaluate(one, SETTING, start.with_value("tensor_exposed", exposed + more), ratios)
    layout = layout_of(one, SETTING)
    traffic = block_tensor_traffic(layout, start).time_s[0] * (1 - 0.5 * layout.flag("async_tp")[0])
    moved = second.seconds["exposed_communication"][0] - first.seconds["exposed_communication"][0]
    # Longer steps hide more data-parallel traffic, and recomputation sends its collectives again.
    assert moved <= 2 * more * traffic + 1e-9
    if traffic > 0 and one["activation_checkpoint"][0] == 0 and layout.dp[0] == 1:
        assert moved == pytest.approx(more * traffic, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.3))
def test_intervals_hold_their_medians_and_grow_with_doubt(seed: int, spread: float) -> None:
    one = POOL.take(np.array([seed % len(POOL)]))
    ratio = Ratio(name="kernel_over_ideal", value=1.6, low=1.6 - spread, high=1.6 + spread)
    narrow, wide = (extrapolate(one, SETTING, prior(SETTING), [r]) for r in (exact("kernel_over_ideal", 1.6), ratio))
    for key in (*PARTS, "step"):
        middle = wide.median.step if key == "step" else wide.median.seconds[key]
        assert wide.low[key][0] <= middle[0] + 1e-12 and middle[0] <= wide.high[key][0] + 1e-12
    assert wide.high["step"][0] - wide.low["step"][0] >= narrow.high["step"][0] - narrow.low["step"][0] - 1e-12


def test_another_scale_leaves_the_medians_and_widens_them() -> None:
    start = prior(SETTING)
    moved = carried_over(start, "H100-SXM", "torchtitan", 0.1)
    np.testing.assert_allclose(moved.log_values(), start.log_values())
    assert all(moved.sigma(name) > start.sigma(name) for name in ("launch_s", "tensor_exposed"))


def test_another_device_lies_between_what_was_measured_and_what_is_believed_of_it() -> None:
    start = prior(SETTING)
    measured = start.with_value("tensor_exposed", 0.3)
    moved = carried_over(measured, "H200", "torchtitan", 0.3, start)
    assert 0.3 < moved.value("tensor_exposed") < start.value("tensor_exposed")


def planted(name: str, factor: float, noise: float, seed: int) -> list[Observation]:
    """Trials of a machine on which one ratio differs from the ledger's."""
    rng = np.random.default_rng(seed)
    base = Candidate(data_parallel_shard=32, micro_batch=1)
    tried = [
        replace(base, compile=compiled, activation_checkpoint=kind, micro_batch=batch)
        for compiled in (False, True)
        for kind in ("none", "full")
        for batch in (1, 2)
    ]
    step = evaluate(Pool.from_candidates(tried), SETTING, prior(SETTING), {name: factor}).step
    times = step * np.exp(rng.normal(0, noise, len(tried)))
    ends = [(t * np.exp(-1.96 * noise), t * np.exp(1.96 * noise)) for t in times]
    return [Observation(candidate=c, step_time_s=float(t), step_time_ci_s=e) for c, t, e in zip(tried, times, ends)]


@pytest.mark.parametrize("name", ["recompute_factor", "compile_factor"])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.6])
def test_a_planted_ratio_is_found_from_pairs(name: str, factor: float) -> None:
    ratios = {r.name: r for r in measured_ratios(planted(name, factor, 0.003, 1), SETTING, prior(SETTING))}
    assert ratios[name].value == pytest.approx(factor, rel=0.05)
    other = ({"recompute_factor", "compile_factor"} - {name}).pop()
    assert ratios[other].value == pytest.approx(1.0, abs=0.1)


def test_noisy_pairs_stay_near_the_ledger() -> None:
    sure = {r.name: r for r in measured_ratios(planted("recompute_factor", 1.6, 0.002, 3), SETTING, prior(SETTING))}
    vague = {r.name: r for r in measured_ratios(planted("recompute_factor", 1.6, 0.2, 3), SETTING, prior(SETTING))}
    width = {name: r["recompute_factor"].high / r["recompute_factor"].low for name, r in (("s", sure), ("v", vague))}
    assert width["v"] > width["s"]


def test_only_pairs_that_differ_in_one_knob_count() -> None:
    a = Candidate(data_parallel_shard=32)
    both = replace(a, compile=True, activation_checkpoint="full")
    trials = [Observation(candidate=c, step_time_s=1.0) for c in (a, both)]
    assert not pairs(trials, "compile") and not pairs(trials, "activation_checkpoint")
    assert measured_ratios(trials, SETTING, prior(SETTING)) == []

from __future__ import annotations

import json

import numpy as np
import pytest

from pruning.assess import assess
from pruning.calibration import calibrate
from pruning.calibration import load_coefficients
from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.prices import PARTS
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.setting import Setting


DEBUG = ModelShape(name="debug", layers=6, hidden=256, heads=16, kv_heads=16, ffn=768, vocab=2048)
LLAMA_70B = ModelShape(name="llama3_70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)


def cpu_setting(**changes: object) -> Setting:
    values: dict[str, object] = {
        "shape": DEBUG,
        "hardware": find_hardware("cpu"),
        "devices_per_node": 4,
        "nodes": 1,
        "seq_len": 512,
        "global_batch_seqs": 16,
        "precision": "fp32",
    }
    return Setting(**(values | changes))  # type: ignore[arg-type]


def gpu_setting(**changes: object) -> Setting:
    values: dict[str, object] = {
        "shape": LLAMA_70B,
        "hardware": find_hardware("H100-SXM"),
        "devices_per_node": 8,
        "nodes": 128,
        "seq_len": 8192,
        "global_batch_seqs": 512,
    }
    return Setting(**(values | changes))  # type: ignore[arg-type]


def test_parts_and_ideal_add_up_to_the_step() -> None:
    setting = gpu_setting()
    prices = assess(enumerate_pool(setting), setting).prices
    assert tuple(prices.parts_s) == PARTS
    np.testing.assert_allclose(prices.step_time_s, prices.ideal_s + sum(prices.parts_s.values()), rtol=1e-12)
    assert (prices.step_time_low_s < prices.step_time_s).all()
    assert (prices.step_time_s < prices.step_time_high_s).all()


def test_rejections_cover_every_refused_candidate() -> None:
    setting = gpu_setting()
    assessment = assess(enumerate_pool(setting), setting)
    refused = int((~assessment.feasible).sum())
    assert sum(group["count"] for group in assessment.rejected()) == refused
    for i in assessment.nearest(3):
        reasons = assessment.reasons(i)
        assert reasons and reasons[0].required != reasons[0].available
    assert not assessment.reasons(int(np.argmax(assessment.feasible)))


def test_an_empty_pool_is_assessed() -> None:
    setting = gpu_setting()
    empty = enumerate_pool(setting).take(np.zeros(0, dtype=int))
    assessment = assess(empty, setting)
    assert assessment.feasible.shape == (0,)
    assert assessment.rejected() == [] and assessment.nearest() == []


def test_calibration_tightens_and_moves_towards_what_was_measured() -> None:
    setting = cpu_setting()
    pool = enumerate_pool(setting)
    before = assess(pool, setting)
    picked = np.flatnonzero(before.feasible)[::37][:6]
    observations = [
        Observation(
            candidate=pool.candidate(int(i)),
            step_time_s=float(before.prices.step_time_s[i]) * 2.5,
            peak_reserved_bytes=float(before.prices.memory_bytes[i]) * 1.3,
        )
        for i in picked
    ]
    fitted = calibrate(prior(setting), setting, observations)
    after = assess(pool, setting, fitted).prices
    assert after.log_sigma.mean() < 0.7 * before.prices.log_sigma.mean()
    assert np.median(after.step_time_s / before.prices.step_time_s) == pytest.approx(2.5, rel=0.15)
    assert np.median(after.memory_bytes / before.prices.memory_bytes) == pytest.approx(1.3, rel=0.1)
    assert fitted.observations == len(observations)


def test_an_out_of_memory_trial_raises_the_predicted_memory() -> None:
    setting = gpu_setting()
    pool = enumerate_pool(setting)
    before = assess(pool, setting).prices
    near = int(np.argmin(np.abs(before.memory_bytes - 0.95 * setting.hardware.memory_bytes)))
    observation = Observation(candidate=pool.candidate(near), oom=True)
    after = assess(pool, setting, calibrate(prior(setting), setting, [observation])).prices
    assert after.memory_bytes[near] > before.memory_bytes[near]


def test_coefficients_survive_json_and_refuse_other_hardware() -> None:
    setting = cpu_setting()
    coefficients = prior(setting)
    text = json.dumps(coefficients.to_json())
    assert load_coefficients(text, setting) == coefficients
    with pytest.raises(UserError, match="coefficients are for cpu"):
        load_coefficients(text, gpu_setting())
    with pytest.raises(UserError, match="no entry for"):
        Coefficients.from_json({"coefficients": {}})


def test_refused_is_what_surely_does_not_fit_and_doubtful_is_a_risk() -> None:
    setting = gpu_setting(nodes=16, global_batch_seqs=128)
    found = assess(enumerate_pool(setting), setting)
    prices, allowed = found.prices, found.allowed_bytes
    surely = prices.memory_surely_bytes
    np.testing.assert_allclose(np.log(prices.memory_bytes / surely), prices.memory_sigma)
    np.testing.assert_array_equal(found.feasible, found.judgement.legal & (surely <= allowed))
    doubtful = np.flatnonzero((surely <= allowed) & (prices.memory_bytes > allowed) & found.judgement.legal)
    certain = np.flatnonzero((prices.memory_bytes <= allowed) & found.judgement.legal)
    assert len(doubtful) and len(certain)
    np.testing.assert_array_equal(np.flatnonzero(found.doubtful), doubtful)
    assert "memory" in {risk.code for risk in found.risks(int(doubtful[0]))}
    assert "memory" not in {risk.code for risk in found.risks(int(certain[0]))}
    assert not found.reasons(int(doubtful[0]))

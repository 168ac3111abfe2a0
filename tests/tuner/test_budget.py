"""Budget texts and the meter: never over, whatever trials cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
import pytest

from search_space.errors import UserError
from tuner.budget import Meter
from tuner.budget import parse_budget
from tuner.records.units import format_budget


@pytest.mark.parametrize(
    ("text", "device_s"),
    [
        ("40-gpu-hours", 144000),
        ("90-gpu-minutes", 5400),
        ("0.2-gpu-hours", 720),
        (".5-gpu-hours", 1800),
        ("1-gpu-hour", 3600),
        ("2 GPU hours", 7200),
        ("30-gpu-seconds", 30),
        ("1-device-hour", 3600),
    ],
)
def test_budget_texts(text: str, device_s: float) -> None:
    assert parse_budget(text) == pytest.approx(device_s)


@pytest.mark.parametrize(
    "text", ["", "40", "forty-gpu-hours", "0-gpu-hours", "-1-gpu-hours", "40-hours", "1e3-gpu-hours", "4-gpu-weeks"]
)
def test_wrong_budget_says_what_is_needed(text: str) -> None:
    with pytest.raises(UserError, match="budget: found"):
        parse_budget(text)


@given(limit=st.floats(1, 1e6), costs=st.lists(st.tuples(st.floats(0.1, 1e5), st.floats(0, 1)), max_size=50))
def test_meter_never_exceeds_its_limit(limit: float, costs: list[tuple[float, float]]) -> None:
    """Trials that cost at most their worst case never bring the meter over its limit, however they overlap."""
    meter = Meter(limit)
    open_trials: list[tuple[str, float]] = []
    for i, (worst, share) in enumerate(costs):
        if meter.fits(worst):
            meter.reserve(str(i), worst)
            open_trials.append((str(i), worst * share))
        if len(open_trials) > 2:
            meter.settle(*open_trials.pop(0))
        assert meter.spent <= limit * (1 + 1e-9)
    for name, cost in open_trials:
        meter.settle(name, cost)
    assert meter.spent <= limit * (1 + 1e-9)


def test_meter_refuses_what_does_not_fit() -> None:
    meter = Meter(10)
    meter.reserve("a", 8)
    assert not meter.fits(3)
    with pytest.raises(ValueError, match="exceeds"):
        meter.reserve("b", 3)


def test_format() -> None:
    assert format_budget(7200) == "2.00 device-hours"
    assert format_budget(600) == "10.0 device-minutes"
    assert format_budget(30) == "30 device-seconds"

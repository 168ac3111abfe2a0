"""Lengths and names: nothing that a study can hold is over what MLflow takes, and two values never become one."""

from __future__ import annotations

import types

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tuner.records.tracking.limits import batches
from tuner.records.tracking.limits import legal_name
from tuner.records.tracking.limits import read_limits
from tuner.records.tracking.limits import shorten


def test_limits_are_the_installed_ones() -> None:
    from mlflow.utils import validation

    limits = read_limits()
    assert limits.param_value == validation.MAX_PARAM_VAL_LENGTH
    assert limits.params_per_call == validation.MAX_PARAMS_TAGS_PER_BATCH
    assert limits.metrics_per_call == validation.MAX_METRICS_PER_BATCH
    other = read_limits(types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=123))
    assert other.param_value == 123 and other.params_per_call == 100


@given(st.text(max_size=9000), st.sampled_from([250, 500, 6000]))
def test_shortened_values_fit_and_say_so(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short == text or f"{len(text)} characters" in short


@given(st.text(min_size=1, max_size=3), st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9))
def test_two_values_never_become_one(piece: str, one: str, other: str) -> None:
    head = piece * 7000
    assert (shorten(head + one, 6000) == shorten(head + other, 6000)) == (one == other)


@given(st.text(min_size=1, max_size=400))
def test_every_name_is_legal(name: str) -> None:
    from mlflow.utils import validation

    validation._validate_metric(legal_name(name, read_limits().key), 1.0, 0, 0)
    validation._validate_param_name(legal_name(name, read_limits().key))


@pytest.mark.parametrize("name", ["part/bubble_s", "step/loss", "mfu_pct"])
def test_good_names_stay(name: str) -> None:
    assert legal_name(name, 250) == name


def test_batches() -> None:
    assert [list(part) for part in batches([1, 2, 3], 2)] == [[1, 2], [3]]

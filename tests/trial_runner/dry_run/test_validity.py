"""Two-way validity: what the rules call legal runs two steps of the real program, and what they refuse it refuses too.

The whole sample is slow (`make test-validity`); a stratified part of it is in the normal run.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from search_space.errors import UserError
from tests.trial_runner.dry_run.sample import sample
from tests.trial_runner.dry_run.sample import Sampled
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import Session
from trial_runner.recipe.config_file import Recipe


pytestmark = pytest.mark.e2e

RUNS_ALL_THE_SAME = {"several_stages_per_rank"}
"""Rules that torchtitan 0.3.0 has only where it cuts stages itself; with listed stages a looped schedule of one stage
runs, and does what 1F1B does, so the pool leaves it out as a duplicate."""


def verdict(one: Sampled, session: Session) -> tuple[bool, str]:
    """Whether it ran, and what was said."""
    setting, pipeline = one.setting, one.candidate.pipeline_parallel
    recipe = Recipe(seq_len=setting.seq_len, global_batch_seqs=setting.global_batch_seqs, precision="bf16")
    try:
        found = dry_run(one.candidate, one.base, recipe, sorted({0, pipeline - 1}), session=session)
    except UserError as error:
        return False, str(error)
    assert not found.unknown, f"{one.label()}: the dry run cannot tell: {found.error}"
    return found.valid, found.error or ""


def check(samples: list[Sampled]) -> None:
    """Every sample's verdict is the rules'."""
    wrong = []
    with Session() as session, ThreadPoolExecutor(2) as pool:
        for one, (ran, text) in zip(samples, pool.map(lambda one: verdict(one, session), samples)):
            expected = one.stratum == "legal" or one.stratum in RUNS_ALL_THE_SAME
            if ran != expected:
                wrong.append(f"{one.stratum}: {one.label()}: {'ran' if ran else text[-300:]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_part_of_the_sample() -> None:
    samples = sample(legal=8, per_rule=1)
    assert len(samples) >= 16 and Counter(one.stratum for one in samples)["legal"] == 8
    check(samples)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_sample() -> None:
    samples = sample(legal=100, per_rule=11)
    assert len(samples) >= 200
    check(samples)

"""The token source: the same samples in a step, whatever the layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trial_runner.rank.tokens import NoTokenizer
from trial_runner.rank.tokens import sample_tokens
from trial_runner.rank.tokens import TokenSource


def step_samples(replicas: int, batch: int, global_batch: int, step: int) -> set[bytes]:
    """The samples of one optimizer step over all data-parallel ranks."""
    found = []
    for rank in range(replicas):
        source = TokenSource(
            TokenSource.Config(vocab_size=100, seed=7),
            dp_world_size=replicas,
            dp_rank=rank,
            tokenizer=NoTokenizer(NoTokenizer.Config()),
            seq_len=16,
            local_batch_size=batch,
        )
        count = global_batch // (replicas * batch)
        for inputs, labels in itertools.islice(iter(source), step * count, (step + 1) * count):
            assert inputs["input"].shape == labels.shape == (batch, 16)
            assert (inputs["input"][:, 1:] == labels[:, :-1]).all()
            found += [row.numpy().tobytes() for row in inputs["input"]]
    assert len(found) == global_batch
    return set(found)


@pytest.mark.parametrize("step", [0, 3])
def test_every_layout_sees_the_same_samples_of_a_step(step: int) -> None:
    layouts = [(1, 8), (1, 1), (2, 4), (4, 1), (8, 1), (2, 2)]
    sets = [step_samples(replicas, batch, 8, step) for replicas, batch in layouts]
    assert all(found == sets[0] for found in sets) and len(sets[0]) == 8


def test_samples_are_deterministic_and_in_range() -> None:
    first, again, other = sample_tokens(1, 5, 64, 50), sample_tokens(1, 5, 64, 50), sample_tokens(1, 6, 64, 50)
    assert (first == again).all() and (first != other).any()
    assert first.min() >= 0 and first.max() < 50 and first.dtype == np.int64


def test_state_goes_on_where_it_was() -> None:
    def make() -> TokenSource:
        return TokenSource(
            TokenSource.Config(), dp_world_size=1, dp_rank=0, tokenizer=NoTokenizer(NoTokenizer.Config()),
            seq_len=8, local_batch_size=2,
        )  # fmt: skip

    source = make()
    stream = iter(source)
    next(stream)
    state = source.state_dict()
    expected = next(stream)[1]
    resumed = make()
    resumed.load_state_dict(state)
    assert (next(iter(resumed))[1] == expected).all()

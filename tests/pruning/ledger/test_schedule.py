from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pruning.ledger.pipeline import short_step
from pruning.ledger.pipeline import simulated
from pruning.ledger.schedule import BACKWARD
from pruning.ledger.schedule import bubble_over_useful
from pruning.ledger.schedule import inflight_chunks
from pruning.ledger.schedule import rank_order
from pruning.ledger.schedule import simulate
from pruning.ledger.schedule import WEIGHT
from search_space.stages import split_by_cost
from search_space.stages import split_layers


CASES = [
    ("Interleaved1F1B", 4, 2, 16),
    ("Interleaved1F1B", 4, 4, 8),
    ("InterleavedZeroBubble", 4, 2, 16),
    ("ZBVZeroBubble", 4, 2, 16),
    ("ZBVZeroBubble", 4, 2, 5),
    ("DualPipeV", 4, 2, 16),
    ("DualPipeV", 4, 2, 8),
]


def torch_order(schedule: str, ranks: int, stages: int, micro_batches: int, rank: int) -> list[tuple[int, int, int]]:
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = schedules.get_schedule_class(schedule)
    fields = {
        "pp_group_size": ranks,
        "_num_stages": ranks * stages,
        "num_stages": ranks * stages,
        "n_local_stages": stages,
        "_n_microbatches": micro_batches,
        "rank": rank,
        "number_of_rounds": max(1, micro_batches // ranks),
        "microbatches_per_round": micro_batches // max(1, micro_batches // ranks),
    }
    found: list[tuple[int, int, int]] = []

    def add(action: Any) -> None:
        if action is None:
            return
        for part in action.sub_actions or ():
            add(part)
        if action.computation_type == schedules.FORWARD:
            found.append((0, action.stage_index, action.microbatch_index))
        elif action.computation_type in (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT):
            found.append((1, action.stage_index, action.microbatch_index))

    holder = kind.__new__(kind)
    for name, value in fields.items():
        setattr(holder, name, value)
    for action in holder._calculate_single_rank_operations(rank):
        add(action)
    assert SimpleNamespace
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_orders_are_those_of_torch(case: tuple[str, int, int, int]) -> None:
    schedule, ranks, stages, micro_batches = case
    for rank in range(ranks):
        ours = [a for a in rank_order(schedule, ranks, stages, micro_batches, rank) if a[0] != WEIGHT]
        assert ours == torch_order(schedule, ranks, stages, micro_batches, rank)


@pytest.mark.parametrize(("ranks", "stages", "expected"), [(4, 2, 5.5), (8, 2, 11.5), (8, 4, 9.75)])
def test_interleaved_first_rank_holds_what_its_warm_up_says(ranks: int, stages: int, expected: float) -> None:
    assert inflight_chunks("Interleaved1F1B", ranks, stages, 4 * ranks)[0] / stages == expected


def test_even_stages_idle_as_the_closed_form_says() -> None:
    for ranks, stages, micro_batches in ((2, 1, 4), (4, 1, 16), (4, 4, 16), (8, 2, 32)):
        name = "Interleaved1F1B" if stages > 1 else "1F1B"
        step = simulate(name, ranks, stages, micro_batches, (3,) * (ranks * stages))
        idle = step.span / (sum(step.work) / ranks) - 1
        assert idle == pytest.approx(bubble_over_useful(ranks, micro_batches, stages))


def test_uneven_stages_idle_more_and_zero_bubble_less() -> None:
    even = simulated("1F1B", 4, 1, 16, (20, 20, 20, 20), 0.0)
    uneven = simulated("1F1B", 4, 1, 16, (20, 20, 20, 20), 1.5)
    folded = simulated("ZBVZeroBubble", 4, 2, 16, (10,) * 8, 0.0)
    assert even and uneven and folded
    assert folded[0] < even[0] < uneven[0]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"])
def test_long_steps_are_extended_as_they_would_be_simulated(schedule: str) -> None:
    stages = 1 if schedule == "1F1B" else 2
    held, head = split_layers(30, 4 * stages), 1.25
    for micro_batches in (16, 24, 48):
        assert short_step(schedule, 4, micro_batches) == 12
        whole = simulate(schedule, 4, stages, micro_batches, held, head)
        short = simulated(schedule, 4, stages, micro_batches, held, head)
        assert short is not None
        assert short[0] == pytest.approx(whole.span / (sum(whole.work) / 4) - 1, rel=0.02)
        assert short[1].inflight == whole.inflight


def test_no_schedule_runs_an_impossible_combination() -> None:
    assert simulated("Interleaved1F1B", 4, 2, 9, (1,) * 8, 0.0) is None
    assert simulated("DualPipeV", 4, 2, 4, (1,) * 8, 0.0) is None
    assert [a for a in rank_order("1F1B", 2, 1, 2, 0) if a[0] == BACKWARD] == [(1, 0, 0), (1, 0, 1)]


def test_layers_are_never_lost() -> None:
    assert sum(split_layers(61, 4)) == 61
    assert split_layers(8, 3) == (3, 3, 2)
    assert sum(split_by_cost(80, 8, 1.3)) == 80
    assert split_by_cost(80, 8, 1.3)[-1] < 10

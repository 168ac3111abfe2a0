"""Pipeline schedules: the order in which each rank works, and a simulation of one step.

Simulating gives what closed forms only approximate: idle time with uneven stages, and the block-micro-batches
that each rank really holds. Closed forms stay as checks in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from search_space.candidate import V_SCHEDULES


FORWARD, BACKWARD, WEIGHT = 0, 1, 2
Action = tuple[int, int, int]
"""Kind, stage, micro-batch."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that split backward into gradients of inputs (on the critical path) and of weights (fillers)."""

WAITING = 1.5
"""Size of a block that waits for its weight gradients over that of one that waits for its backward pass, about: PyTorch
2.14 lets go of nothing after the gradients of inputs, and keeps the gradients that weight gradients need."""


@dataclass(frozen=True)
class Simulated:
    """One step of a pipeline, in units of one block's forward pass."""

    span: float
    """Time from the first start to the last end."""

    work: tuple[float, ...]
    """Busy time by rank."""

    inflight: tuple[float, ...]
    """Block-micro-batches by rank that wait for their backward pass, when most is held."""

    waiting: tuple[float, ...]
    """Block-micro-batches that wait for their weight gradients, at that moment."""

    late_inflight: tuple[float, ...]
    """Those that wait for their backward pass when most wait for their weight gradients."""

    late_waiting: tuple[float, ...]
    """Most block-micro-batches that wait for their weight gradients."""

    chunks: tuple[float, ...]
    """Most stage-micro-batches held at once by rank."""


def rank_order(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, rank: int) -> list[Action]:
    """Actions of one rank under a schedule with a fixed order.

    1F1B: ranks - rank forwards, then backward and forward in turn. Interleaved: 2(ranks - rank - 1) +
    (stages_per_rank - 1) × round warm-up forwards, one each in turn (Narayanan et al. 2021; the same in
    torch.distributed.pipelining 2.14, where a round is m / max(1, m // ranks) micro-batches). Its zero-bubble form
    warms up half as long and delays weight gradients. GPipe: all forwards, then all backwards.
    """
    if schedule in V_SCHEDULES:
        order = _folded(schedule, ranks, micro_batches, rank)
        return [action for action in order if action[2] < micro_batches]
    total = micro_batches * stages_per_rank
    looped = schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    round_size = micro_batches // max(1, micro_batches // ranks) if looped else 1

    def action(kind: int, step: int) -> Action:
        if not looped:
            return kind, rank, step
        chunk = (step // round_size) % stages_per_rank
        if kind != FORWARD:
            chunk = stages_per_rank - 1 - chunk
        micro_batch = step // (round_size * stages_per_rank) * round_size + step % round_size
        return kind, chunk * ranks + rank, micro_batch

    if schedule == "GPipe":
        warmup = total
    elif looped:
        factor = 1 if schedule == "InterleavedZeroBubble" else 2
        warmup = min(total, (stages_per_rank - 1) * round_size + factor * (ranks - 1 - rank))
    else:
        warmup = min(total, ranks - rank - 1)
    order = [action(FORWARD, step) for step in range(warmup)]
    split = schedule in SPLIT_BACKWARD
    delay = rank if split else 0
    done = 0
    for step in range(warmup, total):
        order.append(action(FORWARD, step))
        order.append(action(BACKWARD, step - warmup))
        if split and step - warmup >= delay:
            order.append(action(WEIGHT, done))
            done += 1
    for step in range(total - warmup, total):
        order.append(action(BACKWARD, step))
        if split:
            order.append(action(WEIGHT, done))
            done += 1
    if split:
        order += [action(WEIGHT, step) for step in range(done, total)]
    return order


def _folded(schedule: str, ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """Order of one rank of a V schedule; it holds stage ``rank`` ("near") and its mirror ("far").

    Phases written as texts of (F)orward, (B)ackward of inputs, (W)eight gradients in capitals for the near stage
    and small letters for the far one; each phase repeats as often as stated. ZB-V after Qi et al. 2024, DualPipeV
    after DeepSeek's; counts as in torch.distributed.pipelining 2.14.
    """
    after = ranks - rank
    if schedule == "ZBVZeroBubble":
        m = max(micro_batches, 2 * ranks - 1)
        warm = "F" * (2 * after - 1) + "fF" * rank + "fbw" * after
        forwards = 2 * after - 1 + rank
        steady = "FBWfbw" * (m - forwards)
        drain = "BWfbw" * (m - rank - after - (m - forwards))
        text = warm + steady + drain + "Bb" * rank + "BW" * after
    else:
        main = max(0, micro_batches - 2 * ranks + rank + 1)
        late = rank + 1
        split = late // 2
        pairs = ["b" if i > split or (i == split and rank % 2) else "bw" for i in range(late)]
        nears = ["B" if i > split or i == split else "BW" for i in range(late)]
        text = (
            "F" * (2 * (after - 1))
            + "Ff" * (rank + 1)
            + "bwf" * (after - 1)
            + "FbwfBW" * main
            + "bwfBW" * (after - 1)
            + "".join(far + near for far, near in zip(pairs, nears))
            + "B" * (after - 1)
        )
    order: list[Action] = []
    counts = {letter: 0 for letter in "FBWfbw"}
    far = 2 * ranks - 1 - rank
    for letter in text:
        stage = rank if letter.isupper() else far
        order.append(("FBW".index(letter.upper()), stage, counts[letter]))
        counts[letter] += 1
    for letter in "wW":
        stage = rank if letter.isupper() else far
        order += [(WEIGHT, stage, i) for i in range(counts[letter], counts["F" if letter == "W" else "f"])]
    return order


@lru_cache(maxsize=65536)
def simulate(
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    micro_batches: int,
    held: tuple[int, ...],
    head: float = 0.0,
    backward: float = 2.0,
) -> Simulated:
    """Simulate one step.

    Args:
        schedule: one of the schedule names.
        ranks: pipeline ranks.
        stages_per_rank: stages on each rank.
        micro_batches: micro-batches of the step.
        held: blocks of each stage, as :func:`search_space.stages.split_layers` deals them out.
        head: forward time of the head and loss, in block forwards.
        backward: backward time of a block, in block forwards.

    Returns:
        Times in block forwards and held activations in block-micro-batches.
    """
    stages = ranks * stages_per_rank
    cost = [float(n) for n in held]
    cost[-1] += head
    orders = [rank_order(schedule, ranks, stages_per_rank, micro_batches, rank) for rank in range(ranks)]
    split = schedule in SPLIT_BACKWARD
    share = (1.0, backward / 2 if split else backward, backward / 2)
    never = -1.0
    forward_end = [[never] * micro_batches for _ in range(stages)]
    backward_end = [[never] * micro_batches for _ in range(stages)]
    clock, work = [0.0] * ranks, [0.0] * ranks
    now, waits = [0.0] * ranks, [0.0] * ranks
    most, late = [(0.0, 0.0)] * ranks, [(0.0, 0.0)] * ranks
    now_chunks, peak_chunks = [0.0] * ranks, [0.0] * ranks
    done = [0] * ranks
    left, moved = sum(len(order) for order in orders), True
    while left:
        if not moved:
            raise RuntimeError(f"{schedule} with {ranks} ranks and {micro_batches} micro-batches never ends")
        moved = False
        for rank in range(ranks):
            order, position, time = orders[rank], done[rank], clock[rank]
            while position < len(order):
                kind, stage, micro_batch = order[position]
                if kind == FORWARD:
                    ready = forward_end[stage - 1][micro_batch] if stage else 0.0
                elif kind == BACKWARD:
                    after = backward_end[stage + 1] if stage + 1 < stages else forward_end[stage]
                    ready = after[micro_batch]
                else:
                    ready = 0.0
                if ready < 0:
                    break
                seconds = cost[stage] * share[kind]
                time = (time if time > ready else ready) + seconds
                work[rank] += seconds
                if kind == FORWARD:
                    forward_end[stage][micro_batch] = time
                    now[rank] += held[stage]
                    now_chunks[rank] += 1
                    if now_chunks[rank] > peak_chunks[rank]:
                        peak_chunks[rank] = now_chunks[rank]
                else:
                    if kind == BACKWARD:
                        backward_end[stage][micro_batch] = time
                        now[rank] -= held[stage]
                        waits[rank] += held[stage] if split else 0
                    else:
                        waits[rank] -= held[stage]
                    now_chunks[rank] -= kind == WEIGHT or not split
                if now[rank] + WAITING * waits[rank] > most[rank][0] + WAITING * most[rank][1]:
                    most[rank] = now[rank], waits[rank]
                if waits[rank] > late[rank][1]:
                    late[rank] = now[rank], waits[rank]
                position += 1
            if position > done[rank]:
                moved = True
                left -= position - done[rank]
                done[rank], clock[rank] = position, time
    return Simulated(
        max(clock),
        tuple(work),
        tuple(live for live, _ in most),
        tuple(wait for _, wait in most),
        tuple(live for live, _ in late),
        tuple(wait for _, wait in late),
        tuple(peak_chunks),
    )


def inflight_chunks(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[float, ...]:
    """Most stage-micro-batches that each rank holds at once, one block in every stage."""
    stages = ranks * stages_per_rank
    return simulate(schedule, ranks, stages_per_rank, micro_batches, (1,) * stages).chunks


def bubble_over_useful(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Idle over useful time with even stages, (p-1)/(m·v) (Narayanan et al. 2021): the closed form."""
    return (ranks - 1) / (micro_batches * stages_per_rank)


def bubble_share_of_total(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Idle share of the whole step with even stages, (p-1)/(m·v + p-1): the closed form."""
    return (ranks - 1) / (micro_batches * stages_per_rank + ranks - 1)

"""Groups of measured rows as clusters that answer from their rows, and only for what was paid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path

import numpy as np

from pruning.accounts.account import Account
from pruning.assess import Assessment
from pruning.calibration import calibrate
from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.prices import prepare
from pruning.ledger.prices import Prepared
from pruning.ledger.prices import price_prepared
from pruning.ledger.prices import Prices
from pruning.validate.rows import read_table
from pruning.validate.run import fit_family
from pruning.validate.run import Group
from pruning.validate.run import group_rows
from pruning.validate.translate import CannotPrice
from pruning.validate.translate import Priced
from pruning.validate.translate import translate
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.rules import Judgement
from search_space.setting import Setting
from tuner.study.knowledge import chance_to_fit


FOLDS = 6
"""Most fits per family: a group is predicted by coefficients fitted without its own fold."""

HOPELESS = 0.001
"""Below this chance to fit in memory a candidate is refused."""

TRANSFER_SIGMA = 0.1
"""Log standard deviation by which each coefficient may differ from one group to the next."""


@dataclass(frozen=True)
class Part:
    """Candidates of a pool that share one account."""

    account: Account
    """Their framework's habits, kernels included."""

    index: np.ndarray
    """Their positions in the pool."""

    links: tuple[float, float]
    """Bandwidths inside a node and of the network, bytes/s and device."""

    prepared: Prepared
    """What of their prices does not depend on coefficients."""


@dataclass(frozen=True)
class TableLedger:
    """The ledger over a pool whose candidates differ in account (kernels) as well as in knobs."""

    pool: Pool
    """Every candidate."""

    setting: Setting
    """What is fixed."""

    parts: tuple[Part, ...]
    """The pool by account."""

    def assess(self, coefficients: Coefficients) -> Assessment:
        """Prices of the whole pool; refused is what has next to no chance to fit in memory."""
        prices = _merged(len(self.pool), [(p.index, price_prepared(p.prepared, coefficients)) for p in self.parts])
        feasible = chance_to_fit(prices, self.setting) >= HOPELESS
        lawful = Judgement((), np.zeros((0, len(self.pool)), dtype=bool))
        return Assessment(self.pool, self.setting, lawful, prices, feasible)

    def calibrate(self, start: Coefficients, observations: list[Observation]) -> Coefficients:
        """Coefficients after some trials, one account after the other."""
        part_of = np.zeros(len(self.pool), dtype=int)
        for number, part in enumerate(self.parts):
            part_of[part.index] = number
        mine: dict[int, list[Observation]] = defaultdict(list)
        for observation in observations:
            position = self.pool.position(observation.candidate)
            assert position is not None
            mine[int(part_of[position])].append(observation)
        for number, taught in sorted(mine.items()):
            part = self.parts[number]
            links = (np.full(len(taught), part.links[0]), np.full(len(taught), part.links[1]))
            start = calibrate(start, self.setting, taught, part.account, links)
        return start


def _merged(n: int, pieces: list[tuple[np.ndarray, Prices]]) -> Prices:
    width = max(piece.memory_by_rank_bytes.shape[1] for _, piece in pieces)
    names = [name for name in Prices.__dataclass_fields__ if name not in ("parts_s", "memory_by_rank_bytes")]
    arrays = {name: np.zeros(n) for name in names}
    parts = {name: np.zeros(n) for name in pieces[0][1].parts_s}
    by_rank = np.full((n, width), np.nan)
    for index, piece in pieces:
        for name in names:
            arrays[name][index] = getattr(piece, name)
        for name, values in parts.items():
            values[index] = piece.parts_s[name]
        by_rank[index, : piece.memory_by_rank_bytes.shape[1]] = piece.memory_by_rank_bytes
    return Prices(parts_s=parts, memory_by_rank_bytes=by_rank, **arrays)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a configuration did when it was measured."""

    step_time_s: float | None
    """Median of its measured step times; None: it ran out of memory."""


@dataclass
class TableCluster:
    """One group of a table. What it would answer stays closed until a candidate is paid."""

    table: str
    model: str
    gpus: int
    seq_len: int
    global_batch_seqs: int | None
    pool: Pool
    """Every distinct configuration that ran or ran out of memory."""

    ledger: TableLedger
    """Prices of the pool; knows configurations only."""

    coefficients: Coefficients
    """Fitted on other groups, or the shipped priors."""

    measured: int
    """Configurations that ran."""

    left_out: int
    """Configurations that failed for a reason other than memory, or of unknown reason."""

    _answers: list[Answer] = field(repr=False)

    @property
    def setting(self) -> Setting:
        """What the group's rows have in common."""
        return self.ledger.setting

    def answer(self, candidate: Candidate) -> Answer:
        """What a candidate does; asking is paying."""
        position = self.pool.position(candidate)
        assert position is not None
        return self._answers[position]

    def truth(self) -> np.ndarray:
        """Step time of every candidate, infinite where it runs out of memory, shape (n,): for the referee only."""
        return np.array([answer.step_time_s or np.inf for answer in self._answers])


def read_clusters(paths: Sequence[str | Path], least: int) -> list[TableCluster]:
    """The groups of some tables with at least ``least`` measured configurations.

    Raises:
        UserError: a table cannot be read, or no group is large enough.
    """
    rows: list[Priced] = []
    for path in paths:
        for row in read_table(path):
            try:
                rows.append(translate(row))
            except CannotPrice:
                continue
    groups = group_rows(rows)
    counted = [i for i, group in enumerate(groups) if _timed(group) >= least]
    if not counted:
        raise UserError(f"no group of these tables has {least} measured rows that can be priced")
    coefficients = held_out_coefficients(groups, counted)
    links = _links_of_others(groups)
    return [_cluster(groups[i], coefficients[i], links[i]) for i in counted]


def _timed(group: Group) -> int:
    return sum(1 for row in group.rows if row.row.step_time_s() and row.row.ranks)


def held_out_coefficients(groups: Sequence[Group], wanted: Sequence[int]) -> dict[int, Coefficients]:
    """For each wanted group the coefficients of a fit on other groups of its family.

    Groups go into folds by their place in the family; each fold is predicted by a fit from the priors on the groups
    of the other folds, so that nothing of a group's own rows is in it. A family of one group has the priors.
    """
    families: dict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        families[group.family].append(number)
    found: dict[int, Coefficients] = {}
    for numbers in families.values():
        folds = min(FOLDS, len(numbers))
        for fold in range(folds):
            inside = [number for place, number in enumerate(numbers) if place % folds == fold and number in wanted]
            others = [groups[number] for place, number in enumerate(numbers) if place % folds != fold]
            fitted = fit_family(others)[0] if inside and others else None
            for number in inside:
                start = prior(groups[number].blocks[0].setting)
                found[number] = _transferred(fitted.without([])) if fitted is not None else start
    return found


def _transferred(coefficients: Coefficients) -> Coefficients:
    """A fit's coefficients with room to differ in another group of the same family."""
    covariance = coefficients.covariance() + TRANSFER_SIGMA**2 * np.eye(len(coefficients.values))
    return replace(coefficients, log_covariance=tuple(tuple(map(float, row)) for row in covariance))


def _links_of_others(groups: Sequence[Group]) -> list[tuple[float, float]]:
    """For each group the median links of the other groups of its family that are as large: a probe's figure.

    A row's own probe was run just before it, so it belongs to what is paid.
    """
    found = []
    for number, group in enumerate(groups):
        hardware = group.blocks[0].setting.hardware
        pairs = [
            row.links
            for other, fellow in enumerate(groups)
            if other != number and fellow.family == group.family
            for row in fellow.rows
        ]
        several = [pair[1] for pair in pairs if pair[1] != hardware.nic_bandwidth]
        inside = [pair[0] for pair in pairs if pair[0] != hardware.domain_bandwidth]
        found.append(
            (
                float(np.median(inside)) if inside else hardware.domain_bandwidth,
                float(np.median(several)) if several and int(group.key[3]) > 8 else hardware.nic_bandwidth,
            )
        )
    return found


def _cluster(group: Group, coefficients: Coefficients, links: tuple[float, float]) -> TableCluster:
    accounts: list[Account] = []
    configurations: dict[Candidate, list[Priced]] = defaultdict(list)
    account_of: dict[Candidate, int] = {}
    for row in group.rows:
        if not row.row.ranks:
            continue
        if row.account not in accounts:
            accounts.append(row.account)
        number = accounts.index(row.account)
        # Kernels are no knob of a candidate; they stand in the knob that names a list of settings.
        candidate = replace(row.candidate, env=f"kernels{number}" if number else "default")
        configurations[candidate].append(row)
        account_of[candidate] = number
    candidates: list[Candidate] = []
    answers: list[Answer] = []
    left_out = 0
    for candidate, rows in configurations.items():
        times = [time for row in rows if (time := row.row.step_time_s())]
        if times:
            answers.append(Answer(step_time_s=float(np.median(times))))
        elif any(row.row.flag("oom") for row in rows):
            answers.append(Answer(step_time_s=None))
        else:
            left_out += 1
            continue
        candidates.append(candidate)
    pool = Pool.from_candidates(candidates)
    setting = replace(group.blocks[0].setting, memory_margin=0.0)
    numbers = np.array([account_of[candidate] for candidate in candidates])
    parts = []
    for number, account in enumerate(accounts):
        index = np.flatnonzero(numbers == number)
        if len(index):
            both = (np.full(len(index), links[0]), np.full(len(index), links[1]))
            parts.append(Part(account, index, links, prepare(pool.take(index), setting, account, both)))
    table, model, _, gpus, seq_len, batch = group.key
    return TableCluster(
        table=table,
        model=model,
        gpus=int(gpus),
        seq_len=int(seq_len),
        global_batch_seqs=int(float(batch)) if batch else None,
        pool=pool,
        ledger=TableLedger(pool, setting, tuple(parts)),
        coefficients=coefficients,
        measured=sum(1 for answer in answers if answer.step_time_s),
        left_out=left_out,
        _answers=answers,
    )

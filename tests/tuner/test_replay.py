"""Replays: the table answers for what was paid and for nothing else, at the stated costs, inside the budget."""

from __future__ import annotations

from collections.abc import Callable
import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tuner.cli import main
from tuner.replay.figures import GroupResult
from tuner.replay.figures import overall
from tuner.replay.play import Costs
from tuner.replay.play import play
from tuner.replay.play import Played
from tuner.replay.plot import curves
from tuner.replay.run import STRATEGIES
from tuner.replay.table import read_clusters
from tuner.replay.table import TableCluster


SAMPLE = Path(__file__).parents[1] / "data" / "measured_sample.csv"
COSTS = Costs()


@pytest.fixture(scope="module")
def clusters() -> list[TableCluster]:
    return read_clusters([SAMPLE], 8)


def changed(folder: Path, change: Callable[[int, dict[str, str]], None]) -> Path:
    """The sample with every row passed through ``change``."""
    with SAMPLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        change(i, row)
    path = folder / SAMPLE.name
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_sees_a_row_it_has_not_paid_for(strategy: str, clusters: list[TableCluster]) -> None:
    """Whatever the unpaid rows hold, the trials up to the next payment are the same."""
    for cluster in clusters:
        first = play(cluster, strategy, 3, COSTS, least=6, enough=np.inf)
        assert len(first.labels) == 6
        for paid in range(6):
            known = set(first.labels[:paid])
            answers = [
                answer
                if cluster.pool.candidate(i).label() in known
                else type(answer)(step_time_s=None if answer.step_time_s and i % 2 else 50.0 + i)
                for i, answer in enumerate(cluster._answers)
            ]
            other = TableCluster(**{**vars(cluster), "_answers": answers})
            again = play(other, strategy, 3, COSTS, least=paid + 1, enough=np.inf)
            assert again.labels[: paid + 1] == first.labels[: paid + 1]


def test_coefficients_of_a_group_know_nothing_of_its_own_rows(tmp_path: Path, clusters: list[TableCluster]) -> None:
    target = clusters[0]

    def spoil(_: int, row: dict[str, str]) -> None:
        if (row["model"], row["gpus"]) == (target.model, str(target.gpus)) and row["tokens_per_s_per_gpu"]:
            row["tokens_per_s_per_gpu"] = str(0.01 * float(row["tokens_per_s_per_gpu"]))
            row["peak_mem_gib"] = "3"
            row["notes"] = row["notes"].replace("intra 4", "intra 1")

    spoiled = read_clusters([changed(tmp_path, spoil)], 8)
    mine = next(c for c in spoiled if (c.model, c.gpus) == (target.model, target.gpus))
    theirs = next(c for c in spoiled if (c.model, c.gpus) != (target.model, target.gpus))
    assert mine.coefficients == target.coefficients
    assert theirs.coefficients != next(c for c in clusters if c.gpus == theirs.gpus).coefficients
    assert [part.links for part in mine.ledger.parts] == [part.links for part in target.ledger.parts]
    assert mine.truth().min() > 50 * target.truth().min()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_candidate_once_and_charged_as_stated(strategy: str, clusters: list[TableCluster]) -> None:
    costs = Costs(startup_s=10, steps=50, oom_s=7)
    cluster = clusters[-1]
    played = play(cluster, strategy, 0, costs)
    assert len(set(played.labels)) == len(played.labels) <= len(cluster.pool)
    paid = np.diff(played.device_s, prepend=0) / cluster.gpus
    ran = np.isfinite(played.step_time_s)
    assert paid[ran] == pytest.approx(10 + 50 * played.step_time_s[ran])
    assert (paid[played.oom] == 7).all() and played.oom.any()
    assert played.ended.startswith("every feasible")


@pytest.mark.parametrize("strategy", ["ours", "random"])
def test_budget_holds(strategy: str, clusters: list[TableCluster]) -> None:
    budget = 6 * clusters[0].gpus * 400.0
    played = play(clusters[0], strategy, 0, COSTS, budget)
    assert 0 < len(played.labels) < len(clusters[0].pool)
    assert played.device_s[-1] <= budget and played.ended.startswith("budget")


def test_an_out_of_memory_trial_keeps_larger_ones_out(clusters: list[TableCluster]) -> None:
    """No trial after an out-of-memory one needs as much memory as that one did, by the ledger's order."""
    for cluster in clusters:
        memory = cluster.ledger.assess(cluster.coefficients).prices.memory_bytes
        position = {cluster.pool.candidate(i).label(): i for i in range(len(cluster.pool))}
        played = play(cluster, "ledger", 0, COSTS)
        for i in np.flatnonzero(played.oom):
            after = [memory[position[label]] for label in played.labels[i + 1 :]]
            assert all(needed < memory[position[played.labels[i]]] for needed in after)


def result_of(cluster: TableCluster, times: list[float], ooms: list[bool]) -> GroupResult:
    spent = np.cumsum([cluster.gpus * COSTS.of(_answer(cluster, t)) for t in times])
    played = Played(
        step_time_s=np.array(times), device_s=spent, oom=np.array(ooms), labels=[str(t) for t in times], ended=""
    )
    return GroupResult(cluster, (played,), COSTS)


def _answer(cluster: TableCluster, time: float) -> object:
    return type(cluster._answers[0])(step_time_s=time if np.isfinite(time) else None)


def test_figures_of_a_known_replay(clusters: list[TableCluster]) -> None:
    cluster = clusters[0]
    best = float(cluster.truth().min())
    result = result_of(cluster, [np.inf, 1.2 * best, 1.04 * best, best], [True, False, False, False])
    found = result.to_json()
    assert found["trials_to_1pct"] == 4 and found["trials_to_5pct"] == 3 and found["oom_paid"] == 1
    assert found["device_s_to_1pct"] == pytest.approx(cluster.gpus * (120 + 3 * 180 + 100 * 3.24 * best))
    assert found["regret_pct_after"]["1"] is None
    assert found["regret_pct_after"]["3"] == pytest.approx(4)
    assert found["regret_pct_after"]["10"] == pytest.approx(0)
    never = result_of(cluster, [2 * best], [False])
    figures = overall([result, never, never], [result, result, result])
    assert figures["median_trials_to_1pct"] is None and figures["unreached_pct"] == pytest.approx(200 / 3)
    assert figures["worst_device_s_ratio_to_oracle"] is None
    drawn = curves([result], np.array([0.0, 1e3]))
    assert drawn[0, 0] == np.inf and drawn[0, 1] == pytest.approx(0)


def test_command_answers_with_the_contracts_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "regret.png"
    code = main(["replay", str(SAMPLE), "--strategy", "ours,tpe", "--seeds", "2", "--plot", str(picture), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and picture.stat().st_size > 5000
    assert list(document["strategies"]) == ["ours", "tpe"]
    ours = document["strategies"]["ours"]
    keys = {"table", "model", "gpus", "n", "device_s_to_1pct", "trials_to_1pct", "device_s_to_5pct"}
    assert keys | {"regret_pct_after", "oom_paid"} <= set(ours["groups"][0])
    assert set(ours["groups"][0]["regret_pct_after"]) == {"1", "3", "5", "10"}
    assert {
        "median_device_s_ratio_to_random",
        "median_device_s_ratio_to_oracle",
        "worst_device_s_ratio_to_oracle",
        "median_trials_to_1pct",
        "median_regret_after_3_pct",
        "median_oom_paid",
    } <= set(ours["overall"])
    assert ours["overall"]["median_trials_to_1pct"] <= document["strategies"]["tpe"]["overall"]["median_trials_to_1pct"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "magic"], "magic"),
        (["--seeds", "0"], "--seeds"),
        (["--least", "500"], "no group"),
        (["--budget", "much"], "budget"),
        (["--plot", "/nowhere/at/all.png"], "--plot"),
    ],
)
def test_wrong_requests_are_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(SAMPLE), "--strategy", "ledger", "--seeds", "1", *arguments]) == 2
    assert words in capsys.readouterr().err

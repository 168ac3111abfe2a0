"""What every storage of a study must do; subclasses say which one it is."""

from __future__ import annotations

import json
from pathlib import Path
import threading
from typing import Any

import pytest

from tests.tuner import pretend
from tests.tuner.test_cases_search import flat_prior
from tuner.study.asking import Asker


class StorageContract:
    """Tests of a storage.

    Subclasses give :meth:`address`: the shared database, or None for a file in the study's folder.
    """

    @pytest.fixture
    def address(self) -> str | None:
        """Where the study is kept."""
        raise NotImplementedError

    @pytest.fixture
    def asker(self, address: str | None, tmp_path: Path) -> Any:
        """Makes askers of one study; each opens the storage anew, as another process does."""
        plan = pretend.make_plan()

        def make(folder: Path = tmp_path, strategy: str = "ours") -> Asker:
            folder.mkdir(exist_ok=True)
            prior = flat_prior(plan.pool)
            return Asker(folder / "optuna.db", "s", plan.pool, lambda: prior, strategy, 0, address)

        make.pool = plan.pool  # type: ignore[attr-defined]
        return make

    def test_what_was_told_is_known_again(self, asker: Any) -> None:
        first = asker()
        trial, candidate = first.ask()
        first.tell_measured(trial, 0.5, number=0, mfu_pct=10.0)
        again = asker()
        assert again.left == len(asker.pool) - 1
        positions = again.left_positions()
        assert asker.pool.position(candidate) not in positions

    def test_never_the_same_candidate_twice(self, asker: Any) -> None:
        one, seen = asker(), set()
        for _ in range(len(asker.pool)):
            trial, candidate = one.ask()
            assert candidate.key() not in seen
            seen.add(candidate.key())
            one.tell_measured(trial, 0.5, number=0, mfu_pct=10.0)
        assert one.left == 0

    def test_workers_that_ask_at_once_get_different_ones(self, asker: Any) -> None:
        workers = [asker() for _ in range(4)]
        got: list[str] = []

        def work(worker: Asker) -> None:
            for _ in range(4):
                _, candidate = worker.ask()
                got.append(candidate.key())

        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 16 == len(set(got))

    def test_failures_are_told_and_interrupted_ones_asked_again(self, asker: Any) -> None:
        one = asker()
        failed, gone = one.ask()
        one.tell_failed(failed, 0.7, "out_of_memory")
        stopped, back = one.ask()
        one.tell_interrupted(stopped)
        one.ask()
        left = asker()
        left.free_running()
        positions = left.left_positions()
        assert asker.pool.position(gone) not in positions and asker.pool.position(back) in positions
        assert len(positions) == len(asker.pool) - 1

    def test_two_folders_of_one_name_stay_apart(self, asker: Any, tmp_path: Path) -> None:
        first = asker(tmp_path / "a")
        trial, _ = first.ask()
        first.tell_measured(trial, 0.5, number=0, mfu_pct=10.0)
        assert asker(tmp_path / "b").left == len(asker.pool)
        assert asker(tmp_path / "a").left == len(asker.pool) - 1

    def test_a_study_runs_is_cut_and_resumed(
        self, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        records = {"storage": address} if address else {}
        plan = pretend.make_plan(search={"max_trials": 5}, records=records)

        def cut(event: dict[str, Any]) -> None:
            if event["event"] == "trial" and event["number"] == 2:
                raise KeyboardInterrupt

        def world(candidate: Any, number: int) -> pretend.Behaviour:
            return pretend.Behaviour(step_s=0.4 + 0.01 * number)

        root = tmp_path / "s"
        clock = pretend.Clock()
        with pytest.raises(KeyboardInterrupt):
            pretend.run(monkeypatch, root, plan, world, 1e5, clock=clock, listeners=[cut])
        code, end = pretend.run(monkeypatch, root, plan, world, 1e5, clock=clock)
        assert code == 0
        searched = [t for t in end["trials"] if t["role"] in ("baseline", "search") and t["state"] != "failed"]
        keys = [json.dumps(trial["candidate"], sort_keys=True) for trial in searched]
        assert len(keys) == len(set(keys)) == 5
        assert (root / "optuna.db").exists() == (address is None)

"""Cases of searching: reports from other tools, each with what this product does instead."""

from __future__ import annotations

from dataclasses import replace
import json
import os
from pathlib import Path
import signal
import sqlite3
import threading
from typing import Any
import warnings

import numpy as np
import optuna
import pytest

from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.sampler import Prior
from search_space.setting import Setting
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import Clock
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tests.tuner.pretend import with_pool
from tuner.cli import main
from tuner.records.layout import network_mount
from tuner.records.layout import StudyFolder
from tuner.records.lease import lease
from tuner.study import storage
from tuner.study.asking import Asker
from tuner.study.deciding import EXHAUSTED
from tuner.study.lessons import Lessons
from tuner.study.storage import StudyStorage


QUIET = {"compile": (False,), "reshard_after_forward": ("default",)}


def flat_prior(pool: Pool) -> Prior:
    n = len(pool)
    return Prior(log_step_time=np.zeros(n), sigma=np.full(n, 0.3), cost=np.ones(n), allowed=np.full(n, True))


def asker_of(pool: Pool, strategy: str = "random", path: Path | None = None, seed: int = 0) -> Asker:
    prior = flat_prior(pool)
    return Asker(path, "s", pool, lambda: prior, strategy, seed)


def steady(candidate: Candidate, number: int) -> Behaviour:
    return Behaviour(step_s=0.3, noise=0.001)


def test_SEA_02_a_space_of_two_points_is_exhausted_in_two_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = with_pool(make_plan(budget={"confirm_share": 0.0}), [0, 1])
    _, end = run(monkeypatch, tmp_path / "s", plan, steady, budget_device_s=2000)
    assert len(end["trials"]) == 2 and end["reason"] == EXHAUSTED
    assert end["given_back_device_s"] == pytest.approx(2000 - end["spent_device_s"]) and end["given_back_device_s"] > 0
    assert main(["status", str(tmp_path / "s")]) in (0, 1)
    assert main(["budget", str(tmp_path / "s")]) == 0
    assert "given back" in capsys.readouterr().out


def test_SEA_04_running_trials_are_no_constraint_values_and_proposals_differ(cpu_setting: Setting) -> None:
    pool = enumerate_pool(cpu_setting, QUIET)
    asker = asker_of(pool, "tpe")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for i in range(14):
            trial, _ = asker.ask()
            if i % 3:
                asker.tell_measured(trial, 1.0 + i)
            else:
                asker.tell_failed(trial, 1.0, "out_of_memory")
        asked = [asker.ask() for _ in range(6)]
    assert len({candidate.key() for _, candidate in asked}) == 6
    assert all(not asker._study.trials[trial.number].system_attrs.get("constraints") for trial, _ in asked)


def test_SEA_06_a_study_goes_on_after_a_choice_was_added(cpu_setting: Setting, tmp_path: Path) -> None:
    few = enumerate_pool(cpu_setting, {**QUIET, "micro_batch": (1, 2)})
    more = enumerate_pool(cpu_setting, {**QUIET, "micro_batch": (1, 2, 4), "compile": (False, True)})
    first = asker_of(few, path=tmp_path / "o.db")
    records = []
    for number in range(5):
        trial, candidate = first.ask()
        first.tell_measured(trial, 1.0 + number)
        record = {"number": number, "role": "search", "candidate": candidate.to_json(), "mfu_pct": 1.0}
        records.append(record | {"step_time_s": 1.0 + number})
    second = asker_of(more, path=tmp_path / "o.db")
    second.adopt(records)
    told = [trial.value for trial in second._study.get_trials() if trial.value is not None]
    assert sorted(told) == [1.0, 2.0, 3.0, 4.0, 5.0]
    known = {Candidate.from_json(record["candidate"]).key() for record in records}
    _, candidate = second.ask()
    assert candidate.key() not in known and second.left == len(more) - 6
    left = second.left
    again = asker_of(more, path=tmp_path / "o.db")
    again.free_running()
    assert again.left == left + 1  # what was running is free again, nothing told is lost
    back = asker_of(few, path=tmp_path / "o.db")
    assert back.left == len(few) - 5


def test_SEA_07_choices_that_hang_on_another_choice_are_sampled_in_one_study(cpu_setting: Setting) -> None:
    pool = enumerate_pool(cpu_setting, QUIET)
    asker = asker_of(pool)
    seen: set[tuple[bool, str]] = set()
    while asker.left:
        trial, candidate = asker.ask()
        seen.add((candidate.pipeline_parallel > 1, candidate.schedule))
        asker.tell_measured(trial, 1.0)
    assert {schedule for pipelined, schedule in seen if not pipelined} == {"1F1B"}
    assert {schedule for pipelined, schedule in seen if pipelined} == {"1F1B", "Interleaved1F1B"}


def test_SEA_08_a_driver_that_was_blocked_takes_the_result_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Liveness comes from the gang: three minutes without a look fail no trial, and it is charged once."""
    clock = Clock()

    def block(event: dict[str, Any]) -> None:
        if event["event"] == "trial_placed" and event["number"] == 1:
            clock.sleep(180)

    plan = with_pool(make_plan(budget={"confirm_share": 0.0}), [0, 1, 3])
    _, end = run(monkeypatch, tmp_path / "s", plan, steady, 5000, clock=clock, listeners=[block])
    assert [trial["state"] for trial in end["trials"]] == ["measured"] * 3
    assert end["spent_device_s"] == pytest.approx(sum(trial["device_s"] for trial in end["trials"]), abs=0.01)
    assert Asker(None, "s", plan.pool, lambda: flat_prior(plan.pool), "random", 0)._study._storage is not None
    found = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 's' / 'optuna.db'}")
    assert [trial.state.name for trial in found.trials] == ["COMPLETE"] * 3


def failing(errors: dict[int, str]) -> Any:
    return lambda candidate, number: replace(steady(candidate, number), error=errors.get(number))


def test_SEA_09_retries_follow_the_class_of_the_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A network fault and a killed rank are tried once more, a wrong configuration is not."""
    plan = with_pool(make_plan(budget={"confirm_share": 0.0}), [0, 1, 3, 5])
    monkeypatch.setattr("tuner.study.deciding.OPTIMISM", 1e9)
    errors = {1: "Connection closed by peer", 2: "ncclRemoteError", 3: "ValueError: wrong"}
    _, end = run(monkeypatch, tmp_path / "s", plan, failing(errors), 5000)
    tries: dict[str, list[str]] = {}
    for trial in end["trials"]:
        key = Candidate.from_json(trial["candidate"]).key()
        tries.setdefault(key, []).append((trial["failure"] or {}).get("class", "measured"))
    assert any(outcomes[:1] == ["peer_lost"] for outcomes in tries.values())
    assert any(outcomes[-1] == "framework_invalid" for outcomes in tries.values())
    for outcomes in tries.values():
        assert len(outcomes) == (2 if outcomes[0] == "peer_lost" else 1), outcomes


def test_SEA_10_a_preempted_trial_is_put_back_and_a_broken_one_is_not(cpu_setting: Setting) -> None:
    def record(candidate: Candidate, kind: str) -> dict[str, Any]:
        return {"state": "failed", "candidate": candidate.to_json(), "failure": {"class": kind}}

    preempted, broken = Candidate(micro_batch=1), Candidate(micro_batch=2)
    once = [record(preempted, "node_lost"), record(broken, "framework_invalid")]
    pool = Pool.from_candidates([preempted, broken])

    def blocked(records: list[dict[str, Any]]) -> list[Candidate]:
        return Lessons(pool, cpu_setting).blocked_by(records)[0]

    assert blocked(once) == [broken]
    assert blocked([*once, record(preempted, "node_lost")]) == [broken, preempted]
    assert blocked([record(preempted, "driver_lost")] * 3) == []


def test_SEA_11_no_trial_is_lost_to_a_lock(cpu_setting: Setting, tmp_path: Path) -> None:
    """Eight tellers and a reader on one file; and two drivers cannot own one study."""
    path = tmp_path / "o.db"
    asker_of(enumerate_pool(cpu_setting, QUIET), path=path)
    reader = sqlite3.connect(path, check_same_thread=False)
    reader.execute("BEGIN EXCLUSIVE")
    threading.Timer(2.0, reader.rollback).start()
    faults: list[BaseException] = []

    def tell(worker: int) -> None:
        try:
            study = optuna.load_study(study_name="s", storage=StudyStorage(path).optuna)
            for i in range(4):
                study.tell(study.ask(), float(10 * worker + i))
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=tell, args=(worker,)) for worker in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults
    values = [trial.value for trial in optuna.load_study(study_name="s", storage=StudyStorage(path).optuna).trials]
    assert sorted(value for value in values if value is not None) == [10.0 * w + i for w in range(8) for i in range(4)]
    folder = StudyFolder(tmp_path / "study")
    with lease(folder), pytest.raises(UserError, match="is running already"), lease(folder):
        pass


def test_SEA_12_a_network_mount_is_seen_and_a_kill_loses_no_finished_trial(
    monkeypatch: pytest.MonkeyPatch, cpu_setting: Setting, tmp_path: Path
) -> None:
    table = tmp_path / "mounts"
    table.write_text(
        "/dev/sda1 / ext4 rw 0 0\nsrv:/x /home/team nfs4 rw 0 0\n/dev/sdb /home/team/fast xfs rw 0 0\n"
        "host: /mnt/over\\040there fuse.sshfs rw 0 0\n"
    )
    assert network_mount(Path("/home/team/studies/s"), table) == "nfs4"
    assert network_mount(Path("/home/team/fast/s"), table) is None
    assert network_mount(Path("/mnt/over there/s"), table) == "fuse.sshfs"
    assert network_mount(Path("/home/teammate"), table) is None
    assert network_mount(Path("/x"), tmp_path / "none") is None

    monkeypatch.setattr(storage, "network_mount", lambda path: "nfs4")
    pool = enumerate_pool(cpu_setting, QUIET)
    child = os.fork()
    if child == 0:
        asker = asker_of(pool, path=tmp_path / "o.db")
        for value in (1.0, 2.0, 3.0):
            asker.tell_measured(asker.ask()[0], value)
        asker.ask()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (tmp_path / "o.db").exists() and (tmp_path / "o.journal").exists()
    again = asker_of(pool, path=tmp_path / "o.db")
    again.free_running()
    values = [trial.value for trial in again._study.trials if trial.value is not None]
    assert values == [1.0, 2.0, 3.0] and again.left == len(pool) - 3


BIG = """
[model]
name = "405b"
layers = 126
hidden = 16384
heads = 128
kv_heads = 8
ffn = 53248
vocab = 128256
[cluster]
gpu = "H100-SXM"
gpus_per_node = 8
[recipe]
seq_len = 8192
global_batch_seqs = 16
[search]
tensor_parallel = [1, 2, 4, 8]
"""


def test_SEA_15_when_nothing_fits_the_tightest_term_and_what_helps_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(BIG)
    assert main(["plan", str(job), "--json"]) == 2
    short = json.loads(capsys.readouterr().out)["shortage"]
    assert short["tightest_term"] == "optimizer" and short["over_gib"] > 100
    # 405 G parameters × 16 bytes of states over 79.1 GiB a device
    assert short["devices_at_least"] == pytest.approx(405.8e9 * 16 / (79.1 * 2**30), rel=0.02)
    assert any("more devices" in text for text in short["help"])
    assert main(["plan", str(job)]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing fits" in text and "optimizer" in text


def test_SEA_15_a_study_of_a_model_that_fits_nowhere_spends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = make_plan()
    tiny = plan.setting.hardware.override(memory_bytes=1e6)
    plan = replace(plan, setting=replace(plan.setting, hardware=tiny))
    code, end = run(monkeypatch, tmp_path / "s", plan, steady, 5000)
    assert code == 2 and end["spent_device_s"] == 0 and not end["trials"]
    assert "what would help" in end["reason"] and end["near_misses"]


def test_SEA_16_a_refused_candidate_is_marked_wherever_it_is_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(BIG)
    main(["explain", str(job), "--candidate", "tp=1,dp=8", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["feasible"] is False
    assert document["verdict"]["reasons"][0]["code"] == "memory"
    main(["explain", str(job), "--candidate", "tp=1,dp=8"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "MFU" in line)
    assert "refused" in line
    main(["plan", str(job), "--json"])
    assert json.loads(capsys.readouterr().out)["candidates"] == []

"""A whole study on real training: two 2-rank trials through Ray, and everything that must come of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

from search_space.candidate import Candidate
from tests.e2e.conftest import environment
from tests.e2e.conftest import rank_pids
from tests.e2e.conftest import tune
from tests.e2e.conftest import write_job
from tuner.evidence.claim import Claim
from tuner.evidence.machine import Control
from tuner.repository import git


pytestmark = pytest.mark.e2e
Finished = tuple[Path, list[dict[str, Any]]]


def test_last_event_is_the_contract(finished: Finished) -> None:
    _, events = finished
    end = events[-1]
    assert end["event"] == "study_end"
    assert {"study", "trials", "baseline", "winner", "commit", "budget_device_s", "spent_device_s"} <= set(end)
    assert len(end["trials"]) == 2 and end["baseline"] == 0 and end["winner"] in (0, 1)
    for trial in end["trials"]:
        assert trial["state"] == "measured" and trial["failure"] is None
        assert trial["step_time_ci_s"][0] <= trial["step_time_s"] <= trial["step_time_ci_s"][1]
        assert 0 < trial["mfu_pct"] <= trial["hfu_pct"] and trial["peak_reserved_gib"] > 0.1
        assert trial["loss_first"] == pytest.approx(8.07, abs=0.15)
        assert trial["breakdown"]["step_s"] > 0
        assert (Path(trial["folder"]) / "clocks-node0.jsonl").read_text().count("unix_s") > 3
        assert trial["traces"] and all(Path(trace).stat().st_size > 1000 for trace in trial["traces"])
    assert Candidate.from_json(end["trials"][0]["candidate"]) != Candidate.from_json(end["trials"][1]["candidate"])
    assert 0 < end["spent_device_s"] <= end["budget_device_s"]
    assert end["spent_device_s"] == pytest.approx(
        end["probe_device_s"] + sum(trial["device_s"] for trial in end["trials"]), abs=0.1
    )


def test_status_and_report_agree_with_the_events(finished: Finished) -> None:
    studies, events = finished
    status = json.loads(tune(studies, "status", "done", "--json").stdout)
    for key in ("trials", "winner", "baseline", "commit", "spent_device_s"):
        assert status[key] == events[-1][key]
    assert status["state"] == "done"
    text = tune(studies, "report", "done").stdout
    assert "winner: trial" in text and events[-1]["commit"]["hash"] in text
    listed = json.loads(tune(studies, "list", "--json").stdout)["studies"]
    assert [study["study"] for study in listed] == ["done"]


def test_the_claim_says_how_fast_its_machine_was(finished: Finished) -> None:
    """The baseline ran the control, the proposed trial did not: only what is compared over hours does."""
    studies, events = finished
    baseline, other = events[-1]["trials"]
    assert baseline["control_s"] > 0 and baseline["control"] and "control_s" not in other
    before = Claim.read(studies / "done" / "claim.json").before
    assert before.control == Control(work=baseline["control"], runs_s=(baseline["control_s"],))


def test_every_rank_wrote_every_step(finished: Finished) -> None:
    studies, _ = finished
    for rank in (0, 1):
        lines = (studies / "done" / "trials" / "0000" / f"rank{rank}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines if '"step":' in line]
        assert [step["phase"] for step in steps] == ["warmup"] * 2 + ["measured"] * 4 + ["trace"] * 2


def test_committed_function_trains_outside_the_tuner(finished: Finished, tmp_path: Path) -> None:
    studies, events = finished
    commit = events[-1]["commit"]
    repository = Path(commit["repo"])
    names = git(repository, "show", "--name-only", "--format=", commit["hash"]).split()
    config = next(name for name in names if name.endswith(".py"))
    assert "tuning_ledger.csv" in names
    text = git(repository, "show", f"{commit['hash']}:{config}")
    assert "before: step" in text and "study: done" in text
    (tmp_path / config).write_text(text)
    function = Path(config).stem
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trial_runner.outside",
         "--synthetic-tokens", "--module", function, "--config", function, "--training.steps", "2"],
        cwd=tmp_path, env=environment(studies) | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "Training completed" in output


def test_mlflow_holds_every_trial(finished: Finished) -> None:
    studies, events = finished
    os.environ["MLFLOW_LOGGING_LEVEL"] = "ERROR"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{studies / 'done' / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("ledgertune")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if run.data.tags["ledgertune.kind"] == "study"]
    trials = sorted((run for run in runs if run not in parents), key=lambda run: run.data.tags["ledgertune.trial"])
    assert len(parents) == 1 and parents[0].info.status == "FINISHED"
    assert parents[0].data.tags["ledgertune.commit.hash"] == events[-1]["commit"]["hash"]
    for run, trial in zip(trials, events[-1]["trials"], strict=True):
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.data.metrics["mfu_pct"] == pytest.approx(trial["mfu_pct"])
        assert "predicted_step_time_s" in run.data.metrics
        assert run.data.params["tensor_parallel"] == str(trial["candidate"]["tensor_parallel"])
        assert len(client.get_metric_history(run.info.run_id, "step/step_time_s")) == 6
        names = {item.path for item in client.list_artifacts(run.info.run_id)}
        assert {"rank0.jsonl", "rank0.log", "rank0.trace.json.gz", "order.json"} <= names
        assert any(name.endswith(".py") for name in names)


def test_resume_with_more_budget_repeats_nothing(finished: Finished) -> None:
    """The study's trial limit is reached, so a resumed session ends at once, with everything still there."""
    studies, events = finished
    again = tune(studies, "resume", "done", "--budget", "0.3-gpu-hours", "--json")
    assert again.returncode == 0, again.stderr
    end = json.loads(again.stdout.splitlines()[-1])
    assert [trial["number"] for trial in end["trials"]] == [0, 1]
    assert end["budget_device_s"] == pytest.approx(1080)
    assert end["commit"]["hash"] == events[-1]["commit"]["hash"]


def test_nothing_is_left_running(finished: Finished) -> None:
    assert not rank_pids(finished[0])


def test_infeasible_job_ends_with_reasons_and_no_trial(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("gpus_per_node = 2", "gpus_per_node = 2\nhbm_gib = 0.1"))
    done = tune(studies, "start", str(job), "--budget", "0.1-gpu-hours", "--study", "s", "--json")
    assert done.returncode == 2
    end = json.loads(done.stdout.splitlines()[-1])
    assert end["feasible"] == 0 and end["trials"] == [] and end["spent_device_s"] == 0
    memory = next(group for group in end["rejected"] if group["code"] == "memory")
    assert memory["count"] > 0 and memory["example"]
    nearest = end["near_misses"][0]["reasons"][0]
    assert nearest["required"] > nearest["available"] and nearest["unit"] == "GiB"
    text = tune(studies, "status", "s").stdout
    assert "no candidate is feasible" in text and "nearest:" in text


def test_budget_below_the_baseline_is_exit_3(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    done = tune(studies, "start", str(write_job(tmp_path)), "--budget", "5-gpu-seconds", "--study", "s", "--json")
    assert done.returncode == 3
    end = json.loads(done.stdout.splitlines()[-1])
    assert "not even the baseline fits" in end["reason"] and end["spent_device_s"] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["start", "--budget", "forty"], "budget: found 'forty'"),
        (["start"], "needs a budget"),
        (["start", "nothing.toml", "--budget", "1-gpu-hour"], "does not exist"),
        (["status", "nothing"], "not found"),
        (["resume", "nothing"], "not found"),
    ],
)
def test_wrong_requests_get_one_line_and_exit_2(tmp_path: Path, args: list[str], words: str) -> None:
    done = tune(tmp_path / "studies", *args)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_unknown_model_and_unknown_function_are_said(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for name, words in (("llama9:x", "'llama9' cannot be imported"), ("llama3:llama3_9b", "llama3_8b")):
        wrong = tmp_path / "wrong.toml"
        wrong.write_text(job.read_text().replace("llama3:llama3_debugmodel", name))
        done = tune(tmp_path / "studies", "start", str(wrong), "--budget", "1-gpu-hour")
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_rehearsal_holds_devices_and_leaves_nothing_that_looks_measured(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    job = str(write_job(tmp_path, trials=3))
    done = tune(studies, "start", job, "--budget", "0.2-gpu-hours", "--study", "s", "--rehearse", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    end = events[-1]
    assert len(end["trials"]) == 3 and end["spent_device_s"] > 0 and end["commit"] is None
    for trial in end["trials"]:
        assert trial["step_time_s"] == pytest.approx(trial["predicted"]["step_time_s"], rel=0.1)
    assert not (studies / "s" / "coefficients.json").exists() and not (studies / "s" / "repository").exists()
    session = next(event for event in events if event["event"] == "session")
    assert any("nothing is trained" in note for note in session["notes"])
    log = (studies / "s" / "trials" / "0000" / "rank0.log").read_text()
    assert log.startswith("rehearsal: rank 0 of 2")

    refused = tune(studies, "start", job, "--budget", "0.2-gpu-hours", "--from", "s", "--study", "t")
    assert refused.returncode == 2 and "a rehearsal, nothing was measured there" in refused.stderr

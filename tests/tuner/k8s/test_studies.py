"""`tune k8s` against a server that answers like Kubernetes: submit, look, follow, stop, and never start twice."""

from __future__ import annotations

from collections.abc import Iterator
import json
from pathlib import Path
import threading
from typing import Any

import pytest

from tests.tuner.k8s.fake_api import Fake
from tests.tuner.k8s.fake_api import serve
from tuner.cli import main
from tuner.k8s import api as api_module
from tuner.k8s import studies
from tuner.k8s.render import JOB_HASH
from tuner.k8s.render import STUDY


JOB = """
[model]
torchtitan = "llama3:llama3_8b"
[cluster]
gpu = "H100-SXM"
gpus_per_node = 8
nodes = 2
[budget]
gpu_hours = 40
"""
IMAGE = "registry.acme.dev/ledgertune:0.1.0"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(api_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(studies, "LOOK_S", 0.02)
    with serve(tmp_path / "kubeconfig") as found:
        yield found


def submit(job: Path, *more: str) -> int:
    return main(["k8s", "submit", str(job), "--image", IMAGE, "--study", "one", "--json", *more])


def ended(fake: Fake, status: str, **more: Any) -> None:
    found = fake.get("rayjobs", "one")
    assert found is not None
    found["status"] = {"jobDeploymentStatus": status, **more}


def test_submit_makes_the_config_and_one_rayjob(fake: Fake, job: Path, capsys: Any) -> None:
    assert submit(job) == 0
    done = json.loads(capsys.readouterr().out)
    assert done == {"study": "one", "namespace": "ledgertune", "state": "submitted", "replaced": False}
    config, rayjob = fake.get("configmaps", "one"), fake.get("rayjobs", "one")
    assert config is not None and rayjob is not None
    assert config["data"]["job.toml"] == JOB
    assert rayjob["spec"]["backoffLimit"] == 0
    assert rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2


@pytest.mark.parametrize("state", ["", "Initializing", "Running", "Suspended", "Retrying"])
def test_a_second_submit_of_a_study_that_is_not_over_is_refused(fake: Fake, job: Path, capsys: Any, state: str) -> None:
    assert submit(job) == 0
    ended(fake, state)
    for more in ([], ["--again"]):
        capsys.readouterr()
        assert submit(job, *more) == 2
        assert "study one is on the cluster already" in capsys.readouterr().err
    assert fake.count("POST", "/rayjobs") == 1
    assert not [request for request in fake.requests if request[0] == "DELETE"]


def test_a_study_that_ended_goes_on_only_when_asked(fake: Fake, job: Path, capsys: Any) -> None:
    assert submit(job) == 0
    ended(fake, "Failed", reason="AppFailed", message="Job entrypoint command failed with exit code 130")
    assert submit(job) == 2
    assert "--again goes on with it by the budget it has left" in capsys.readouterr().err
    assert submit(job, "--again") == 0
    rayjob = fake.get("rayjobs", "one")
    assert rayjob is not None and "status" not in rayjob
    assert "--or-resume" in rayjob["spec"]["entrypoint"]
    assert fake.count("POST", "/rayjobs") == 2


def test_another_job_under_the_same_study_is_refused(fake: Fake, job: Path, capsys: Any) -> None:
    assert submit(job) == 0
    ended(fake, "Complete", jobStatus="SUCCEEDED")
    job.write_text(JOB + "\n[recipe]\nseed = 7\n")
    assert submit(job, "--again") == 2
    assert "is of another job file" in capsys.readouterr().err
    assert fake.count("POST", "/rayjobs") == 1


def test_a_submission_whose_answer_is_lost_is_not_sent_again(fake: Fake, job: Path) -> None:
    fake.faults.append(("POST", "/rayjobs", "arrive", ""))
    assert submit(job) == 0
    assert fake.count("POST", "/rayjobs") == 1
    assert fake.get("rayjobs", "one") is not None


@pytest.mark.parametrize("fault", ["drop", 503])
def test_a_submission_that_never_arrived_says_so(fake: Fake, job: Path, capsys: Any, fault: Any) -> None:
    fake.faults.append(("POST", "/rayjobs", fault, "etcd is away"))
    assert submit(job) == 2
    assert "submit it again: a study that is there is never started twice" in capsys.readouterr().err
    assert fake.count("POST", "/rayjobs") == 1
    assert submit(job) == 0


def test_two_submissions_at_once_start_one_study(fake: Fake, job: Path, capsys: Any) -> None:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(submit(job))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [0, 2, 2, 2, 2, 2]
    assert len([path for path in fake.objects if "/rayjobs/" in path]) == 1


def test_a_config_left_by_an_earlier_try_is_replaced_and_a_strangers_is_not(fake: Fake, job: Path, capsys: Any) -> None:
    fake.put("configmaps", {"metadata": {"name": "one", "labels": {STUDY: "one"}}, "data": {"job.toml": "old"}})
    assert submit(job) == 0
    config = fake.get("configmaps", "one")
    assert config is not None and config["data"]["job.toml"] == JOB
    fake.objects.clear()
    fake.put("configmaps", {"metadata": {"name": "one"}, "data": {"x": "theirs"}})
    assert submit(job) == 2
    assert "ConfigMap one is not ours" in capsys.readouterr().err
    assert fake.get("rayjobs", "one") is None


def test_reading_calls_are_tried_again(fake: Fake, job: Path, capsys: Any) -> None:
    assert submit(job) == 0
    fake.faults += [("GET", "/rayjobs/one", 503, ""), ("GET", "/rayjobs/one", "drop", ""), ("GET", "/pods", 429, "")]
    capsys.readouterr()
    assert main(["k8s", "status", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "not_started"


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (403, 'rayjobs.ray.io is forbidden: User "me" cannot create', "role ledgertune-submitter"),
        (403, "pods is forbidden: exceeded quota: gpus", "quota of namespace ledgertune is used up"),
        (401, "Unauthorized", "log in to the cluster again"),
        (422, "spec.x: Invalid value", "refused (422): spec.x: Invalid value"),
    ],
)
def test_a_refused_submission_says_why_and_leaves_nothing(
    fake: Fake, job: Path, capsys: Any, status: int, message: str, expected: str
) -> None:
    fake.faults.append(("POST", "/rayjobs", status, message))
    assert submit(job) == 2
    assert expected in capsys.readouterr().err
    assert fake.objects == {}


def test_a_cluster_without_the_operator_says_so(fake: Fake, job: Path, capsys: Any) -> None:
    fake.crd = False
    assert submit(job) == 2
    assert "KubeRay operator is not installed" in capsys.readouterr().err
    assert fake.objects == {}


def test_without_a_kubeconfig_the_message_says_what_to_do(
    job: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert submit(job) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_an_api_that_does_not_answer_is_named(fake: Fake, job: Path, capsys: Any) -> None:
    fake.faults += [("GET", "/rayjobs/one", "drop", "")] * api_module.TRIES
    assert submit(job) == 2
    assert "does not answer" in capsys.readouterr().err


def test_stop_removes_the_study_and_keeps_its_volume(fake: Fake, job: Path, capsys: Any) -> None:
    assert submit(job) == 0
    capsys.readouterr()
    assert main(["k8s", "stop", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"
    assert fake.objects == {}
    assert main(["k8s", "stop", "one"]) == 2
    assert "there is no study one" in capsys.readouterr().err


def test_logs_come_from_the_submitter_and_say_why_there_are_none(fake: Fake, job: Path, capsys: Any) -> None:
    assert submit(job) == 0
    capsys.readouterr()
    assert main(["k8s", "logs", "one"]) == 2
    assert "printed nothing yet: not started" in capsys.readouterr().err
    labels = {STUDY: "one", "app.kubernetes.io/component": "submitter"}
    fake.put("pods", {"metadata": {"name": "one-x", "labels": labels}, "status": {"phase": "Running"}})
    fake.log = '{"event": "planning"}\nlast é'
    assert main(["k8s", "logs", "one"]) == 0
    assert capsys.readouterr().out == '{"event": "planning"}\nlast é\n'
    assert ("GET", "/api/v1/namespaces/ledgertune/pods/one-x/log") in fake.requests
    fake.faults.append(("GET", "/log", 503, "the kubelet is away"))
    assert main(["k8s", "logs", "one"]) == 2
    assert "the log of pod one-x cannot be read: 503 the kubelet is away" in capsys.readouterr().err


def test_an_unknown_study_has_a_status(fake: Fake, capsys: Any) -> None:
    assert main(["k8s", "status", "nothing", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "not_submitted"


def test_the_hash_of_the_job_goes_with_it(fake: Fake, job: Path) -> None:
    assert submit(job) == 0
    rayjob = fake.get("rayjobs", "one")
    assert rayjob is not None and len(rayjob["metadata"]["annotations"][JOB_HASH]) == 64

"""Public reports about trackers, each as a test named after its case; the store is MLflow's own, in a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
import json
from pathlib import Path
import threading
import time
from typing import Any

import pytest

from tests.tuner import pretend
from tests.tuner.tracking.fake import FakeRemote
from tests.tuner.tracking.study import CANDIDATE
from tests.tuner.tracking.study import new_study
from tests.tuner.tracking.study import placed
from tests.tuner.tracking.study import session
from tests.tuner.tracking.study import trial
from tests.tuner.tracking.study import whole_study
from tests.tuner.tracking.study import write
from tests.tuner.tracking.test_sender import drain
from tuner.records.layout import StudyFolder
from tuner.records.tracking import tracker as tracker_module
from tuner.records.tracking.remote import Remote
from tuner.records.tracking.report import tracking_facts
from tuner.records.tracking.report import tracking_lines
from tuner.records.tracking.runs import config_hash
from tuner.records.tracking.runs import ID_TAG
from tuner.records.tracking.runs import Point
from tuner.records.tracking.runs import RunFacts
from tuner.records.tracking.sender import Sender
from tuner.records.tracking.tracker import Tracker


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An empty MLflow store; making one takes seconds, so the tests share it."""
    place = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{place}/mlflow.db"
    yield uri


def remote(store: str, experiment: str, tmp_path: Path) -> Remote:
    return Remote(store, experiment, tmp_path / "artifacts")


def client(store: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def run_facts(identity: str, **changes: Any) -> RunFacts:
    tags = {ID_TAG: identity, "ledgertune.kind": "trial", "ledgertune.study_id": identity.partition("/")[0]}
    return RunFacts(**{"name": "r", "started_ms": 1000, "tags": tags, **changes})


def send_to(store: str, folder: StudyFolder, experiment: str) -> Sender:
    sender = Sender(
        folder, "http://stands-for-it", experiment, 10**9, lambda: Remote(store, experiment, folder.root / "artifacts")
    )
    while sender.step(False):
        pass
    return sender


class TwentyMinutesOf500:
    """A server that answers, then only errors, then answers again."""

    def __init__(self) -> None:
        self.server = FakeRemote()
        self.broken = False
        self.server.fails = lambda when, name: self.broken and when == "before"


def test_MLF_01_an_outage_loses_nothing_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole pretended study on a server that fails from its second trial on: no trial fails, all arrives later."""
    server = TwentyMinutesOf500()
    monkeypatch.setattr(tracker_module, "PAUSES_S", (0.05,))
    made: list[Sender] = []

    def make(folder: StudyFolder, uri: str, experiment: str, cap: int) -> Sender:
        made.append(Sender(folder, uri, experiment, cap, lambda: server.server))  # type: ignore[arg-type, return-value]
        return made[-1]

    monkeypatch.setattr(tracker_module, "Sender", make)
    said: list[str] = []
    folder = StudyFolder(tmp_path / "s")
    folder.root.mkdir()
    folder.facts.write_text(json.dumps({"study": "s"}))
    tracker = Tracker(folder, "http://server", "e", said.append)

    def listener(event: dict[str, Any]) -> None:
        server.broken = server.broken or (event["event"] == "trial" and event["number"] == 1)
        tracker(event)

    plan = pretend.make_plan(search={"max_trials": 6})
    code, end = pretend.run(
        monkeypatch, folder.root, plan, lambda candidate, number: pretend.Behaviour(), 1e5, listeners=[listener]
    )
    tracker.close()
    assert code == 0 and all(trial["state"] == "measured" for trial in end["trials"])
    assert any("does not take records" in text for text in said) and any("tune sync" in text for text in said)
    assert len(server.server.of_trials()) < len(end["trials"])
    facts = tracking_facts(folder)
    assert facts is not None and facts["waiting_records"] > 0
    assert any("tune sync" in line for line in tracking_lines(folder))
    server.broken = False
    drain(folder, server.server)
    assert sorted(server.server.of_trials()) == sorted(trial["number"] for trial in end["trials"])
    facts = tracking_facts(folder)
    assert facts is not None and facts["waiting_records"] == 0 and facts["late_trials"]
    assert any("sent late" in line for line in tracking_lines(folder))
    assert "ledgertune.sent_late_s" in server.server.of_trials()[end["trials"][-1]["number"]]["tags"]


def test_MLF_02_the_study_never_waits_for_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs forever: telling the tracker of an event and closing it wait for nothing."""
    hang = threading.Event()

    class Hanging(FakeRemote):
        def experiment(self) -> str:
            hang.wait(30)
            raise ConnectionError

    monkeypatch.setattr(tracker_module, "FLUSH_S", 0.2)
    monkeypatch.setattr(
        tracker_module,
        "Sender",
        lambda f, u, e, c: Sender(f, u, e, c, lambda: Hanging()),  # type: ignore[arg-type, return-value]
    )
    folder, said = new_study(tmp_path / "s"), []
    whole_study(folder)
    tracker = Tracker(folder, "http://server", "e", said.append)
    began = time.perf_counter()
    for _ in range(1000):
        tracker({"event": "trial"})
    told = time.perf_counter() - began
    tracker.close()
    hang.set()
    assert told < 1.0, "telling waits for the server"
    assert said and "tune sync" in said[-1]


def test_MLF_03_nothing_stays_running(store: str, tmp_path: Path) -> None:
    """SIGTERM ends a session with ``interrupted``; kill -9 with nothing at all."""
    folder = new_study(tmp_path / "s")
    stopped = {"class": "interrupted", "rank": None, "text": "stopped"}
    write(folder, session(folder), placed(0), {"event": "trial", **trial(0, folder, state="stopped", failure=stopped)})
    write(folder, {"event": "study_end", "state": "interrupted", "reason": "interrupted"})
    state = send_to(store, folder, "three").state
    assert client(store).get_run(state.parent).info.status == "KILLED"
    assert client(store).get_run(state.trials["0"]).info.status == "KILLED"

    write(folder, session(folder), placed(1), placed(2))
    # A run of this study that a killed sender left open.
    ghost = client(store).create_run(state.experiment, tags={"ledgertune.study_id": state.study_id}).info.run_id
    state = send_to(store, folder, "three").state
    assert client(store).get_run(state.parent).info.status == "KILLED"
    assert client(store).get_run(ghost).info.status == "KILLED"
    write(folder, session(folder), {"event": "study_end", "state": "done", "reason": "x"})
    state = send_to(store, folder, "three").state
    statuses = {run.info.status for run in client(store).search_runs([state.experiment])}
    assert "RUNNING" not in statuses
    lost = client(store).get_run(state.trials["1"])
    assert lost.info.status == "FAILED" and lost.data.tags["ledgertune.failure.class"] == "driver_lost"


def test_MLF_04_an_exception_is_no_finished_run(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StudyFolder(tmp_path / "s")
    plan = pretend.make_plan(search={"max_trials": 3})

    def world(candidate: Any, number: int) -> pretend.Behaviour:
        return pretend.Behaviour()

    def explode(event: dict[str, Any]) -> None:
        if event["event"] == "trial" and event["number"] == 1:
            raise RuntimeError("the driver breaks")

    with pytest.raises(RuntimeError, match="driver breaks"):
        pretend.run(monkeypatch, folder.root, plan, world, 1e5, listeners=[explode])
    state = send_to(store, folder, "four").state
    parent = client(store).get_run(state.parent)
    assert parent.info.status == "FAILED" and parent.data.tags["ledgertune.failure.class"] == "RuntimeError"
    failed = {"class": "start_failed", "rank": None, "text": "RuntimeError: no"}
    write(folder, session(folder), {"event": "trial", **trial(8, folder, state="failed", failure=failed)})
    state = send_to(store, folder, "four").state
    run = client(store).get_run(state.trials["8"])
    assert run.info.status == "FAILED" and run.data.tags["ledgertune.failure.class"] == "start_failed"


def old_server(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    """An MLflow whose store takes shorter parameter values than the client thinks; the sizes of calls are noted."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
    from mlflow.tracking import MlflowClient

    sizes: list[int] = []
    real = MlflowClient.log_batch

    def log_batch(self: Any, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), **more: Any) -> Any:
        sizes.append(len(params))
        for param in params:
            if len(param.value) > limit:
                raise MlflowException(f"Param value had length {len(param.value)}", INVALID_PARAMETER_VALUE)
        return real(self, run_id, metrics=metrics, params=params, tags=tags, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    return sizes


@pytest.mark.parametrize("limit", [250, 500, 6000])
def test_MLF_05_one_long_value_stops_nothing(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    sizes = old_server(monkeypatch, limit)
    folder = new_study(tmp_path / "s")
    long = ",".join(f"layers.{i}" for i in range(1, 900))[:7000]
    candidate = {**CANDIDATE, "module_fqns_per_model_part": long, **{f"k{i}": i for i in range(240)}}
    write(folder, session(folder), {"event": "trial", **trial(0, folder, candidate=candidate)})
    state = send_to(store, folder, f"five{limit}").state
    params = client(store).get_run(state.trials["0"]).data.params
    assert params["k239"] == "239" and len(params) == len(candidate) + 1 and state.refused == []
    shown = params["module_fqns_per_model_part"]
    assert len(shown) <= limit and "7000 characters" in shown
    assert params["config_sha256"] == config_hash(candidate)
    assert max(sizes) <= 100
    path = client(store).download_artifacts(state.trials["0"], "record.json", str(tmp_path))
    assert json.loads(Path(path).read_text())["candidate"]["module_fqns_per_model_part"] == long


def test_MLF_06_configs_that_look_equal_differ_by_hash(store: str, tmp_path: Path) -> None:
    folder = new_study(tmp_path / "s")
    twins = [{**CANDIDATE, "long": "x" * 6500 + end} for end in ("a", "b")]
    records = [trial(number, folder, candidate=candidate) for number, candidate in enumerate(twins)]
    write(folder, session(folder), *({"event": "trial", **record} for record in records))
    state = send_to(store, folder, "six").state
    one, other = (client(store).get_run(state.trials[str(i)]).data.params for i in range(2))
    assert one["config_sha256"] != other["config_sha256"] and one["long"] != other["long"]


def test_MLF_06_nothing_reads_parameters_back() -> None:
    """The winner comes from the journal; only `watch`, which reads metrics of foreign runs, asks MLflow at all."""
    root = Path(__file__).parents[3]
    users = set()
    for package in ("tuner", "search_space", "pruning", "trial_runner", "dashboards"):
        for path in (root / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
            names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
            if any(name.split(".")[0] == "mlflow" for name in names):
                users.add(str(path.relative_to(root)))
    assert users == {
        "tuner/records/tracking/limits.py",
        "tuner/records/tracking/remote.py",
        "tuner/evidence/run_log.py",
    }
    assert ".params" not in (root / "tuner/evidence/run_log.py").read_text()


def test_MLF_07_one_path_one_outcome(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_server(monkeypatch, 250)
    server = remote(store, "seven", tmp_path)
    experiment = server.experiment()
    alone, beside = (server.ensure_run(experiment, run_facts(f"seven/{i}")) for i in range(2))
    value = "v" * 260
    assert server.log_params(alone, {"long": value}) == []
    fresh = remote(store, "seven", tmp_path)
    assert fresh.log_params(beside, {"long": value, "short": "1"}) == []
    one, other = (client(store).get_run(run).data.params["long"] for run in (alone, beside))
    assert one == other and len(one) == 250


def test_MLF_09_sending_again_is_bounded_and_changes_nothing(store: str, tmp_path: Path) -> None:
    """50,000 points twice on a server in memory; 2,000 of them twice on MLflow's own store."""
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    write(folder, session(folder), {"event": "trial", **trial(0, folder, steps=25_000)})
    drain(folder, server)
    first = server.points_sent
    held = len(server.of_trials()[0]["points"])
    (folder.root / "mlflow.json").unlink()
    drain(folder, server)
    assert len(server.of_trials()[0]["points"]) == held == 50_010
    assert server.points_sent == 2 * first, "more was sent than the points themselves"

    real = remote(store, "nine", tmp_path)
    run = real.ensure_run(real.experiment(), run_facts("nine/0"))
    points = [Point(key="step/loss", value=float(i), unix_ms=i, step=i) for i in range(2000)]
    for _ in range(2):
        real.log_points(run, points)
    assert len(client(store).get_metric_history(run, "step/loss")) == 2000


def test_MLF_13_a_lost_answer_makes_no_ghost(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first creation succeeds and its answer is lost; then a layer below creates twice in one call."""
    from mlflow.tracking import MlflowClient

    server = remote(store, "thirteen", tmp_path)
    experiment = server.experiment()
    create = MlflowClient.create_run
    with monkeypatch.context() as patch:

        def lost(self: Any, *args: Any, **more: Any) -> Any:
            create(self, *args, **more)
            raise ConnectionError("the answer is lost")

        patch.setattr(MlflowClient, "create_run", lost)
        with pytest.raises(ConnectionError):
            server.ensure_run(experiment, run_facts("thirteen/0"))

        def twice(self: Any, *args: Any, **more: Any) -> Any:
            create(self, *args, **more)
            return create(self, *args, **more)

        patch.setattr(MlflowClient, "create_run", twice)
        server.ensure_run(experiment, run_facts("thirteen/1"))
    again = server.ensure_run(experiment, run_facts("thirteen/0"))
    runs = client(store).search_runs([experiment])
    assert len(runs) == 2 and again in {run.info.run_id for run in runs}


def test_MLF_15_runs_are_named_never_active(store: str, tmp_path: Path) -> None:
    """Two threads log to two runs at once while a third run is the active one of this process."""
    import mlflow

    server = remote(store, "fifteen", tmp_path)
    experiment = server.experiment()
    runs = [server.ensure_run(experiment, run_facts(f"fifteen/{i}")) for i in range(2)]
    mlflow.set_tracking_uri(store)
    with mlflow.start_run(experiment_id=experiment) as active:
        threads = [
            threading.Thread(target=server.log_points, args=(run, [Point(key="k", value=float(i), unix_ms=1)]))
            for i, run in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [client(store).get_run(run).data.metrics["k"] for run in runs] == [0.0, 1.0]
    assert client(store).get_run(active.info.run_id).data.metrics == {}


def test_the_model_registry_stays_empty(store: str, tmp_path: Path) -> None:
    folder = new_study(tmp_path / "s")
    whole_study(folder)
    send_to(store, folder, "registry")
    assert client(store).search_registered_models() == [] and client(store).search_model_versions() == []


def test_secrets_in_files_stay_out_of_artifacts(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")
    folder = new_study(tmp_path / "s")
    record = trial(0, folder)
    (folder.trial(0) / "rank0.log").write_text("login with correct-horse-battery\n")
    write(folder, session(folder), {"event": "trial", **record})
    state = send_to(store, folder, "secrets").state
    path = client(store).download_artifacts(state.trials["0"], "rank0.log", str(tmp_path))
    assert Path(path).read_text() == "login with ***\n"

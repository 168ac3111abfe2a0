"""Ray metrics: what they show is what the summary says, and the Grafana page asks for names that exist."""

from __future__ import annotations

from importlib import resources
import json
from pathlib import Path
import re
from typing import Any

import pytest

from tests.dashboards.made_up import events
from tests.dashboards.made_up import write_study
from tuner.cluster.metrics import GAUGES
from tuner.cluster.metrics import PREFIX
from tuner.cluster.metrics import RayMetrics
from tuner.records.spending import spending
from tuner.records.summary import summarise


def read(metrics: RayMetrics) -> dict[tuple[str, ...], float]:
    """Values by name and tags."""
    return {(name, *tags.values()): value for name, tags, value in metrics.values()}


def no_warning(text: str) -> None:
    """A warning is a failure here."""
    pytest.fail(text)


@pytest.mark.parametrize("cut", [0, 1, 7, 41, 10_000])
def test_values_are_those_of_the_summary(tmp_path: Path, cut: int) -> None:
    """Whatever of the study ran in an earlier session, and whatever in this one."""
    lines = [line for line in events(30) if line["event"] != "heartbeat"]
    folder = write_study(tmp_path / "whole", lines)
    before = summarise(write_study(tmp_path / "before", lines[:cut]))
    metrics = RayMetrics("s", before.to_json(), no_warning)
    for line in lines[cut:]:
        metrics(line)
    found, told, account = read(metrics), summarise(folder), spending(folder)
    assert found[("spent_device_seconds",)] == pytest.approx(told.spent_device_s)
    assert found[("budget_device_seconds",)] == told.budget_device_s
    for state in ("measured", "failed", "stopped"):
        assert found[("trials", state)] == sum(trial["state"] == state for trial in told.trials)
    assert found[("trials", "running")] == found[("trials", "queued")] == 0
    for kind, seconds in account["by_kind_s"].items():
        assert found.get(("kind_device_seconds", kind), 0.0) == pytest.approx(seconds, abs=0.01)
    best = min((t for t in told.trials if t["state"] == "measured"), key=lambda t: t["step_time_s"])
    assert found[("best_mfu_percent",)] == best["mfu_pct"]
    assert found[("baseline_step_seconds",)] == told.trials[0]["step_time_s"]


def test_a_running_trial_counts_as_it_goes() -> None:
    metrics = RayMetrics("s", {}, no_warning)
    for line in (
        {"event": "session", "budget_device_s": 100.0},
        {"event": "trial_queued", "number": 0},
        {"event": "trial_queued", "number": 1},
        {"event": "trial_placed", "number": 0},
        {"event": "progress", "number": 0, "device_s": 12.5},
    ):
        metrics(line)
    found = read(metrics)
    assert found[("trials", "running")] == found[("trials", "queued")] == 1
    assert found[("spent_device_seconds",)] == 12.5


def test_every_name_is_declared() -> None:
    metrics = RayMetrics("s", {}, no_warning)
    for line in events(10):
        metrics(line)
    shown = {name for name, _, _ in metrics.values()}
    assert shown == set(GAUGES)
    for name, tags, _ in metrics.values():
        assert tuple(tags) == GAUGES[name][1]


def test_broken_metrics_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.util.metrics

    class Bad:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def set(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no agent")

    monkeypatch.setattr(ray.util.metrics, "Gauge", Bad)
    said: list[str] = []
    metrics = RayMetrics("s", {}, said.append)
    metrics({"event": "ray", "dashboard": None, "local": True})
    for line in events(3):
        metrics(line)
    assert said == ["Ray metrics are off: RuntimeError: no agent"]


def grafana() -> dict[str, Any]:
    """The dashboard."""
    path = resources.files("dashboards").joinpath("grafana", "ledgertune_studies.json")
    return dict(json.loads(path.read_text()))


def test_grafana_asks_for_metrics_and_tags_that_exist() -> None:
    page = grafana()
    asked: set[str] = set()
    for panel in page["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"ray_tune_(\w+)", target["expr"])
            assert names
            asked |= set(names)
            tags = {"study"}.union(*(GAUGES[name][1] for name in names))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= tags
            assert all(f'ray_{PREFIX}{name}{{study=~"$study"}}' in target["expr"] for name in names)
    assert asked == set(GAUGES), "every metric is drawn, and no other is asked for"
    variables = {variable["name"] for variable in page["templating"]["list"]}
    assert variables == {"datasource", "study"}


def test_grafana_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in grafana()["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in grafana()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells


@pytest.mark.e2e
def test_ray_exports_them(tmp_path: Path) -> None:
    """The names that Prometheus would scrape from a real Ray."""
    import time
    import urllib.request

    from tuner.cluster.session import join

    metrics = RayMetrics("my study", {}, no_warning)
    with join("cpu", 2, None, tmp_path):
        import ray

        metrics({"event": "ray", "dashboard": None, "local": True})
        for line in events(10):
            metrics(line)
        node = ray.nodes()[0]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        until = time.monotonic() + 60
        while True:
            text = urllib.request.urlopen(url, timeout=10).read().decode()
            missing = [name for name in GAUGES if f"ray_{PREFIX}{name}{{" not in text]
            if not missing or time.monotonic() > until:
                break
            time.sleep(1)
    assert not missing
    lines = [line for line in text.splitlines() if line.startswith(f"ray_{PREFIX}trials{{")]
    assert any('study="my study"' in line and 'state="failed"' in line for line in lines)

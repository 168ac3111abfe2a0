"""The Grafana dashboard loaded as Grafana's own schema reads it, and asked of a real Prometheus that scrapes Ray."""

from __future__ import annotations

from importlib import resources
import json
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.made_up import events
from tests.dashboards.made_up import write_study
from tests.services.prometheus import Prometheus
from tuner.cluster.metrics import GAUGES
from tuner.cluster.metrics import PREFIX
from tuner.cluster.metrics import RayMetrics
from tuner.cluster.session import join
from tuner.records.summary import summarise


pytestmark = pytest.mark.services


@pytest.fixture
def page() -> dict[str, Any]:
    """The dashboard as it is shipped."""
    path = resources.files("dashboards").joinpath("grafana", "ledgertune_studies.json")
    return dict(json.loads(path.read_text()))


def lost(given: Any, read: Any, at: str = "") -> list[str]:
    """What the reader did not keep of what it was given."""
    if isinstance(given, dict):
        if not isinstance(read, dict):
            return [at]
        return [place for key, value in given.items() for place in lost(value, read.get(key), f"{at}.{key}")]
    if isinstance(given, list):
        if not isinstance(read, list) or len(given) != len(read):
            return [at]
        return [place for i, pair in enumerate(zip(given, read)) for place in lost(*pair, f"{at}[{i}]")]
    return [] if given == read else [f"{at}: {given!r} → {read!r}"]


def test_grafanas_schema_reads_it_and_keeps_everything(page: dict[str, Any]) -> None:
    """Grafana's models know every key of the page, each panel's options as that kind of panel has them."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read = Dashboard.from_json(page)
    assert read.panels is not None and len(read.panels) == len(page["panels"])
    assert lost(page, json.loads(JSONEncoder(sort_keys=True).encode(read))) == []


def test_a_key_that_grafana_does_not_know_would_be_seen(page: dict[str, Any]) -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    page["panels"][0]["options"]["showTresholds"] = True
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(page)))
    assert lost(page, read) == [".panels[0].options.showTresholds: True → None"]


def test_prometheus_answers_every_panel_with_the_studys_figures(page: dict[str, Any], tmp_path: Path) -> None:
    lines = [line for line in events(10) if line["event"] != "heartbeat"]
    told = summarise(write_study(tmp_path / "study", lines))
    metrics = RayMetrics("my study", {}, pytest.fail)
    with join("cpu", 2, None, tmp_path):
        import ray

        metrics({"event": "ray", "dashboard": None, "local": True})
        for line in lines:
            metrics(line)
        node = ray.nodes()[0]
        with Prometheus(tmp_path, f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}") as prometheus:
            for name in GAUGES:
                prometheus.wait_for(f"ray_{PREFIX}{name}")
            variable = next(entry for entry in page["templating"]["list"] if entry["name"] == "study")
            assert variable["query"]["query"] == f"label_values(ray_{PREFIX}budget_device_seconds, study)"
            asked = {"match[]": f"ray_{PREFIX}budget_device_seconds"}
            assert prometheus.ask("label/study/values", **asked) == ["my study"]
            shown = {
                panel["title"]: [
                    prometheus.query(target["expr"].replace("$study", "my study")) for target in panel["targets"]
                ]
                for panel in page["panels"]
            }
    for panel in page["panels"]:
        assert all(shown[panel["title"]]), f"{panel['title']} is empty"
    best = min((t for t in told.trials if t["state"] == "measured"), key=lambda trial: trial["step_time_s"])
    assert shown["Best MFU"][0][0]["value"] == pytest.approx(best["mfu_pct"])
    spent = 100 * told.spent_device_s / told.budget_device_s
    assert shown["Budget spent"][0][0]["value"] == pytest.approx(spent)
    gain = 100 * (best["step_time_s"] / told.trials[0]["step_time_s"] - 1)
    assert shown["Step time against the baseline"][0][0]["value"] == pytest.approx(gain)

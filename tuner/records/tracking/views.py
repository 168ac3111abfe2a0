"""Where to look: addresses of a study's pages on an MLflow server, and a saved view of charts that fits a study.

MLflow 3 keeps a shared view as an experiment's tag ``mlflow.sharedViewState.KEY`` (a JSON text with
``compareRunCharts`` and ``compareRunSections``), and opens it by ``viewStateShareKey=KEY`` in the address of the runs
page.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote


VIEW_TAG = "mlflow.sharedViewState."
"""Experiment tag that holds a view, before its key."""

COMPARED = 100
"""Runs that a comparison names at most; browsers and servers take no endless address."""

KNOBS = ("tensor_parallel", "pipeline_parallel", "micro_batch", "activation_checkpoint", "compile")
"""Parameters in the parallel-coordinates chart."""


def view_key(study_id: str) -> str:
    """Name of a study's view."""
    return f"ledgertune-{study_id}"


def chart_view(study_id: str) -> str:
    """A study's saved view: MFU against memory, predicted against measured, knobs against MFU, what each trial took.

    The study's filter is in the view: an address that holds both a filter and a view's key shows no view.
    """
    section = {"uuid": "ledgertune", "name": "Study", "display": True, "isReordered": False}
    common = {
        "runsCountToCompare": COMPARED,
        "metricSectionId": section["uuid"],
        "deleted": False,
        "isGenerated": False,
    }

    def scatter(name: str, x: str, y: str) -> dict[str, Any]:
        axes = {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
        return {"uuid": f"ledgertune-{name}", "type": "SCATTER", **common, **axes}

    charts = [
        scatter("memory", "peak_reserved_gib", "mfu_pct"),
        scatter("predicted", "predicted_step_time_s", "step_time_s"),
        {
            "uuid": "ledgertune-knobs",
            "type": "PARALLEL",
            **common,
            "selectedParams": list(KNOBS),
            "selectedMetrics": ["mfu_pct"],
            "showAllRuns": False,
        },
        {
            "uuid": "ledgertune-steps",
            "type": "LINE",
            **common,
            "metricKey": "step/step_time_s",
            "selectedMetricKeys": ["step/step_time_s"],
            "lineSmoothness": 0,
            "xAxisScaleType": "linear",
            "scaleType": "linear",
            "range": {},
            "xAxisKey": "step",
            "selectedXAxisMetricKey": "",
            "yAxisKey": "metric",
            "yAxisExpressions": [],
            "ignoreOutliers": False,
            "useGlobalXaxisKey": True,
            "useGlobalLineSmoothing": True,
        },
    ]
    charts += [
        {
            "uuid": f"ledgertune-{key}",
            "type": "BAR",
            **common,
            "metricKey": key,
            "displayName": key,
        }
        for key in ("mfu_pct", "step_time_s", "device_s")
    ]
    # The page throws a view away that says nothing of its columns; these are the fields that its own ones have.
    state = {
        "searchFilter": f'tags."ledgertune.study_id" = "{study_id}" and tags."ledgertune.kind" = "trial"',
        # The best first; sorted by age, the page would fold the trials into their study, and chart none of them.
        "orderByKey": "metrics.`mfu_pct`",
        "orderByAsc": False,
        "selectedColumns": [],
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "SHOWALL",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    return json.dumps(state)


def page_urls(
    base: str, experiment: str | None, parent: str | None, trials: list[str], study_id: str = ""
) -> dict[str, str]:
    """Addresses of the server, the study's runs, its own run, its charts, and the comparison of its trials.

    Args:
        base: the server, as a browser reaches it.
        experiment: experiment's id.
        parent: run id of the study.
        trials: run ids of its trials.
        study_id: the study's id, to show its runs only.
    """
    base = base.rstrip("/")
    urls = {"mlflow": base}
    chosen = quote(f'tags."ledgertune.study_id" = "{study_id}"')
    mine = f"?searchFilter={chosen}" if study_id else ""
    if experiment and parent:
        urls["trials"] = f"{base}/#/experiments/{experiment}/runs{mine}"
        urls["study"] = f"{base}/#/experiments/{experiment}/runs/{parent}"
        runs_page = f"{base}/#/experiments/{experiment}/runs"
        urls["charts"] = f"{runs_page}?compareRunsMode=CHART&viewStateShareKey={view_key(study_id)}"
    if experiment and trials:
        runs, experiments = quote(json.dumps(trials[-COMPARED:])), quote(json.dumps([experiment]))
        urls["compare"] = f"{base}/#/compare-runs?runs={runs}&experiments={experiments}"
    return urls

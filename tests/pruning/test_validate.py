"""How measured rows are pooled and what of them counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pruning.validate.rows import read_table
from pruning.validate.run import validate
from pruning.validate.translate import probed_links
from pruning.validate.translate import translate
from search_space.hardware import find_hardware


SAMPLE = Path(__file__).parents[1] / "data" / "measured_sample.csv"


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def cells() -> list[dict[str, str]]:
    with SAMPLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_one_configuration_measured_often_ranks_once(tmp_path: Path) -> None:
    one = next(row for row in cells() if row["tokens_per_s_per_gpu"] and row["oom"] == "false")
    rows = [one | {"row_id": f"again-{i}", "step_time_s": str(1.0 + 0.1 * i)} for i in range(8)]
    (group,) = validate([write(tmp_path / "again.csv", rows)])["groups"]
    assert (group["n"], group["configurations"]) == (8, 1)
    assert group["top1_regret_pct"] is None and group["spearman"] is None
    assert group["top1_regret_rows_pct"] is not None

    other = one | {"row_id": "other", "micro_batch": str(2 * int(one["micro_batch"])), "step_time_s": "1.35"}
    (group,) = validate([write(tmp_path / "two.csv", [*rows, other])])["groups"]
    assert (group["n"], group["configurations"]) == (9, 2)
    # Their medians, 1.35 s each, tie: whichever the ledger picks costs nothing.
    assert group["top1_regret_pct"] == pytest.approx(0)


def test_memory_of_assumed_shapes_is_kept_apart(tmp_path: Path) -> None:
    known = next(row for row in cells() if row["peak_mem_gib"] and row["vocab"] and row["ffn"])
    unknown = known | {"row_id": "unshaped", "model": "somebodys", "vocab": ""}
    path = write(tmp_path / "nanotron_ultrascale_bench.csv", [known, unknown])
    assert [translate(row).shaped for row in read_table(path)] == [True, False]
    overall = validate([path])["overall"]
    assert list(overall["memory_mape_pct_by_table"]) == ["nanotron_ultrascale_bench"]
    assert list(overall["memory_mape_pct_assumed_shapes"]) == ["nanotron_ultrascale_bench"]


def test_probed_links_of_the_collectives_that_run(tmp_path: Path) -> None:
    probe = "measured busbw GB/s AR/AG/RS 200.0/80.0/80.0 intra 420.0/240.0/230.0"
    base = next(row for row in cells() if row["tokens_per_s_per_gpu"]) | {"gpus": "16", "notes": probe}
    rows = [base | {"tp": "8", "sp": "true"}, base | {"tp": "8", "sp": "false"}, base | {"tp": "1", "sp": "true"}]
    h100 = find_hardware("H100-SXM")
    found = [probed_links(row, h100) for row in read_table(write(tmp_path / "links.csv", rows))]
    assert [inside for inside, _ in found] == [230e9, 420e9, 420e9]
    assert {network for _, network in found} == {25e9}

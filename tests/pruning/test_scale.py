"""Larger runs predicted from the smallest: a table whose truth is the ledger with other coefficients."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pruning.coefficients import prior
from pruning.ledger.prices import price
from pruning.validate.rows import read_table
from pruning.validate.scale import validate_across_scale
from pruning.validate.translate import translate
from search_space.pool import Pool
from tuner.cli import main


HEADER = (
    "row_id framework framework_version hardware gpus model layers hidden heads kv_heads ffn vocab gated_mlp "
    "seq_len tp pp "
    "cp vp micro_batch global_batch_seqs act_ckpt step_time_s"
).split()


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADER, restval="")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Runs on 8, 32 and 128 GPUs of a machine whose products are slower and whose links are worse than believed."""
    shape = dict(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, gated_mlp="true")
    rows: list[dict[str, object]] = [
        {
            "row_id": f"{gpus}-{tp}-{b}-{ac}",
            "framework": "megatron",
            "hardware": "H100-SXM",
            "gpus": gpus,
            "model": "made-8b",
            "seq_len": 4096,
            "tp": tp,
            "pp": 1,
            "micro_batch": b,
            "global_batch_seqs": 16 * gpus,
            "act_ckpt": ac,
            "step_time_s": 1.0,
            **shape,
        }
        for gpus in (8, 32, 128)
        for tp in (1, 2, 4)
        for b in (1, 2)
        for ac in ("none", "full")
    ]
    path = tmp_path / "made.csv"
    write(path, rows)
    for row, read in zip(rows, read_table(path)):
        priced = translate(read)
        truth = prior(priced.setting)
        for name, factor in (("gemm_efficiency", 0.8), ("domain_share", 0.6), ("launch_s", 1.5)):
            truth = truth.with_value(name, factor * truth.value(name))
        found = price(Pool.from_candidates([priced.candidate]), priced.setting, truth, priced.account)
        row["step_time_s"] = float(found.step_time_s[0])
    write(path, rows)
    return path


def test_the_small_runs_tell_the_large_ones(table: Path) -> None:
    found = validate_across_scale([table])
    (series,) = found["series"]
    assert series["calibrated_on_gpus"] == 8 and series["calibrated_on_rows"] == 12
    assert [scale["gpus"] for scale in series["larger"]] == [32, 128]
    assert found["overall"]["rows"] == 24
    assert found["overall"]["median_mfu_error_pct"] < 3
    assert series["interval_coverage_pct"] > 90


def test_a_machine_that_breaks_down_at_scale_is_not_foretold(table: Path, tmp_path: Path) -> None:
    """The error is really against the larger rows: double their times and it is near 100%."""
    with table.open(newline="") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    for row in rows:
        if row["gpus"] != "8":
            row["step_time_s"] = str(2 * float(row["step_time_s"]))
    other = tmp_path / "slow.csv"
    write(other, rows)  # type: ignore[arg-type]
    assert validate_across_scale([other])["overall"]["median_mfu_error_pct"] == pytest.approx(100, abs=5)


def test_the_command(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(table), "--across-scale", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["series"] == 1
    assert main(["validate", str(table), "--across-scale", "--calibrate", "3"]) == 2


def test_one_scale_alone_says_nothing(tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with table.open(newline="") as file:
        rows = [dict(row) for row in csv.DictReader(file) if row["gpus"] == "8"]
    write(tmp_path / "one.csv", rows)  # type: ignore[arg-type]
    assert main(["validate", str(tmp_path / "one.csv"), "--across-scale"]) == 2
    assert "two device counts" in capsys.readouterr().err

"""MFU against scale: the plan's own best at every count, parts that add up, and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_space.errors import UserError
from tuner.cli import main
from tuner.scaling import parse_scales


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\ntorchtitan = "llama3:llama3_8b"\n[cluster]\ngpu = "H100-SXM"\ngpus_per_node = 8\nnodes = 8\n'
        "[recipe]\nseq_len = 8192\nglobal_batch_seqs = 512\n"
    )
    return path


def test_each_scale_is_the_plans_best_there(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--scaling", "512,8,64", "--json", "--plot", str(tmp_path / "s.png")]) == 0
    found = json.loads(capsys.readouterr().out)["scaling"]
    assert [entry["devices"] for entry in found] == [8, 64, 512]
    for entry in found:
        assert sum(entry["points"].values()) + entry["mfu_pct"] == pytest.approx(100)
        assert entry["global_batch_seqs"] == 512 and entry["limiting_part"] in entry["parts_s"]
    assert main(["plan", str(job), "--top", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert found[1]["candidate"] == best["candidate"] and found[1]["mfu_pct"] == pytest.approx(best["mfu_pct"])
    # With the batch fixed, more devices leave fewer tokens each: what grew is not the kernels.
    assert found[0]["mfu_pct"] > found[2]["mfu_pct"]
    assert found[2]["limiting_part"] in ("exposed_communication", "bubble", "straggler", "cpu_launch")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_a_batch_that_grows(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--scaling", "8,64", "--batch", "per-device", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scaling"]
    assert [entry["global_batch_seqs"] for entry in found] == [64, 512]


def test_scales_where_nothing_fits_say_why(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(job.read_text().replace("llama3_8b", "llama3_405b"))
    assert main(["plan", str(job), "--scaling", "8"]) == 2
    assert "memory" in capsys.readouterr().out
    assert main(["plan", str(job), "--scaling", "8", "--plot", "x.png"]) == 2
    assert "nothing to draw" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "8,x", "0", "-8", "8;64"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="device counts"):
        parse_scales(text)


def test_a_picture_needs_a_scaling(job: Path) -> None:
    assert main(["plan", str(job), "--plot", "x.png"]) == 2
    assert main(["plan", str(job), "--scaling", "12"]) == 2

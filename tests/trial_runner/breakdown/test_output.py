"""JSON, terminal and page: the same figures, hostile names harmless."""

from __future__ import annotations

import argparse
from html.parser import HTMLParser
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.setting import Setting
from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import PARTS
from trial_runner.breakdown.html import page
from trial_runner.breakdown.ideal import ideal_by_rank
from trial_runner.breakdown.render import show
from trial_runner.breakdown.render import waterfall
from tuner.cli import breakdown as verb


HOSTILE = "<script>alert(1)</script>[/red][bold]Zq\x1b[2J"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    built = synth.Trace(world_size=1)
    for number in range(3):
        at = number * 1000
        built.step(number, at, 1000 - 100 * number)
        built.kernel(synth.GEMM, at, 600)
        built.kernel(HOSTILE, at + 600, 100)
        built.kernel(synth.ALL_REDUCE, at + 650, 100, stream=synth.COMM_STREAM)
    return built.write(tmp_path / "rank0.json")


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    return parser.parse_args(["breakdown", *arguments])


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    args = command(*arguments)
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_json_has_the_keys_of_the_contract(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(call(capsys, str(trace), "--ideal-s", "0.0005", "--json"))
    assert {"steps", "stragglers", "warnings"} <= set(document)
    assert len(document["steps"]) == 3
    for step in document["steps"]:
        assert set(step["parts_s"]) == set(PARTS)
        for key in ("file", "rank", "step", "ideal_s", "coverage_pct", "launches", "kernels", "unknown_kernels"):
            assert key in step
        total = step["useful_s"] + sum(step["parts_s"].values()) + step["unexplained_s"]
        assert total == pytest.approx(step["step_s"], abs=1e-6)
        assert step["mfu_pct"] == pytest.approx(100 * 0.0005 / step["step_s"])


def test_one_step_and_the_median_step(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, number in (("2", 2), ("median", 1)):
        document = json.loads(call(capsys, str(trace), "--step", asked, "--json"))
        assert [step["step"] for step in document["steps"]] == [number]
    for asked, text in (("7", "step 7 is not"), ("x", "step 'x'")):
        args = command(str(trace), "--step", asked)
        with pytest.raises(UserError, match=text):
            args.run(args)


def test_a_folder_is_its_traces(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.json").write_text("{}")
    document = json.loads(call(capsys, str(tmp_path), "--json"))
    assert {step["file"] for step in document["steps"]} == {str(trace)}
    (tmp_path / "empty").mkdir()
    args = command(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no trace in this folder"):
        args.run(args)


def test_ideal_above_compute_is_an_error(trace: Path) -> None:
    args = command(str(trace), "--ideal-s", "0.00071")
    with pytest.raises(UserError, match=r"ideal time 0\.000710 s is above the 0\.000700 s"):
        args.run(args)
    for value in ("0", "-1", "nan", "inf"):
        args = command(str(trace), "--ideal-s", value)
        with pytest.raises(UserError, match="ideal time"):
            args.run(args)


def test_ideal_by_rank_wins(trace: Path) -> None:
    result = break_down([trace], ideal_s=0.0001, ideal_by_rank_s={0: 0.0002})
    assert {step.useful_s for step in result.steps} == {0.0002}


def test_expected_from_a_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = tmp_path / "expected.json"
    expected.write_text('{"cpu_launch": [0, 0.000001]}')
    document = json.loads(call(capsys, str(trace), "--expected", str(expected), "--json"))
    assert document["findings"][0]["part"] == "cpu_launch"
    assert "cause:" in call(capsys, str(trace), "--expected", str(expected))
    for text in ("[]", "{", '{"bubble": 3}'):
        expected.write_text(text)
        args = command(str(trace), "--expected", str(expected))
        with pytest.raises(UserError, match="--expected"):
            args.run(args)


def test_options_that_do_not_go_together(trace: Path, tmp_path: Path) -> None:
    for arguments, text in (
        (["--candidate", "tp=2"], "belongs to a job"),
        (["--peak-tflops", "0"], "positive"),
        (["--clocks", str(tmp_path / "none")], "cannot be read"),
        (["--html", str(tmp_path / "none" / "x.html")], "cannot be written"),
    ):
        args = command(str(trace), *arguments)
        with pytest.raises(UserError, match=text):
            args.run(args)


JOB = """
[model]
layers = 6
hidden = 256
heads = 16
ffn = 768
vocab = 2048
[cluster]
gpu = "cpu"
gpus_per_node = 2
peak_tflops = 0.2
[recipe]
seq_len = 128
global_batch_seqs = 8
precision = "fp32"
"""
FULL_AC = str(Path(__file__).parents[2] / "data" / "traces" / "torchtitan_cpu__full_ac__rank0.json.gz")


def test_a_job_gives_ideal_time_and_expected_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    document = json.loads(call(capsys, FULL_AC, "--job", str(job), "--step", "9", "--json"))
    ideal = document["steps"][0]["ideal_s"]
    assert document["expected_s"] == {}
    ran = ("--candidate", "dp=2,ac=full")
    document = json.loads(call(capsys, FULL_AC, "--job", str(job), *ran, "--step", "9", "--json"))
    assert document["steps"][0]["ideal_s"] == pytest.approx(ideal)
    assert set(document["expected_s"]) == set(PARTS)
    low, high = document["expected_s"]["recompute"]
    assert 0 < low < high
    assert document["steps"][0]["matrix_products"][0]["efficiency_pct"] is not None
    assert "expected" in call(capsys, FULL_AC, "--job", str(job), *ran)
    job.write_text(JOB + "[baseline]\ndata_parallel_shard = 2\n")
    document = json.loads(call(capsys, FULL_AC, "--job", str(job), "--json"))
    assert document["expected_s"]["recompute"] == [0.0, 0.0]
    assert any(finding["part"] == "recompute" for finding in document["findings"])
    args = command(FULL_AC, "--job", str(job), "--candidate", "dp=3")
    with pytest.raises(UserError, match="3"):
        args.run(args)


def test_terminal_shows_every_part_and_no_control_codes(trace: Path) -> None:
    text = io.StringIO()
    show(break_down([trace], ideal_s=0.0005), Console(file=text, width=150, force_terminal=False))
    shown = text.getvalue()
    for label in ("pipeline bubble", "exposed communication", "unexplained", "coverage 87.5%", "MFU 50.00%"):
        assert label in shown
    assert "\x1b" not in shown


def test_waterfall_goes_from_ideal_to_the_step(trace: Path) -> None:
    for step in break_down([trace], ideal_s=0.0005).steps:
        rows = waterfall(step)
        assert rows[0][0] == "useful" and rows[-1][0] == "unexplained"
        assert rows[-1][1] + rows[-1][2] == pytest.approx(step.step_s, abs=1e-6)


class Tags(HTMLParser):
    """Collects tags and whether each closes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


def test_page_is_self_contained_and_escapes_names(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    call(capsys, str(trace), "--ideal-s", "0.0005", "--html", str(target))
    text = target.read_text()
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.seen and "link" not in tags.seen and "img" not in tags.seen
    assert tags.seen.count("svg") == 3
    assert "&lt;script&gt;" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_page_shows_stragglers_findings_and_tables(tmp_path: Path) -> None:
    from tests.trial_runner.breakdown.test_advice import run

    result: Breakdown = run(tmp_path, {part: (0.0, 0.0) for part in PARTS})
    text = page(result)
    for part in ("Ranks that others waited for", "Expected against found", "1024 × 16032 × 4096", "all_gather"):
        assert part in text


def test_ideal_time_of_pipeline_ranks_follows_their_layers() -> None:
    shape = ModelShape(layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=1000)
    setting = Setting(
        shape=shape,
        hardware=find_hardware("H100-SXM"),
        devices_per_node=8,
        nodes=1,
        seq_len=128,
        global_batch_seqs=16,
    )
    flat = ideal_by_rank(setting, Candidate(data_parallel_shard=8))
    assert set(flat) == set(range(8))
    assert all(value == pytest.approx(setting.ideal_s) for value in flat.values())
    piped = ideal_by_rank(setting, Candidate(pipeline_parallel=2, schedule="1F1B", data_parallel_shard=4))
    assert sum(piped.values()) / 8 == pytest.approx(setting.ideal_s)
    assert piped[0] == piped[3] < piped[4] == piped[7]
    head = 6 * 1000 * 64 * setting.tokens_per_step / 4 / setting.hardware.peak("bf16")
    assert piped[4] - piped[0] == pytest.approx(head)

"""Planning of the 70B job on 1,024 H100, as a library and on the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

from pruning.coefficients import prior
from pruning.explain import explain
from search_space.errors import UserError
from search_space.job_file import parse_job
from search_space.resolve import setting_from_job
from tuner.cli import explain as explain_verb
from tuner.cli import plan as plan_verb
from tuner.cli import validate as validate_verb


JOB = """
[model]
torchtitan = "llama3:llama3_70b"

[cluster]
gpu = "H100-SXM"
gpus_per_node = 8
nodes = 128

[recipe]
seq_len = 8192
global_batch_tokens = 4_194_304

[search]
framework = "{framework}"

[measure]
memory_margin = 0.1
"""


def document(framework: str, top: int = 10) -> dict[str, Any]:
    return plan_verb.plan(parse_job(JOB.format(framework=framework)), top, 5)


def call(verb: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args([verb.__name__.rsplit(".", 1)[1], *arguments])
    return int(args.run(args))


def test_megatron_plan_has_the_two_known_good_layouts_in_its_top_ten() -> None:
    found = document("megatron")
    assert found["enumerated"] == found["feasible"] + sum(group["count"] for group in found["rejected"])
    layouts = {
        (c["candidate"]["tensor_parallel"], c["candidate"]["pipeline_parallel"], c["candidate"]["virtual_stages"])
        for c in found["candidates"]
    }
    assert (8, 4, 4) in layouts and (8, 2, 4) in layouts
    best = found["candidates"][0]
    assert sum(best["parts_s"].values()) + best["ideal_s"] == pytest.approx(best["step_time_s"])
    low, high = best["mfu_pct_interval"]
    assert low < best["mfu_pct"] < high and 35 < best["mfu_pct"] < 50


def test_candidate_c_is_refused_for_memory_with_the_numbers() -> None:
    setting = setting_from_job(parse_job(JOB.format(framework="megatron")))
    candidate = explain_verb.candidate_from("tp=8,pp=1,dp=128,b=1", "megatron", 1024)
    found = explain(candidate, setting)
    (reason,) = found["verdict"]["reasons"]
    assert not found["verdict"]["feasible"] and reason["code"] == "memory"
    assert reason["required"] > reason["available"] and reason["unit"] == "GiB"
    assert found["to_become_feasible"]
    for name in ("tp=8,pp=4,vp=4,dp=32,b=1", "tp=8,pp=2,vp=4,dp=64,b=1"):
        assert explain(explain_verb.candidate_from(name, "megatron", 1024), setting)["verdict"]["feasible"]


def test_the_fully_sharded_variant_loses_by_its_traffic_between_nodes() -> None:
    setting = setting_from_job(parse_job(JOB.format(framework="torchtitan")))
    seconds = {}
    for name in ("tp=8,dp=128,b=1", "tp=8,dp=128,b=1,nosync=on"):
        found = explain(explain_verb.candidate_from(name, "torchtitan", 1024), setting)
        rows = [row for row in found["communication"] if row["dimension"] == "data"]
        assert all(row["link"] == "network" for row in rows)
        seconds[name] = sum(row["bytes"] for row in rows) / setting.hardware.nic_bandwidth
    assert seconds["tp=8,dp=128,b=1"] == pytest.approx(5.6, abs=0.1)
    assert seconds["tp=8,dp=128,b=1,nosync=on"] == pytest.approx(3.5, abs=0.1)


def test_interleaving_holds_more_than_one_forward_one_backward() -> None:
    setting = setting_from_job(parse_job(JOB.format(framework="torchtitan")))
    plain = explain(explain_verb.candidate_from("tp=8,pp=4,dp=32,b=1", "torchtitan", 1024), setting)
    looped = explain(explain_verb.candidate_from("tp=8,pp=4,vp=2,dp=32,b=1", "torchtitan", 1024), setting)
    assert plain["pipeline"]["inflight_by_rank"] == [80, 60, 40, 20]
    assert looped["pipeline"]["inflight_by_rank"] == [110, 90, 70, 50]
    assert looped["memory_terms_gib"]["activations"][0] > plain["memory_terms_gib"]["activations"][0]


def test_explain_says_everything_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(framework="torchtitan"))
    assert call(explain_verb, str(job), "--candidate", "tp=8,pp=4,vp=4,dp=32,b=1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    for key in (
        "candidate", "mfu_pct", "mfu_pct_interval", "step_time_s", "memory_gib_by_rank", "parts_s", "ideal_s",
        "memory_terms_gib", "communication", "pipeline", "flop", "verdict", "decisions", "placement", "sources",
    ):  # fmt: skip
        assert key in found, key
    row = found["communication"][0]
    assert {"dimension", "primitive", "link", "bytes", "messages", "time_s", "hideable"} <= set(row)
    assert [step["step"] for step in found["decisions"]][:2] == ["tensor_parallel", "pipeline_parallel"]
    assert {"bubble_over_useful", "bubble_share_of_total", "inflight_by_rank"} <= set(found["pipeline"])
    for arguments in (("--account", "simple"), ("--account", "megatron")):
        assert call(explain_verb, str(job), "--candidate", "tp=8,pp=4,dp=32,b=1", *arguments) == 0
        assert "feasible" in capsys.readouterr().out
    with pytest.raises(UserError, match="nearest legal splits"):
        call(explain_verb, str(job), "--candidate", "tp=8,dp=8,cp=8")


def test_plan_starts_without_torch_and_in_time(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(framework="torchtitan"))
    program = (
        "import sys, argparse\n"
        "from tuner.cli import plan\n"
        "parser = argparse.ArgumentParser()\n"
        "plan.add_parser(parser.add_subparsers())\n"
        f"args = parser.parse_args(['plan', {str(job)!r}, '--json'])\n"
        "code = args.run(args)\n"
        "heavy = {'torch', 'ray', 'optuna', 'mlflow'} & set(sys.modules)\n"
        "print(heavy or 'light', code, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["light", "0"]
    found = json.loads(done.stdout)
    assert found["enumerated"] > 10000 and len(found["candidates"]) == 10 and len(found["near_misses"]) == 5
    assert {"code", "count", "example"} <= set(found["rejected"][0])
    assert {"code", "required", "available", "unit", "text"} <= set(found["near_misses"][0]["reasons"][0])


def test_nothing_feasible_is_told_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(framework="torchtitan").replace("nodes = 128", "nodes = 128\nhbm_gib = 1"))
    assert call(plan_verb, str(job)) == 2
    assert "0 feasible" in capsys.readouterr().out


def test_a_job_is_resolved_or_says_what_is_missing() -> None:
    job = parse_job("""
        [model]
        layers = 4
        hidden = 256
        heads = 4
        ffn = 512
        vocab = 1000
        [cluster]
        gpu = "mine"
        hbm_gib = 40
        peak_tflops = 100
        nvlink_gb_s = 200
        nic_gb_s = 10
        gpus_per_node = 4
        [recipe]
        seq_len = 128
        global_batch_seqs = 8
    """)
    setting = setting_from_job(job)
    assert setting.hardware.name == "mine" and setting.hardware.peak("bf16") == 100e12
    assert setting.hardware.domain_bandwidth == 200e9 and setting.shape.kv_heads == 4
    with pytest.raises(UserError, match="no shape is shipped"):
        setting_from_job(
            parse_job(
                '[model]\ntorchtitan="mine:model"\n[cluster]\ngpu="H200"\n[recipe]\nseq_len=8\nglobal_batch_seqs=8'
            )
        )
    with pytest.raises(UserError, match="gpu is not set"):
        setting_from_job(parse_job('[model]\ntorchtitan="llama3:llama3_8b"'))
    preset = setting_from_job(parse_job('[model]\ntorchtitan="llama3:llama3_8b"\n[cluster]\ngpu="H200"'))
    assert preset.seq_len == 8192 and preset.global_batch_seqs == 8


def test_validate_scores_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = Path(__file__).parents[1] / "data" / "measured_sample.csv"
    assert call(validate_verb, str(table), "--calibrate", "loo", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unpriced"] == [{"row_id": "measured_sample:no-sequence", "why": "sequence length not in the table"}]
    assert {group["gpus"] for group in found["groups"]} == {16, 64}
    overall = found["overall"]
    assert overall["groups"] == 2 and overall["median_spearman"] > 0.4
    assert overall["false_feasible_pct"] is not None and overall["oom_rows"] == 4
    assert list(overall["feasibility_by_margin"]) == ["0", "0.05", "0.1"]
    for mode in ("none", "3"):
        assert call(validate_verb, str(table), "--calibrate", mode) == 0
        printed = capsys.readouterr().out
        assert "median Spearman: " in printed and "_" not in printed.split("groups: ")[-1].split("not priced")[0]
    with pytest.raises(UserError, match="none, loo or a number"):
        call(validate_verb, str(table), "--calibrate", "some")
    with pytest.raises(UserError, match="cannot be read"):
        call(validate_verb, "absent.csv")


def test_plan_with_a_studys_coefficients_and_not_with_another_machines() -> None:
    job = parse_job(JOB.format(framework="torchtitan"))
    believed = prior(setting_from_job(job))
    slower = believed.with_value("gemm_efficiency", believed.value("gemm_efficiency") / 2)
    before = plan_verb.plan(job, 1, 0)["candidates"][0]
    after = plan_verb.plan(job, 1, 0, json.dumps(slower.to_json()))["candidates"][0]
    assert after["step_time_s"] > 1.2 * before["step_time_s"]
    elsewhere = json.dumps(slower.to_json()).replace(setting_from_job(job).hardware.name, "A100-SXM-80GB")
    with pytest.raises(UserError):
        plan_verb.plan(job, 1, 0, elsewhere)


def test_what_may_not_fit_is_listed_after_what_fits() -> None:
    job = parse_job(JOB.format(framework="megatron").replace("memory_margin = 0.1", ""))
    listed = plan_verb.plan(job, 10_000, 0)["candidates"]
    marks = [entry["may_not_fit"] for entry in listed]
    assert True in marks and marks == sorted(marks)
    for doubt in (False, True):
        times = [entry["step_time_s"] for entry in listed if entry["may_not_fit"] is doubt]
        assert times == sorted(times)


SMALL = """
[model]
layers = 6
hidden = 256
heads = 16
kv_heads = 16
ffn = 768
vocab = 2048
[cluster]
gpu = "cpu"
gpus_per_node = 2
[recipe]
seq_len = 2048
global_batch_seqs = 8
precision = "fp32"
"""


def test_no_interval_promises_more_than_the_whole_machine() -> None:
    """On CPU slots the prior is so wide that a step time's lower end lies below the ideal one."""
    entries = plan_verb.plan(parse_job(SMALL), 50, 5)["candidates"]
    assert any(entry["step_time_interval_s"][0] < entry["ideal_s"] for entry in entries)
    assert all(entry["mfu_pct"] < entry["mfu_pct_interval"][1] <= 100 for entry in entries)


def test_a_plan_without_a_feasible_candidate_says_each_reason_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        JOB.format(framework="torchtitan").replace("nodes = 128", "nodes = 1").replace("4_194_304", "65_536")
    )
    assert call(plan_verb, str(job)) == 2
    text = capsys.readouterr().out
    assert "nothing fits" in text or "nearly" in text
    assert "Fastest predicted" not in text and "Where the step goes" not in text
    reasons = [block.split("\n", 1)[1] for block in text.split("nearly: ")[1:]]
    assert len(reasons) == len(set(reasons))

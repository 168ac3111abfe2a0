"""A smaller trial for real: two ranks stand for four, and the error is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.cli import main
from tuner.smaller import read_history


JOB = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = 4
peak_tflops = 0.05
[recipe]
seq_len = 64
global_batch_seqs = 8
precision = "fp32"
data = "synthetic"
[measure]
warmup_steps = 1
steps = 4
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_four_ranks_from_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, history = tmp_path / "job.toml", tmp_path / "pairs.jsonl"
    job.write_text(JOB)
    command = ["smaller", str(job), "--candidate", "dps=4,b=2", "--devices", "2", "--layers", "3", "--steps", "4"]
    assert main([*command, "--full", "--history", str(history), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["smaller"] and (found["ran_devices"], found["full_devices"]) == (2, 4)
    assert (found["ran_layers"], found["full_layers"]) == (3, 6)
    assert found["ran"]["data_parallel_shard"] == 2 and found["ran"]["micro_batch"] == 2
    assert found["corrected_s"] == pytest.approx(found["ran_step_time_s"] * found["correction"])
    expected = 100 * (found["step_time_s"] / found["full_step_time_s"] - 1)
    assert found["error_pct"] == pytest.approx(expected) and found["correction_error"]["pairs"] == 0
    assert read_history(history) == [(found["corrected_s"], found["full_step_time_s"])]

"""The dry run's rules of what CUDA kernels keep, against one block on a real device."""

from __future__ import annotations

import json
from pathlib import Path
import subprocess
import sys

import pytest
import torch


pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "block_memory.py"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "seq_len"), [("llama3:llama3_debugmodel", 2048), ("llama3:llama3_8b", 8192)], ids=["debug", "8b"]
)
def test_one_block_holds_what_the_dry_run_predicts(model: str, seq_len: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    command = [sys.executable, str(SCRIPT), "--model", model, "--seq-len", str(seq_len), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1100)
    rows = [row for row in json.loads(done.stdout)["rows"] if row["predicted_peak_bytes"] is not None]
    assert len(rows) == 5
    wrong = [row for row in rows if max(abs(row["kept_difference_pct"]), abs(row["peak_difference_pct"])) > 3]
    assert not wrong, wrong

"""Evidence on real training: what is planted in the user's own module is what confirmation, ablation, parity and
verification find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import tune
from tuner.evidence.claim import Claim


pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

MODULE = '''
"""A user's model: the debug model, with what a test plants in it."""

import os
from pathlib import Path
import time

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

HERE = Path(__file__).parent
original = Trainer.forward_backward_step


def slowed(self, *args, **kwargs):
    result = original(self, *args, **kwargs)
    slow = HERE / "slow.txt"
    if slow.exists():
        time.sleep(float(slow.read_text()))
    return result


Trainer.forward_backward_step = slowed


def mine():
    config = llama3_debugmodel()
    layers = 3 if os.environ.get("CUT_LAYERS") else 6
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config
'''

JOB = """
[model]
torchtitan = "mine:mine"
path = "{path}"
[cluster]
gpu = "cpu"
gpus_per_node = 1
[recipe]
seq_len = 64
global_batch_seqs = 8
precision = "fp32"
data = "synthetic"
[search]
compile = false
micro_batch = {micro_batch}
activation_checkpoint = {checkpoint}
env = ["default", "planted"]
[baseline]
micro_batch = {baseline}
activation_checkpoint = "full"
[env.planted]
{planted}
[measure]
probe = false
trace = false
steps = 24
warmup_steps = 3
[budget]
confirm_share = 0.6
"""


def study(root: Path, budget: str, **values: Any) -> tuple[dict[str, Any], Claim]:
    """A real study of the planted module; its last event and its claim."""
    user = root / "user"
    user.mkdir(exist_ok=True)
    (user / "mine.py").write_text(MODULE)
    defaults = {"micro_batch": "[8]", "checkpoint": '["full"]', "baseline": 8, "planted": 'NOTHING = "1"'}
    (root / "job.toml").write_text(JOB.format(path=user, **{**defaults, **values}))
    done = tune(
        root / "studies", "start", str(root / "job.toml"), "--budget", budget, "--study", "s", "--json", timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), Claim.read(root / "studies" / "s" / "claim.json")


def test_a_change_that_does_nothing_leaves_the_baseline(tmp_path: Path) -> None:
    end, claim = study(tmp_path, "20-cpu-minutes")
    assert end["winner"] == end["baseline"] and not claim.changed, end["why"]
    assert {trial["label"].split("env=")[-1] for trial in end["trials"]} >= {"planted"}


def test_a_real_gain_keeps_only_what_buys_it(tmp_path: Path) -> None:
    """Micro-batches of 8 instead of 1 and no recompute buy; the environment variable does not."""
    end, claim = study(tmp_path, "40-cpu-minutes", micro_batch="[1, 8]", checkpoint='["none", "full"]', baseline=1)
    assert "env" not in claim.changed and claim.changed, end["changes"]
    assert claim.comparison["significant"] and claim.parity["verdict"] == "agree", claim.parity
    named = {knob for change in claim.changes for knob in change["knobs"]}
    assert named >= set(claim.changed)
    first = json.loads((tmp_path / "studies" / "s" / "job.json").read_text())
    assert first["budget"]["confirm_share"] == 0.6


def test_a_faster_model_that_is_another_model_never_wins(tmp_path: Path) -> None:
    end, claim = study(tmp_path, "20-cpu-minutes", planted='CUT_LAYERS = "1"')
    assert end["winner"] == end["baseline"] and not claim.changed
    assert end["parity"]["verdict"] == "differ", end["parity"]


def test_a_claim_holds_until_the_code_becomes_slower(tmp_path: Path) -> None:
    _, claim = study(tmp_path, "20-cpu-minutes")
    repository = tmp_path / "studies" / "s" / "repository"
    committed = ("verify", "tune/s", "--repo", str(repository), "--json")
    same = tune(tmp_path / "studies", *committed, timeout=600)
    found = json.loads(same.stdout)
    assert same.returncode in (0, 5) and found["verdict"] in ("hold", "cannot_tell"), found
    floor = found["finding"]["noise_floor_pct"] / 100
    (tmp_path / "user" / "slow.txt").write_text(f"{2 * floor * claim.after.step_time_s:.4f}")
    slower = tune(tmp_path / "studies", *committed, timeout=600)
    assert slower.returncode == 4, slower.stdout

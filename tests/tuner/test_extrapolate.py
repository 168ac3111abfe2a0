"""`tune extrapolate`: the seed's budget from the seed's ratios, and a pretended machine seen at four times its size."""

from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pruning.assess import assess
from pruning.calibration import calibrate
from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.setting import Setting
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tuner.cli import main
from tuner.evidence.extrapolate import document
from tuner.evidence.ratios_file import load_ratios
from tuner.evidence.small_run import read_small_run
from tuner.evidence.small_run import SmallRun
from tuner.evidence.target import make_target
from tuner.evidence.target import parse_target
from tuner.records.layout import StudyFolder
from tuner.study.plan import StudyPlan


RATIOS = Path(__file__).parents[1] / "data" / "seed_ratios.toml"
A, B = "tp=8,pp=4,vp=4,dp=32,b=1", "tp=8,pp=2,vp=4,dp=64,b=1"
SEED = {A: ((4.4, 4.9), (40, 45)), B: ((4.3, 4.8), (41, 46))}
"""Step time and MFU of the document's two candidates."""
FACTOR = 2.5
"""How much slower the pretended machine is than the shipped priors say."""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\ntorchtitan = "llama3:llama3_70b"\n[cluster]\ngpu = "H100-SXM"\ngpus_per_node = 8\nnodes = 128\n'
        '[search]\nframework = "megatron"\n[recipe]\nseq_len = 8192\nglobal_batch_tokens = 4_194_304\n'
    )
    return str(path)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["extrapolate", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_seeds_table_from_the_seeds_ratios(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, job, "--to", "gpus=1024", "--ratios", str(RATIOS), "--candidate", A, "--candidate", B)
    for entry, (step, mfu) in zip(found["candidates"], SEED.values()):
        np.testing.assert_allclose(entry["step_time_interval_s"], step, atol=0.1)
        np.testing.assert_allclose(entry["mfu_pct_interval"], mfu, atol=1.3)
        assert step[0] < entry["step_time_s"] < step[1] and mfu[0] < entry["mfu_pct"] < mfu[1]
        whole = entry["ideal_s"] + sum(entry["parts_s"].values()) + entry["reserve_s"]
        assert whole == pytest.approx(entry["step_time_s"])
    parts = found["candidates"][0]["parts_s"]
    assert parts["kernel_efficiency"] + found["candidates"][0]["ideal_s"] == pytest.approx(3.2, abs=0.05)
    assert parts["bubble"] == pytest.approx(0.15, abs=0.04)
    assert 0.3 <= parts["exposed_communication"] <= 0.5
    assert parts["cpu_launch"] == pytest.approx(0.2) and parts["recompute"] == 0


@pytest.mark.parametrize(
    ("line", "part", "moves"),
    [
        ("kernel_over_ideal = 1.75", "kernel_efficiency", 1.0),
        ("tensor_exposed = 0.9", "exposed_communication", 1.0),
        ("launch_s_per_block = 0.00125", "cpu_launch", 1.0),
        ("straggler_of_busy = 0.08", "straggler", 1.0),
        ("uneven_share = 1.0", "bubble", 1.0),
        ("launch_s_per_block = 0.0", "cpu_launch", -1.0),
    ],
)
def test_it_moves_as_predicted_when_a_ratio_changes(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, part: str, moves: float
) -> None:
    name = line.split()[0]
    kept = [row for row in RATIOS.read_text().splitlines() if not row.startswith(name)]
    changed = tmp_path / "changed.toml"
    changed.write_text("\n".join([*kept, line]))
    arguments = (job, "--to", "gpus=1024", "--candidate", A, "--ratios")
    before = ask(capsys, *arguments, str(RATIOS))["candidates"][0]
    after = ask(capsys, *arguments, str(changed))["candidates"][0]
    gained = moves * (after["parts_s"][part] - before["parts_s"][part])
    assert gained > 0.1
    others = {p: after["parts_s"][p] - before["parts_s"][p] for p in before["parts_s"] if p != part}
    # Bubble and straggler follow busy time; nothing else moves.
    assert all(abs(move) < 1e-6 for p, move in others.items() if p not in ("bubble", "straggler", "data_wait"))
    assert moves * (after["step_time_s"] - before["step_time_s"]) >= gained


def test_half_the_launches_cost_half(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(
        capsys, job, "--to", "gpus=1024", "--ratios", str(RATIOS), "--candidate", A, "--candidate", A[:-1] + "2"
    )
    one, two = (entry["parts_s"]["cpu_launch"] for entry in found["candidates"])
    assert two == pytest.approx(one / 2)


def test_the_jobs_own_target_is_the_default(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["extrapolate", job]) == 2
    assert "no target" in capsys.readouterr().err
    text = Path(job).read_text()
    Path(job).write_text(text + "[extrapolate]\ngpus = 2048\n")
    found = ask(capsys, job)
    assert found["devices"] == 2048 and found["global_batch_seqs"] == 1024
    assert ask(capsys, job, "--to", "gpus=512")["devices"] == 512


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_plan(measure={"stop_confidence": 1.0}, search={"max_trials": 10})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, plan: StudyPlan) -> StudyFolder:
    root = tmp_path_factory.mktemp("studies") / "small"
    prices = assess(plan.pool, plan.setting).prices
    known = {plan.pool.candidate(i).key(): FACTOR * float(prices.step_time_s[i]) for i in range(len(plan.pool))}
    with pytest.MonkeyPatch.context() as patch:
        run(patch, root, plan, lambda c, n: Behaviour(step_s=known[c.key()], noise=0.002), 1e6)
    folder = StudyFolder(root)
    facts = {
        "study": "small",
        "device": "cpu",
        "hardware": "cpu",
        "precision": "fp32",
        "versions": plan.setting.versions,
        "num_devices": 2,
        "seq_len": plan.setting.seq_len,
        "global_batch_seqs": plan.setting.global_batch_seqs,
        "peak_flops": plan.setting.hardware.peak("fp32"),
        "base": plan.base.to_json(),
    }
    folder.facts.write_text(json.dumps(facts))
    folder.job.write_text(plan.job.model_dump_json(exclude={"search"}))
    return folder


def test_a_slow_machine_is_predicted_slow_at_four_times_its_size(study: StudyFolder) -> None:
    small = read_small_run(study)
    target = make_target(small.setting, parse_target("gpus=8"))
    found = document(small, target)
    assert 1 <= len(found["candidates"]) <= 3 and small.measured()
    for entry in found["candidates"]:
        pool = Pool.from_candidates([Candidate.from_json(entry["candidate"])])
        truth = FACTOR * float(assess(pool, target.setting).prices.step_time_s[0])
        assert entry["step_time_s"] == pytest.approx(truth, rel=0.3)
        assert entry["step_time_interval_s"][0] <= truth <= entry["step_time_interval_s"][1]
    layouts = {(c["candidate"]["tensor_parallel"], c["candidate"]["pipeline_parallel"]) for c in found["candidates"]}
    assert len(layouts) == len(found["candidates"])
    assert any("global batch" in note for note in found["notes"])
    assert any("convergence" in line for line in found["unknown"])


PLANTED = {"gemm_efficiency": 0.8, "launch_s": 1.5, "attention_efficiency": 1.3, "memory_efficiency": 0.85}
"""How one GPU machine differs from what is believed of its kind."""


def planted_run() -> tuple[SmallRun, Coefficients]:
    """Trials of Llama-3 8B on 8 GPUs of that machine."""
    shape = preset_shape("llama3:llama3_8b")
    assert shape is not None
    setting = Setting(
        shape=shape, hardware=find_hardware("H100-SXM"), devices_per_node=8, nodes=1, seq_len=8192, global_batch_seqs=32
    )
    truth = prior(setting)
    for name, factor in PLANTED.items():
        truth = truth.with_value(name, factor * truth.value(name))
    tried = [
        Candidate(tensor_parallel=t, data_parallel_shard=8 // t, micro_batch=b, activation_checkpoint=kind, compile=c)
        for t in (1, 2)
        for b in (1, 2)
        for kind in ("selective", "full")
        for c in (False, True)
    ]
    times = price(Pool.from_candidates(tried), setting, truth).step_time_s
    seen = tuple(
        Observation(candidate=one, step_time_s=float(t), step_time_ci_s=(0.995 * float(t), 1.005 * float(t)))
        for one, t in zip(tried, times)
    )
    known = calibrate(prior(setting), setting, seen)
    small = SmallRun(
        name="planted", setting=setting, knobs={}, numeric_changes=False, coefficients=known, observations=seen
    )
    return small, truth


def test_what_eight_gpus_teach_holds_at_two_hundred_and_fifty_six() -> None:
    small, truth = planted_run()
    target = make_target(small.setting, parse_target("gpus=256"))
    found = document(small, target)
    assert len(found["candidates"]) >= 2 and target.setting.nodes == 32
    untaught = document(replace(small, coefficients=prior(small.setting), observations=()), target)
    errors: dict[str, list[float]] = {"taught": [], "untaught": []}
    for name, one in (("taught", found), ("untaught", untaught)):
        for entry in one["candidates"]:
            pool = Pool.from_candidates([Candidate.from_json(entry["candidate"])])
            step = float(price(pool, target.setting, truth).step_time_s[0])
            errors[name].append(abs(entry["step_time_s"] / step - 1))
            assert entry["step_time_interval_s"][0] <= step <= entry["step_time_interval_s"][1]
    assert max(errors["taught"]) < 0.04 < max(errors["untaught"])
    assert any("across nodes" in line for line in found["unknown"])


def test_another_kind_of_gpu_keeps_less_and_is_less_sure() -> None:
    small, _ = planted_run()
    same = document(small, make_target(small.setting, parse_target("gpus=64")))
    other = document(small, make_target(small.setting, parse_target("gpus=64,gpu=H200")))
    gemm = [next(r for r in found["carried"] if r["name"] == "gemm_efficiency") for found in (same, other)]
    believed = prior(small.setting).value("gemm_efficiency")
    assert gemm[0]["value"] < gemm[1]["value"] < believed
    assert other["hardware"] == "H200"


def test_nothing_carries_from_cpu_slots_to_gpus(study: StudyFolder) -> None:
    small = read_small_run(study)
    found = document(small, make_target(small.setting, parse_target("gpus=64,model=llama3_8b,gpu=H100-SXM")))
    assert not [ratio for ratio in found["carried"] if ratio["source"] == "measured"]
    assert any("no ratio carries over" in note for note in found["notes"])


def test_a_rehearsal_is_refused(study: StudyFolder, tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "r")
    folder.root.mkdir()
    folder.facts.write_text(json.dumps({"rehearsal": True}))
    with pytest.raises(UserError, match="rehearsal"):
        read_small_run(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name a target"),
        ("gpus", "needs pairs"),
        ("gpus=0", "positive whole number"),
        ("gpus=8,gpus=9", "twice"),
        ("nodes=3", "keys are"),
        ("gpus=8,global_batch_seqs=8,global_batch_tokens=8", "not both"),
    ],
)
def test_targets_that_say_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no ratio"),
        ("speed = 1.0", "unknown ratio 'speed'"),
        ("reserve = [1.2, 1.1]", "low <= value <= high"),
        ("tensor_exposed = 'much'", "needs a number"),
        ("tensor_exposed = true", "needs a number"),
        ("kernel_over_ideal = 0.6", "below 1"),
        ("tensor_exposed = {median = 1.0}", "takes value and interval"),
        ("tensor_exposed = nan", "needs a number"),
        ("= 3", "lines such as"),
    ],
)
def test_ratio_files_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        load_ratios(str(file))

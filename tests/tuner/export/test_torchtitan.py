"""torchtitan modules: imported in a child process only, back to the candidate; launch files that run what they say."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest
import yaml

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.job_file import parse_job
from search_space.model_torchtitan import preset_shape
from search_space.pool import canonical
from tests.tuner.export.sampled import COUNT
from tests.tuner.export.sampled import setting
from tests.tuner.export.sampled import spoken
from tests.tuner.export.sampled import subjects
from trial_runner.recipe.base import BaseFunction
from tuner.cli import main
from tuner.export.read import read_file
from tuner.export.read_torchtitan import code_knobs
from tuner.export.read_torchtitan import imported
from tuner.export.read_torchtitan import read
from tuner.export.subject import Subject
from tuner.export.targets import TARGETS
from tuner.export.targets import without_comments


SHAPE = preset_shape("llama3:llama3_8b")
assert SHAPE is not None
BASE = BaseFunction(
    module="torchtitan.models.llama3.config_registry",
    function="llama3_8b",
    user_path=None,
    shape=SHAPE,
    num_params=SHAPE.num_params,
    seq_len=8192,
    local_batch=1,
    global_batch=-1,
    knobs={"activation_checkpoint": "selective", "compile": False, "loss_chunks": 8},
)

# One child process reads every module: what `describe` does for one, for all.
READ_ALL = """
import importlib, json, sys
import torch
from trial_runner.rank import cpu
from trial_runner.recipe.describe import read_knobs
if not torch.cuda.is_available():
    cpu.install()
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2].split(","):
    module = importlib.import_module(name)
    config = getattr(module, sys.argv[3])()
    facts = dict(knobs=read_knobs(config, []), seq_len=config.training.seq_len,
                 local_batch=config.training.local_batch_size, global_batch=config.training.global_batch_size)
    print("FACTS" + json.dumps([name, facts]), flush=True)
"""


def with_base(subject: Subject) -> Subject:
    return Subject(
        candidate=subject.candidate, setting=subject.setting, source="test", why="sampled", base=BASE, env=subject.env
    )


def test_there_and_back(tmp_path: Path) -> None:
    """Every sampled candidate as a module, read by a child process, is the candidate again; comments are stripped."""
    sample = {f"m{i}": with_base(subject) for i, subject in enumerate(subjects("torchtitan"))}
    made = {name: TARGETS["torchtitan"](subject) for name, subject in sample.items()}
    for name, export in made.items():
        tree = ast.parse(without_comments("torchtitan", export.text))
        (tmp_path / f"{name}.py").write_text(ast.unparse(tree))
    function = next(iter(sample.values())).function
    child = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path), ",".join(sample), function],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    facts = dict(json.loads(line[5:]) for line in child.stdout.splitlines() if line.startswith("FACTS"))
    assert set(facts) == set(sample), child.stderr[-2000:]
    for name, subject in sample.items():
        text = (tmp_path / f"{name}.py").read_text()
        base = BaseFunction(**{**vars(BASE), **facts[name]})
        found = imported(base, code_knobs(ast.parse(text)), None, "m:f", None)
        wanted, got = spoken(subject, {gap.knob for gap in made[name].gaps}, found.candidate)
        assert got == wanted, f"{subject.candidate.label()} came back as {found.candidate.label()}"
        assert (found.seq_len, found.global_batch_seqs, found.precision) == (8192, 256, "bf16")
    assert len(sample) == COUNT >= 100


MODULE = """
import sys
from torchtitan.models.llama3.config_registry import llama3_debugmodel as base

MARK = sys.modules.setdefault("imported_here", sys)


def tuned():
    config = base()
    config.parallelism.tensor_parallel_degree = 2
    config.training.local_batch_size = 4
    config.training.global_batch_size = 16
    return config
"""


@pytest.mark.e2e
def test_a_module_is_imported_in_a_child_process_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    assert main(["import", str(file), "--gpus", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "imported_here" not in sys.modules and "mine" not in sys.modules
    candidate = Candidate.from_json(found["candidate"])
    assert (candidate.tensor_parallel, candidate.data_parallel_shard, candidate.micro_batch) == (2, 2, 4)
    job = parse_job(found["job"])
    assert job.model.torchtitan == "mine:tuned" and job.model.path == str(tmp_path)
    assert job.recipe.global_batch_seqs == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(", "line 1"),
        ("x = 1", "0 config functions"),
        ("def a(): pass\ndef b(): pass", "choose one with --function"),
    ],
)
def test_modules_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "m.py"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        read(file)


def subject_with_env() -> Subject:
    candidate = canonical(Candidate(tensor_parallel=8, data_parallel_shard=8, env="nccl", compile=True))
    env = {"NCCL_MIN_NCHANNELS": "16", "TORCH_X": 'a "b" $c'}
    return Subject(candidate=candidate, setting=setting("torchtitan"), source="t", why="w", base=BASE, env=env)


def test_torchrun_script_writes_its_function_and_starts_it(tmp_path: Path) -> None:
    """Run with a stand-in for torchrun that prints what it was given."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\nenv | grep -E "NCCL_MIN|TORCH_X|PYTHONPATH"\necho ARGS "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "run.sh").write_text(TARGETS["torchrun"](subject_with_env()).text)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "NODE_RANK": "3"}
    done = subprocess.run(["bash", str(tmp_path / "run.sh"), "--x"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    name = subject_with_env().function
    assert 'TORCH_X=a "b" $c' in done.stdout and "NCCL_MIN_NCHANNELS=16" in done.stdout
    assert f"--module {name} --config {name} --x" in done.stdout and "--nnodes 8 --node-rank 3" in done.stdout
    written = tmp_path / name / f"{name}.py"
    assert ast.parse(written.read_text()) and f"PYTHONPATH={written.parent}" in done.stdout


def test_slurm_script_asks_for_the_cluster(tmp_path: Path) -> None:
    text = TARGETS["slurm"](subject_with_env()).text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    first = text.split("set -euo")[0]
    assert "#SBATCH --nodes=8" in first and "#SBATCH --gpus-per-node=8" in first and first.startswith("#!")
    assert "#SBATCH --nodes=8" in without_comments("slurm", text)


def test_kuberay_manifest_holds_the_function_and_the_launch() -> None:
    config, job = yaml.safe_load_all(TARGETS["kuberay"](subject_with_env()).text)
    name = subject_with_env().function
    assert set(config["data"]) == {f"{name}.py", "launch.py"}
    for text in config["data"].values():
        ast.parse(text)
    spec = job["spec"]["rayClusterSpec"]
    (workers,) = spec["workerGroupSpecs"]
    assert job["kind"] == "RayJob" and workers["replicas"] == 8
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "TORCH_X", "value": 'a "b" $c'} in container["env"]
    mounted = {volume["name"] for volume in workers["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == mounted
    assert job["metadata"]["name"] + "-config" == config["metadata"]["name"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\ntorchtitan = "llama3:llama3_8b"\n[cluster]\ngpu = "H100-SXM"\ngpus_per_node = 8\nnodes = 2\n'
        "[recipe]\nglobal_batch_seqs = 64\n[baseline]\ntp = 2\nmicro_batch = 2\n"
    )
    return path


@pytest.mark.parametrize("target", ["megatron", "deepspeed"])
def test_the_command_takes_the_baseline_and_names_what_has_no_counterpart(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert main(["export", str(job), "--to", target, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["why"] == "baseline" and found["candidate"]["tensor_parallel"] == 2
    assert {gap["knob"] for gap in found["without_counterpart"]} >= {"loss_chunks"}
    out = tmp_path / ("run.sh" if target == "megatron" else "ds.json")
    assert main(["export", str(job), "--to", target, "--out", str(out), "--candidate", "tp=4,dp=4,b=1"]) == 0
    back = read_file(out, None, framework="torchtitan", model="llama3_8b")
    assert back.candidate.tensor_parallel == 4 and back.candidate.data_parallel == 4
    assert back.model == {"torchtitan": "llama3:llama3_8b"}
    assert main(["import", str(out), "--out", str(tmp_path / "new.toml"), "--model", "llama3_8b"]) == 0
    assert parse_job((tmp_path / "new.toml").read_text()).baseline["tensor_parallel"] == 4


def test_without_a_baseline_the_fastest_predicted(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(job.read_text().split("[baseline]")[0])
    assert main(["export", str(job), "--to", "megatron", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why"] == "fastest predicted"
    assert main(["plan", str(job), "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["candidate"] == found["candidate"]


def test_wrong_degrees_are_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(job), "--to", "megatron", "--candidate", "tp=3"]) == 2
    assert "16 devices" in capsys.readouterr().err

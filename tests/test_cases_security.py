"""Public reports about safety, each as a test named after its case."""

from __future__ import annotations

import json
from pathlib import Path
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from search_space.errors import JobError
from search_space.job_file import parse_job
from tuner.records.layout import new_folder


ROOT = Path(__file__).parents[1]


def test_SEC_02_ray_is_new_enough_in_bound_and_lock() -> None:
    """Dashboards of older versions took DELETE from any web page (CVE-2026-27482)."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [item for item in wanted if item.startswith("ray[")]
    (lock,) = re.findall(r"^ray(?:\[[^]]*\])?==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    for version in (re.search(r">=([\d.]+)", bound).group(1), lock):  # type: ignore[union-attr]
        assert tuple(map(int, version.split(".")[:2])) >= (2, 54)


def test_SEC_03_no_ingress_is_offered() -> None:
    folders = [ROOT / "k8s", ROOT / "tuner" / "export", ROOT / "tuner" / "cli"]
    texts = {p: p.read_text() for f in folders if f.exists() for p in f.rglob("*") if p.suffix in (".yaml", ".py")}
    assert len(texts) > 10
    for path, text in texts.items():
        assert not re.search(r"kind:\s*Ingress\b|type:\s*(?:LoadBalancer|NodePort)", text), path


EVIL = ("x; touch {}", "$(touch {})", "`touch {}`", "x\ntouch {}\n", "'; touch {} #", "x\nEND_OF_CONFIG\ntouch {}\n")


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_SEC_05_names_never_run_in_an_exported_script(tmp_path: Path, evil: str, target: str) -> None:
    """Names of models, values of variables: the script runs with a torchrun that does nothing, and makes no file."""
    from dataclasses import replace
    import os

    from tests.tuner.export.sampled import subjects
    from trial_runner.recipe.base import BaseFunction
    from tuner.export.launch import slurm
    from tuner.export.launch import torchrun

    made = tmp_path / "pwned"
    name = evil.format(made)
    subject = subjects("torchtitan")[0]
    shape = replace(subject.setting.shape, name=name)
    base = subject.base or BaseFunction(
        module="llama3", function="llama3_8b", user_path=None, shape=shape, num_params=1, seq_len=8192, local_batch=1,
        global_batch=8,
    )  # fmt: skip
    named = replace(
        subject, setting=replace(subject.setting, shape=shape), base=base, env={"NCCL_X": name}, why=name, source=name
    )
    script = tmp_path / "script.sh"
    script.write_text((torchrun if target == "torchrun" else slurm)(named).text)
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for program in ("torchrun", "srun", "scontrol"):
        (stubs / program).write_text("#!/bin/sh\nexit 0\n")
        (stubs / program).chmod(0o755)
    env = {"PATH": f"{stubs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not made.exists()


@pytest.mark.parametrize("evil", ["x; touch {}", "$(touch {})"])
def test_SEC_05_names_are_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: str) -> None:
    from tuner.evidence.commit import branch_of
    from tuner.repository import git
    from tuner.repository import open_repository

    made = tmp_path / "pwned"
    name = evil.format("pwned")
    monkeypatch.chdir(tmp_path)
    folder = new_folder(name, "m")
    assert folder.name == name and re.fullmatch(r"tune/[A-Za-z0-9_-]+", branch_of(name))
    top = open_repository(tmp_path / name, create=True)
    assert git(top, "rev-parse", "--git-dir") and not made.exists()
    for key in ("A; touch pwned", "$(touch pwned)"):
        with pytest.raises(JobError, match="letters, digits and underscores"):
            parse_job(f'[model]\ntorchtitan = "llama3:x"\n[env.a]\n"{key}" = "1"\n')


PAYLOAD = b"cposix\nsystem\n(S'touch pwned'\ntR."
"""A pickle that makes a file when it is loaded."""


def test_SEC_06_pickles_in_a_study_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.dashboards.made_up import events
    from tests.dashboards.made_up import write_study
    from tuner.cli import main

    monkeypatch.chdir(tmp_path)
    import pickle

    pickle.loads(PAYLOAD)
    assert (tmp_path / "pwned").exists(), "the payload does not work, so the test would show nothing"
    (tmp_path / "pwned").unlink()
    folder = write_study(tmp_path / "s", events(3), refused=2)
    folder.trial(0).mkdir(parents=True, exist_ok=True)
    for name in ("memory_snapshot.pickle", "searcher.pkl", "optuna.db.pkl", "rank0_trace.json.gz", "optuna.journal"):
        (folder.trial(0) / name).write_bytes(PAYLOAD)
        (folder.root / name).write_bytes(PAYLOAD)
    for verb in (["status"], ["report"], ["report", "--html", "r.html"], ["list"]):
        assert main([*verb, str(folder.root)] if verb != ["list"] else verb) == 0
    assert main(["breakdown", str(folder.trial(0) / "rank0_trace.json.gz")]) == 2
    assert not (tmp_path / "pwned").exists()


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_SEC_07_hostile_traces_end_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    from trial_runner.breakdown import stream
    from trial_runner.breakdown.read import MAX_NAME
    from trial_runner.breakdown.read import read_trace
    from trial_runner.breakdown.stream import TraceError

    monkeypatch.setattr(stream, "MAX_BYTES", 8 << 20)
    bomb = tmp_path / "bomb.json.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(b'{"traceEvents": [')
        for _ in range(16):
            file.write(b" " * (1 << 20))
    deep = tmp_path / "deep.json"
    deep.write_text('{"traceEvents": [' + "[" * 100_000 + "]" * 100_000 + "]}")
    for path in (bomb, deep):
        with pytest.raises(TraceError):
            read_trace(path)
    kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0, "args": {"stream": 7}}
    long = {**kernel, "name": "k" * (2 << 20), "ts": 9.0}
    endless = {**kernel, "name": "a", "dur": 1e308, "ts": 20.0}
    trace = read_trace(write_trace(tmp_path / "odd.json", [{**kernel, "name": "b"}, long, endless]))
    assert max(map(len, trace.names)) <= MAX_NAME


def test_SEC_07_names_are_escaped_in_pages(tmp_path: Path) -> None:
    from dashboards.page import report_page
    from tests.tuner.tracking.study import new_study
    from tests.tuner.tracking.study import session
    from tests.tuner.tracking.study import trial
    from tests.tuner.tracking.study import write

    folder = new_study(tmp_path / "s")
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    write(folder, session(folder), {"event": "trial", **trial(0, folder, label=evil)})
    page = report_page(folder)
    assert evil not in page and "<script>alert(1)" not in page and "<img src=x" not in page


def test_importing_the_command_imports_no_user_code(tmp_path: Path) -> None:
    """A user's folder with packages of our names in it is not imported by the driver."""
    for name in ("tuner", "pruning", "llama3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('pwned', 'w').close()")
    program = "import sys; from tuner.cli import main; sys.exit(main(['list']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "LEDGERTUNE_STUDIES": str(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 2) and not (tmp_path / "pwned").exists(), done.stderr

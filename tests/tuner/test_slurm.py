"""Slurm: reading an allocation, and Ray over its nodes with an ``srun`` that runs every task on this machine."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
import psutil
import pytest

from search_space.errors import UserError
from tuner.cluster.session import join
from tuner.cluster.session import SLOT
from tuner.cluster.slurm import allocation
from tuner.cluster.slurm import expand


def test_node_lists() -> None:
    assert expand("a") == ["a"]
    assert expand("gpu[001-003,7],login1") == ["gpu001", "gpu002", "gpu003", "gpu7", "login1"]
    assert expand("r[1-2]n[08-09].x") == ["r1n08.x", "r1n09.x", "r2n08.x", "r2n09.x"]


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=6), st.integers(1, 5))
def test_ranges_keep_their_width(numbers: list[int], width: int) -> None:
    listed = ",".join(f"{n:0{width}d}" for n in numbers)
    assert expand(f"n[{listed}]") == [f"n{n:0{width}d}" for n in numbers]


@pytest.mark.parametrize("text", ["n[1-2", "n[a-b]", "", ","])
def test_what_is_no_node_list_is_said(text: str) -> None:
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST"):
        expand(text)


def test_an_allocation() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}
    found = allocation(env)
    assert (
        found is not None and found.nodes == ("n1", "n2", "n3") and found.here == "n2" and found.others == ("n1", "n3")
    )
    assert allocation({}) is None and allocation({"SLURM_JOB_ID": "7"}) is None


TUNE = "import sys; from tuner.cli import main; sys.exit(main())"

SRUN = """#!{python}
import os, signal, subprocess, sys
options = [a for a in sys.argv[1:] if a.startswith("--")]
command = sys.argv[1:]
while command and command[0].startswith("--"):
    command = command[1:]
tasks = int(next(o.split("=")[1] for o in sys.argv if o.startswith("--ntasks=")))
open(os.environ["FAKE_SRUN_LOG"], "a").write(" ".join(sys.argv[1:]) + "\\n")
children = [subprocess.Popen(command) for _ in range(tasks)]
signal.signal(signal.SIGTERM, lambda *_: [c.terminate() for c in children])
sys.exit(max(c.wait() for c in children))
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of two nodes, both of which are this machine."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SRUN_LOG", str(tmp_path / "srun.log"))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,elsewhere")
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    return tmp_path


def rays() -> list[int]:
    """Processes of Ray's starting commands that listen for our test."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "ray.scripts.scripts start --block" in line:
            found.append(process.pid)
    return found


@pytest.mark.e2e
def test_a_study_inside_an_allocation_uses_its_nodes_and_leaves_nothing(slurm: Path) -> None:
    """In a process of its own, as Ray reads its token when it is imported."""
    code = (
        "from pathlib import Path\nfrom tuner.cluster.session import join\n"
        f"with join('cpu', 2, folder=Path({str(slurm)!r})) as session:\n"
        "    print(session.resource, [node.devices for node in session.nodes()])\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": root}
    )
    assert done.stdout.strip() == f"{SLOT} [2, 2]", done.stdout + done.stderr
    command = (slurm / "srun.log").read_text()
    assert "--jobid=42 --nodes=1 --ntasks=1" in command and "--nodelist=elsewhere" in command
    assert not rays()


def test_without_srun_the_error_says_what_to_do(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="srun is not on the path"), join("cpu", 2, folder=slurm):
        pass


def test_nodes_of_the_job_default_to_those_of_the_allocation(slurm: Path) -> None:
    """`tune start` of a job that names no nodes plans for both; without a second node it is refused by name."""
    job = slurm / "job.toml"
    job.write_text('[model]\ntorchtitan = "llama3:llama3_debugmodel"\n[cluster]\ngpu = "cpu"\ngpus_per_node = 2\n')
    (slurm / "bin" / "srun").unlink()
    done = subprocess.run(
        [sys.executable, "-c", TUNE, "start", str(job), "--budget", "1-cpu-minutes"],
        capture_output=True,
        text=True,
        cwd=slurm,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert done.returncode == 2 and "Slurm job 42 has 2 nodes" in done.stderr, done.stderr

"""What SECURITY.md promises, over all packages: no code from data, no shell, no way out of a folder, no secret kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
import json
from pathlib import Path
import re
import stat
import subprocess
import sys
import tomllib
from typing import Any

from hypothesis import given
from hypothesis import HealthCheck
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from search_space.errors import JobError
from search_space.errors import UserError
from search_space.job_file import parse_job
from search_space.redact import HIDDEN
from search_space.redact import is_secret_name
from search_space.redact import known_secrets
from search_space.redact import redact
from search_space.redact import redact_argv
from search_space.redact import redact_value
from search_space.redact import without_password
from tuner.cluster.session import check_token
from tuner.evidence.claim import Claim
from tuner.records.journal import Journal
from tuner.records.layout import new_folder
from tuner.records.layout import StudyFolder


ROOT = Path(__file__).parents[1]
PACKAGES = ("tuner", "search_space", "pruning", "trial_runner", "dashboards")


def trees() -> Iterator[tuple[str, ast.AST]]:
    """Every module of ours as (path, syntax tree)."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "tarfile", "zipfile"}


def faults_of(tree: ast.AST) -> list[str]:
    """What a module must not hold: evaluated text, unpickled data, archives, shells, commands that are one string."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS:
            found.append(f"calls {name}")
        if name in ("torch.load", "np.load", "numpy.load", "yaml.load", "pd.read_pickle"):
            found.append(f"calls {name}")
        if any(word.arg == "shell" for word in node.keywords):
            found.append(f"{name} with shell")
        if re.fullmatch(r"subprocess\.(run|Popen|call|check_call|check_output)", name) and node.args:
            command = node.args[0]
            if isinstance(command, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                found.append(f"{name} of a text")
    return found


def test_no_code_from_data_and_no_shell() -> None:
    assert {path: faults for path, tree in trees() if (faults := faults_of(tree))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "import pickle",
        "from marshal import loads",
        "subprocess.run(f'rm {x}', shell=True)",
        "subprocess.Popen('a b')",
        "torch.load(p)",
        "os.system('x')",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str) -> None:
    assert faults_of(ast.parse(text))


def test_user_modules_are_imported_in_child_processes_only() -> None:
    """Importing by a name from data happens in rank processes; elsewhere only our own verbs and pynvml are named."""
    users = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("importlib.import_module", "importlib.util.spec_from_file_location", "runpy.run_path"):
                    users.add(path)
    assert users == {"tuner/cli/__init__.py", "trial_runner/clocks.py", "trial_runner/rank/loading.py"}
    importers = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "trial_runner.rank.loading":
                importers.add(path)
    driver = {path for path in importers if not path.startswith(("trial_runner/rank/", "trial_runner/dry_run/"))}
    assert driver <= {"trial_runner/recipe/describe.py"}, driver


def test_our_servers_bind_loopback_unless_told() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
                # `tune serve` only shows the host's name instead of it, where the user bound it.
                assert path == "tuner/cli/serve.py", path
    serve = (ROOT / "tuner/cli/serve.py").read_text()
    assert '"--host", default="127.0.0.1"' in serve
    session = (ROOT / "tuner/cluster/session.py").read_text()
    assert 'dashboard_host="127.0.0.1"' in session
    assert '"--host", "127.0.0.1"' in (ROOT / "tuner/cli/ui.py").read_text()


# Names


@given(st.text(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_models_name_never_leaves_the_folder_of_studies(tmp_path: Path, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEDGERTUNE_STUDIES", str(tmp_path))
        assert new_folder(None, name).root.parent == tmp_path.resolve()


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00b", "-rf", "\x1b[2J"])
def test_odd_study_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="printable"):
        new_folder(name, "m")


@given(st.integers(min_value=0, max_value=10**9))
def test_a_trials_folder_lies_in_its_study(number: int) -> None:
    folder = StudyFolder(Path("/somewhere/s"))
    assert folder.trial(number).parent == folder.root / "trials"


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "a b", "x;y", "", "a.b"])
def test_a_claims_name_cannot_be_a_path(name: str) -> None:
    side: dict[str, Any] = {
        key: 0
        for key in (
            "candidate label trials run_medians_s step_time_s step_time_ci_s step_time_p95_s tokens_per_s_per_device "
            "mfu_pct mfu_ci_pct peak_reserved_gib device_s"
        ).split()
    }
    fields = [field for field in Claim.__dataclass_fields__ if field not in ("name", "before", "after")]
    good = {**dict.fromkeys(fields, ""), "before": side, "after": side}
    assert Claim.from_json(json.dumps({**good, "name": "llama3_8b_h100_8x"}), "x").name
    with pytest.raises(UserError, match="no Python name"):
        Claim.from_json(json.dumps({**good, "name": name}), "x")


def test_a_journal_cannot_point_records_elsewhere() -> None:
    """No reader of a journal follows the folder that a record names; only the process that wrote it does."""
    for path in ("tuner/cli/report.py", "dashboards/page_data.py", "tuner/study/judging.py"):
        assert '["folder"]' not in (ROOT / path).read_text()
    for path in (ROOT / "tuner/records/tracking").glob("*.py"):
        assert '"folder"' not in path.read_text()


# Secrets


SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40).filter(
    lambda text: len(set(text)) > 4
)


@given(SECRETS, st.sampled_from(["HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_API_KEY"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_secret_of_the_environment_reaches_a_journal(tmp_path: Path, secret: str, name: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, secret)
        journal = Journal(path)
        journal.write("trial", failure={"text": f"could not log in as u with {secret}."}, argv=["x", secret], n=3)
        journal.close()
    event = json.loads(path.read_text())
    assert secret not in json.dumps(event, ensure_ascii=False) and secret not in str(event)
    assert event["n"] == 3 and event["event"] == "trial"


@given(SECRETS, st.sampled_from(["http", "https", "postgresql", "postgresql+psycopg", "redis"]))
def test_no_password_in_an_address_survives(secret: str, scheme: str) -> None:
    from urllib.parse import quote

    address = f"{scheme}://user:{quote(secret, safe='')}@host:5432/name"
    for text in (redact(f"cannot reach {address} now", ()), without_password(address)):
        assert quote(secret, safe="") not in text and "host" in text
    assert redact_value({"storage": address}, ())["storage"].count(HIDDEN) == 1


@given(SECRETS.filter(lambda text: not text.startswith("-")))
def test_no_secret_option_survives_in_a_command_line(secret: str) -> None:
    shown = redact_argv(["tune", "start", "--wandb-api-key", secret, f"--hf-token={secret}", "--budget", "1-gpu-hours"])
    assert secret not in " ".join(shown).split() and shown[-1] == "1-gpu-hours" and f"--hf-token={secret}" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "hf_abcdefghijklmnopqrstuv",
        "ghp_abcdefghijklmnopqrstuvwx0123",
        "AKIAABCDEFGHIJKLMNOP",
        "Authorization: Bearer abcdef.ghijkl",
        "password=hunter22",
        'api_key: "long secret value"',
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_known_shapes_are_hidden(text: str) -> None:
    shown = redact(f"before {text} after", ())
    assert HIDDEN in shown and text not in shown


@pytest.mark.parametrize(
    "text",
    [
        "tokens_per_s_per_device 812.5, global_batch_tokens = 4194304",
        "trial 3: tp2 b4 ac=none · predicted 0.345 s a step",
        "https://host/path?x=1 and user@host",
        "Tokenizer loaded; tokenizer: llama3",
    ],
)
def test_ordinary_words_stay(text: str) -> None:
    assert redact(text, ()) == text


def test_names_of_secrets() -> None:
    assert all(map(is_secret_name, ("HF_TOKEN", "password", "wandbApiKey", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD")))
    harmless = ("tokens_per_step", "TOKENIZERS_PARALLELISM", "NCCL_IB_HCA", "RAY_AUTH_TOKEN_PATH", "candidate", "key")
    assert not any(map(is_secret_name, harmless))


def test_rays_token_counts_as_a_secret(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    assert "0123456789abcdef" in known_secrets({"RAY_AUTH_TOKEN_PATH": str(token)})


def test_a_job_holds_no_secrets() -> None:
    with pytest.raises(JobError, match="holds no secrets"):
        parse_job('[model]\ntorchtitan = "llama3:x"\n[env.a]\nHF_TOKEN = "hf_x"\n')
    job = parse_job(
        '[model]\ntorchtitan = "llama3:x"\n[records]\nmlflow_uri = "https://u:secretpass@host"\n'
        'storage = "postgresql://u:secretpass@host/db"\n'
    )
    assert "secretpass" not in job.model_dump_json() and "u@host" in job.model_dump_json()
    assert job.records.storage == "postgresql://u:secretpass@host/db"


def test_ray_answers_only_who_holds_its_token(tmp_path: Path) -> None:
    token = tmp_path / "auth_token"
    token.write_text("x")
    token.chmod(0o644)
    check_token({"RAY_AUTH_TOKEN_PATH": str(token)})
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="anybody's code"):
        check_token({"RAY_AUTH_MODE": "disabled"})


# Cases


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

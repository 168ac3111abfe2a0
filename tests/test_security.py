"""What SECURITY.md promises, over all packages: no code from data, no shell, no way out of a folder, no secret kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
import json
from pathlib import Path
import re
import stat
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


def test_the_working_folder_is_no_password() -> None:
    """Shells call it PWD; hidden, every path of a study would read ***."""
    assert "/home/me/work" not in known_secrets({"PWD": "/home/me/work", "OLDPWD": "/home/me/work", "HOME": "/nowhere"})

"""The winner's commit: what is in it, that it is made once, and that nothing else in the repository moves."""

from __future__ import annotations

import ast
from dataclasses import replace
import json
import os
from pathlib import Path
import stat

from hypothesis import given
from hypothesis import strategies as st
import pytest

from search_space.errors import UserError
from tests.tuner.claims import make_claim
from tuner.cli import main
from tuner.evidence.claim import Claim
from tuner.evidence.commit import add_page
from tuner.evidence.commit import BEGIN
from tuner.evidence.commit import branch_of
from tuner.evidence.commit import commit_claim
from tuner.evidence.commit import committed_claim
from tuner.evidence.commit import END
from tuner.evidence.commit import files_of
from tuner.evidence.commit import read_rows
from tuner.evidence.machine import Control
from tuner.evidence.wording import report
from tuner.repository import commit_files
from tuner.repository import git
from tuner.repository import open_repository
from tuner.repository import tip_of


IDENTITY = ["-c", "user.name=u", "-c", "user.email=u@x", "-c", "commit.gpgsign=false"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository with one commit; no identity is configured anywhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = open_repository(tmp_path / "r", create=True)
    (path / "a").write_text("one\n")
    git(path, "add", "a")
    git(path, *IDENTITY, "commit", "-qm", "first")
    return path


def state_of(repository: Path) -> tuple[str, ...]:
    """Everything of a repository that a commit of ours must not move."""
    branch = git(repository, "rev-parse", "--abbrev-ref", "HEAD")
    return (
        git(repository, "status", "--porcelain"),
        git(repository, "rev-parse", "HEAD"),
        branch,
        git(repository, "diff"),
        git(repository, "diff", "--cached"),
        git(repository, "stash", "list"),
        git(repository, "for-each-ref", "--format=%(refname) %(objectname)", "refs/heads/main", "refs/tags"),
    )


def test_what_is_in_the_commit(repository: Path) -> None:
    done = commit_claim(make_claim(), repository, create=False)
    names = git(repository, "show", "--name-only", "--format=", done["hash"]).splitlines()
    assert names == ["TUNING.md", "f_cpu_2x.claim.json", "f_cpu_2x.py", "f_cpu_2x.report.md", "tuning_ledger.csv"]
    text = git(repository, "show", f"{done['hash']}:f_cpu_2x.py")
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert "step time -20.0% [-22.0, -18.0]" in doc and "approved by: nobody yet" in doc and "bought:" in doc
    (row,) = read_rows(git(repository, "show", f"{done['hash']}:tuning_ledger.csv"))
    assert row["what"] == "micro_batch=4" and row["before_p95_s"] == "1.1" and row["loss"] == "agree"
    assert "What each change bought" in git(repository, "show", f"{done['hash']}:f_cpu_2x.report.md")
    assert "| 2026-11-29 | micro_batch=4 |" in git(repository, "show", f"{done['hash']}:TUNING.md")


def test_the_same_claim_is_committed_once_and_an_approval_on_top(repository: Path) -> None:
    first = commit_claim(make_claim(), repository, create=False)["hash"]
    assert commit_claim(make_claim(), repository, create=False)["hash"] == first
    second = commit_claim(make_claim().approved("Ada"), repository, create=False)["hash"]
    assert git(repository, "rev-parse", f"{second}^") == first
    assert "MFU +10.0 points" in git(repository, "log", "-1", "--format=%B", first)
    assert "Approved-by: Ada" in git(repository, "log", "-1", "--format=%B", second)
    (row,) = read_rows(git(repository, "show", f"{second}:tuning_ledger.csv"))
    assert row["approved_by"] == "Ada"


def test_a_claim_keeps_how_fast_its_machine_was() -> None:
    claim = make_claim()
    claim = replace(
        claim,
        before=replace(claim.before, control=Control(work="w", runs_s=(0.05, 0.06))),
        after=replace(claim.after, control=Control(work="w", runs_s=(0.04,))),
    )
    read = Claim.from_json(claim.to_json(), "x")
    assert (read.before.control, read.after.control) == (claim.before.control, claim.after.control)
    assert claim.control == Control(work="w", runs_s=(0.04, 0.05, 0.06))
    assert "| control beside them, s a round | 0.05, 0.06 | 0.04 |" in report(claim)
    # Another environment may slow the control itself, and so may other work.
    other = replace(claim.before, candidate=claim.before.candidate | {"env": "planted"})
    assert replace(claim, before=other).control == claim.after.control
    other = replace(claim.before, control=Control(work="v", runs_s=(0.05,)))
    assert replace(claim, before=other).control == claim.after.control
    assert replace(claim, before=claim.after).control == claim.after.control
    earlier = json.loads(claim.to_json())
    del earlier["before"]["control"], earlier["after"]["control"]
    assert Claim.from_json(json.dumps(earlier), "x").control == Control()


def dirty(repository: Path) -> None:
    (repository / "a").write_text("two\n")
    git(repository, "add", "a")
    (repository / "a").write_text("three\n")
    (repository / "untracked").write_text("x\n")
    (repository / "TUNING.md").write_text("mine, not committed\n")


def hooks(repository: Path) -> None:
    for name in ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "post-checkout"):
        hook = repository / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        # reference-transaction also runs for the one ref that is ours to move; it may look, not refuse.
        hook.write_text("#!/bin/sh\nexit 0\n" if name == "reference-transaction" else "#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)


def submodule(repository: Path) -> None:
    other = open_repository(repository.parent / "other", create=True)
    (other / "b").write_text("b\n")
    git(other, "add", "b")
    git(other, *IDENTITY, "commit", "-qm", "b")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "sub")
    git(repository, *IDENTITY, "commit", "-qm", "submodule")
    (repository / "sub" / "b").write_text("changed inside\n")


def detached(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")


def worktree(repository: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "side", str(repository.parent / "side"))


def crlf(repository: Path) -> None:
    git(repository, "config", "core.autocrlf", "true")
    (repository / ".gitattributes").write_text("*.md eol=crlf\n")


@pytest.mark.parametrize("trouble", [dirty, hooks, submodule, detached, worktree, crlf])
def test_nothing_else_is_touched(repository: Path, trouble: object) -> None:
    trouble(repository)  # type: ignore[operator]
    before = state_of(repository)
    done = commit_claim(make_claim(), repository, create=False)
    assert state_of(repository) == before
    assert git(repository, "rev-parse", f"{done['hash']}^") == git(repository, "rev-parse", "HEAD")
    changed = git(repository, "diff", "--name-only", "HEAD", done["hash"]).splitlines()
    assert set(changed) == set(files_of(make_claim(), None, None))


def test_a_branch_that_is_checked_out_is_refused(repository: Path) -> None:
    commit_claim(make_claim(), repository, create=False)
    git(repository, "checkout", "-q", branch_of("s"))
    with pytest.raises(UserError, match="is checked out in"):
        commit_claim(make_claim(why="other"), repository, create=False)
    assert git(repository, "status", "--porcelain") == ""


def fake_gpg(tmp_path: Path, works: bool) -> Path:
    program = tmp_path / "gpg"
    body = 'echo "[GNUPG:] SIG_CREATED " >&2\necho "-----BEGIN PGP SIGNATURE-----\nx\n-----END PGP SIGNATURE-----"\n'
    program.write_text("#!/bin/sh\ncat > /dev/null\n" + (body if works else "echo no secret key >&2\nexit 2\n"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.mark.parametrize("works", [True, False])
def test_a_rule_of_signed_commits_is_kept(repository: Path, tmp_path: Path, works: bool) -> None:
    git(repository, "config", "commit.gpgsign", "true")
    git(repository, "config", "gpg.program", str(fake_gpg(tmp_path, works)))
    git(repository, "config", "user.signingkey", "ABC")
    if works:
        done = commit_claim(make_claim(), repository, create=False)
        assert "gpgsig -----BEGIN PGP SIGNATURE-----" in git(repository, "cat-file", "-p", done["hash"])
        return
    with pytest.raises(UserError, match="wants signed commits"):
        commit_claim(make_claim(), repository, create=False)
    assert tip_of(repository, branch_of("s")) is None


def test_a_studys_own_repository_needs_no_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".gitconfig").write_text(
        f"[commit]\n\tgpgsign = true\n[gpg]\n\tprogram = {fake_gpg(tmp_path, False)}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert commit_claim(make_claim(), tmp_path / "own", create=True)["hash"]


def test_the_claim_is_found_again(repository: Path) -> None:
    done = commit_claim(make_claim(), repository, create=False)
    claim, module, commit = committed_claim(repository, done["branch"])
    assert claim.to_json() == make_claim().to_json() and commit == done["hash"] and "def f_cpu_2x" in module
    with pytest.raises(UserError, match="holds no claim"):
        committed_claim(repository, "main")
    other = make_claim(name="g_cpu_2x", study="t")
    both = commit_files(repository, "both", files_of(make_claim(), None, None) | files_of(other, None, None), "m")
    with pytest.raises(UserError, match="several claims"):
        committed_claim(repository, both)
    assert committed_claim(repository, both, "g_cpu_2x")[0].study == "t"
    with pytest.raises(UserError, match="not a claim"):
        Claim.from_json("{}", "x")


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=80))
def test_what_the_user_wrote_around_the_table_stays(text: str) -> None:
    text = text.replace("\r", "\n").replace("<!--", "")
    page = add_page(text, "date,what\n2026,x\n")
    assert text.rstrip() in page and page.count(BEGIN) == page.count(END) == 1
    again = add_page(page + "\nmore of mine\n", "date,what\n2026,y\n")
    assert "more of mine" in again and "| y |" in again.replace("|  |", "|") and "| x |" not in again


@given(st.text(max_size=60))
def test_any_words_make_a_file_that_python_reads(why: str) -> None:
    claim = make_claim(why=why.replace("\x00", ""), approved_by='"""\\')
    for name, text in files_of(claim, None, None).items():
        if name.endswith(".py"):
            ast.parse(text.encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
    assert "f_cpu_2x" in report(claim)


def test_tune_commit_as_a_user_types_it(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "studies" / "s"
    study.mkdir(parents=True)
    monkeypatch.setenv("LEDGERTUNE_STUDIES", str(study.parent))
    (study / "study.json").write_text(json.dumps({"study": "s"}))
    (study / "job.json").write_text(json.dumps({"model": {"torchtitan": "m.n:f"}}))
    assert main(["commit", "s", "--to", str(repository), "--json"]) == 2
    assert "no winner to commit" in capsys.readouterr().err
    (study / "claim.json").write_text(make_claim().to_json())
    assert main(["commit", "s", "--to", str(repository), "--approve", "Ada", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["branch"] == "tune/s" and done["approved_by"] == "Ada"
    assert main(["commit", "s", "--pr-body"]) == 0
    assert "Approved by: Ada" in capsys.readouterr().out
    assert main(["commit", "s"]) == 0
    assert (study / "repository" / ".git").exists() and os.path.exists(study / "claim.json")


def test_verify_finds_the_study_of_its_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --repo a study's branch is looked for here, then in the study's own repository; else it is said where."""
    from tuner.cli import main
    from tuner.cli.verify import _repository

    monkeypatch.setenv("LEDGERTUNE_STUDIES", str(tmp_path / "studies"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    git(here, "init", "-q")
    assert main(["verify", "tune/s"]) == 2
    assert "has no commit 'tune/s'; `tune report STUDY` says" in capsys.readouterr().err
    own = tmp_path / "studies" / "s" / "repository"
    own.mkdir(parents=True)
    assert _repository("tune/s") == own
    assert _repository("HEAD") == Path()


def test_a_mistyped_study_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.records.layout import find_folder

    monkeypatch.setenv("LEDGERTUNE_STUDIES", str(tmp_path))
    (tmp_path / "llama3_debugmodel").mkdir()
    (tmp_path / "llama3_debugmodel" / "study.json").write_text("{}")
    with pytest.raises(UserError, match="did you mean 'llama3_debugmodel'"):
        find_folder("llama3_debugmode")

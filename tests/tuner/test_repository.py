"""The winner's commit touches nothing but its branch."""

from __future__ import annotations

from pathlib import Path
import subprocess

import pytest

from search_space.errors import UserError
from tuner.evidence.commit import add_row
from tuner.evidence.commit import branch_of
from tuner.evidence.commit import check_commit_target
from tuner.evidence.commit import COLUMNS
from tuner.repository import commit_files
from tuner.repository import git
from tuner.repository import open_repository
from tuner.repository import read_file


@pytest.fixture
def dirty(tmp_path: Path) -> Path:
    """A repository with a commit, a staged change, an unstaged one and a hook that refuses everything."""
    repository = tmp_path / "r"
    open_repository(repository, create=True)
    identity = ["-c", "user.name=u", "-c", "user.email=u@x"]
    (repository / "a").write_text("one\n")
    git(repository, "add", "a")
    git(repository, *identity, "commit", "-qm", "first")
    (repository / "a").write_text("two\n")
    git(repository, "add", "a")
    (repository / "a").write_text("three\n")
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    return repository


def test_working_tree_index_and_head_stay(dirty: Path) -> None:
    before = (git(dirty, "status", "--porcelain"), git(dirty, "rev-parse", "HEAD"), git(dirty, "diff", "--cached"))
    commit = commit_files(dirty, "tune/s", {"x/config.py": "print(1)\n"}, "message")
    after = (git(dirty, "status", "--porcelain"), git(dirty, "rev-parse", "HEAD"), git(dirty, "diff", "--cached"))
    assert before == after and (dirty / "a").read_text() == "three\n"
    assert git(dirty, "show", f"{commit}:x/config.py") == "print(1)"
    assert git(dirty, "show", f"{commit}:a") == "one"
    assert git(dirty, "diff", "--name-only", "HEAD", commit) == "x/config.py"


def test_same_content_is_committed_once(dirty: Path) -> None:
    first = commit_files(dirty, "tune/s", {"c": "1\n"}, "m")
    assert commit_files(dirty, "tune/s", {"c": "1\n"}, "m") == first
    second = commit_files(dirty, "tune/s", {"c": "2\n"}, "m")
    assert git(dirty, "rev-parse", f"{second}^") == first


def test_empty_repository_and_detached_head(tmp_path: Path, dirty: Path) -> None:
    fresh = open_repository(tmp_path / "new", create=True)
    assert read_file(fresh, commit_files(fresh, "tune/s", {"c": "1\n"}, "m"), "c") == "1\n"
    git(dirty, "checkout", "-q", "--detach", "-f")
    commit_files(dirty, "tune/s", {"c": "1\n"}, "m")
    assert subprocess.run(["git", "-C", str(dirty), "symbolic-ref", "-q", "HEAD"]).returncode == 1


def test_no_repository_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a git repository"):
        open_repository(tmp_path, create=False)


def test_change_table_keeps_other_studies_and_replaces_its_own() -> None:
    row = dict.fromkeys(COLUMNS, "") | {"study": "a", "what": "x, y"}
    table = add_row(add_row(None, row), row | {"study": "b"})
    table = add_row(table, row | {"what": "z"})
    lines = table.splitlines()
    assert len(lines) == 3 and ",b," in lines[1] and ",z," in lines[2]


@pytest.mark.parametrize("study", ["a..b", "x.lock", "日本", "-x-", "a/b c", "ok-1"])
def test_branch_names_are_ones_that_git_takes(study: str) -> None:
    done = subprocess.run(["git", "check-ref-format", f"refs/heads/{branch_of(study)}"])
    assert done.returncode == 0


def test_commit_target_is_checked_before_anything_is_spent(tmp_path: Path, dirty: Path) -> None:
    check_commit_target(None)
    check_commit_target(str(dirty))
    with pytest.raises(UserError, match="not a git repository"):
        check_commit_target(str(tmp_path / "nowhere"))

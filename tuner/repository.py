"""Git plumbing: a commit on a branch of a repository whose working tree and index stay untouched."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess

from search_space.errors import UserError


AUTHOR = {"GIT_AUTHOR_NAME": "ledgertune", "GIT_AUTHOR_EMAIL": "ledgertune@localhost"}
"""Author of commits where the repository names nobody."""


def git(repository: Path, *args: str, env: dict[str, str] | None = None, text: str | None = None) -> str:
    """Run one git command in ``repository`` and return its standard output, stripped.

    Raises:
        UserError: git fails; the message is git's own.
    """
    base = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *args],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            input=text,
            env=base | (env or {}),
        )
    except FileNotFoundError:
        raise UserError("git is not installed; the winner's commit needs it") from None
    if done.returncode:
        raise UserError(f"git {' '.join(args[:2])} in {repository}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def head_of(folder: Path) -> str | None:
    """Commit that the repository around ``folder`` is at; None when there is none."""
    try:
        return git(folder, "rev-parse", "HEAD")
    except UserError:
        return None


def open_repository(path: Path, create: bool) -> Path:
    """The repository at ``path``; with ``create`` an empty one is made when there is none.

    Raises:
        UserError: ``path`` is no git repository.
    """
    if create and not (path / ".git").exists():
        path.mkdir(parents=True, exist_ok=True)
        git(path, "init", "--quiet", "--initial-branch=main")
    try:
        return Path(git(path, "rev-parse", "--show-toplevel"))
    except UserError:
        raise UserError(f"{path}: not a git repository; name the folder of one, or leave the option out") from None


def read_file(repository: Path, revision: str, name: str) -> str | None:
    """Text of a file at a revision, or None when it has no such file."""
    try:
        return git(repository, "show", f"{revision}:{name}") + "\n"
    except UserError:
        return None


def tip_of(repository: Path, branch: str) -> str | None:
    """Commit at the tip of a branch, or None when there is no such branch."""
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}^{{commit}}")
    except UserError:
        return None


def commit_files(repository: Path, branch: str, files: dict[str, str], message: str, sign: bool = True) -> str:
    """Commit ``files`` (name to text) on ``branch``, on top of its tip, else of HEAD, else of nothing.

    Works on objects and refs only: a private index, no checkout, no hooks. The same content on the same parent is
    not committed twice. Where the repository wants signed commits, the commit is signed.

    Args:
        repository: where.
        branch: short name.
        files: name to text.
        message: commit message.
        sign: whether to follow ``commit.gpgsign``.

    Returns:
        The commit's hash.

    Raises:
        UserError: git refuses, or the branch is checked out somewhere.
    """
    _not_checked_out(repository, branch)
    parent = tip_of(repository, branch) or head_of(repository)
    scratch = Path(git(repository, "rev-parse", "--absolute-git-dir")) / f"ledgertune-index-{os.getpid()}"
    index = {"GIT_INDEX_FILE": str(scratch)}
    try:
        git(repository, "read-tree", parent or "--empty", env=index)
        for name, text in sorted(files.items()):
            blob = git(repository, "hash-object", "-w", "--stdin", text=text)
            git(repository, "update-index", "--add", "--cacheinfo", f"100644,{blob},{name}", env=index)
        tree = git(repository, "write-tree", env=index)
    finally:
        scratch.unlink(missing_ok=True)
    if parent is not None and tip_of(repository, branch) and git(repository, "rev-parse", f"{parent}^{{tree}}") == tree:
        return parent
    author = dict(AUTHOR)
    author |= {"GIT_COMMITTER_NAME": AUTHOR["GIT_AUTHOR_NAME"], "GIT_COMMITTER_EMAIL": AUTHOR["GIT_AUTHOR_EMAIL"]}
    if _has_identity(repository):
        author = {}
    parents = ["-p", parent] if parent else []
    signed = sign and _wants_signatures(repository)
    try:
        commit = git(
            repository, "commit-tree", tree, *parents, *(["-S"] if signed else []), "-F", "-", env=author, text=message
        )
    except UserError as error:
        if not signed:
            raise
        raise UserError(
            f"{error}; the repository wants signed commits (commit.gpgsign) and signing failed: make the key available "
            "and run `tune commit` again"
        ) from None
    git(repository, "update-ref", f"refs/heads/{branch}", commit)
    return commit


def changed_files(repository: Path, revision: str) -> list[str]:
    """Names of the files that a commit adds or changes.

    Raises:
        UserError: there is no such commit.
    """
    return git(repository, "show", "--name-only", "--format=", "--diff-filter=AM", revision).splitlines()


def _not_checked_out(repository: Path, branch: str) -> None:
    """Moving a branch under somebody's working tree would make every file in it look deleted.

    Raises:
        UserError: a working tree is on the branch.
    """
    where = ""
    for line in git(repository, "worktree", "list", "--porcelain").splitlines():
        key, _, value = line.partition(" ")
        if key == "worktree":
            where = value
        elif key == "branch" and value == f"refs/heads/{branch}" and tip_of(repository, branch):
            raise UserError(
                f"branch {branch} is checked out in {where}, and the commit must not move it under your feet; "
                "switch to another branch there and run `tune commit`"
            )


def _wants_signatures(repository: Path) -> bool:
    try:
        return git(repository, "config", "--type=bool", "commit.gpgsign") == "true"
    except UserError:
        return False


def _has_identity(repository: Path) -> bool:
    try:
        return bool(git(repository, "config", "user.name") and git(repository, "config", "user.email"))
    except UserError:
        return False

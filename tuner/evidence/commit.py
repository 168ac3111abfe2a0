"""The winner's commit: its config function, the claim behind it, a row in the change table, the report."""

from __future__ import annotations

import csv
import io
from pathlib import Path
import re

from search_space.errors import UserError
from trial_runner.recipe.config_file import docstring
from tuner.evidence import wording
from tuner.evidence.claim import Claim
from tuner.repository import changed_files
from tuner.repository import commit_files
from tuner.repository import git
from tuner.repository import open_repository
from tuner.repository import read_file
from tuner.repository import tip_of


TABLE = "tuning_ledger.csv"
"""Change table in the user's repository, for programs."""

PAGE = "TUNING.md"
"""The same for people."""

BEGIN, END = "<!-- tuning ledger -->", "<!-- end of tuning ledger -->"
"""What stands around the table in :data:`PAGE`; the rest of the file is the user's."""

COLUMNS = (
    "date",
    "study",
    "what",
    "why",
    "config",
    "before_step_time_s",
    "before_interval_s",
    "after_step_time_s",
    "after_interval_s",
    "change_pct",
    "change_interval_pct",
    "before_p95_s",
    "after_p95_s",
    "before_tokens_per_s_per_device",
    "after_tokens_per_s_per_device",
    "before_mfu_pct",
    "after_mfu_pct",
    "before_peak_reserved_gib",
    "after_peak_reserved_gib",
    "loss",
    "trace",
    "versions",
    "approved_by",
)
"""Columns of the change table."""

CLAIM = ".claim.json"
"""How the names of claims end."""

SHOWN = ("date", "what", "change_pct", "after_mfu_pct", "config", "study", "approved_by")
"""Columns of :data:`PAGE`."""


def branch_of(study: str) -> str:
    """The branch that a study's winner goes to: a name that git takes, whatever the study is called."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", study).strip("-") or "study"
    return f"tune/{plain}"


def check_commit_target(commit_to: str | None) -> None:
    """Find out before anything is spent whether the winner can be committed.

    Raises:
        UserError: ``commit_to`` is no git repository.
    """
    if commit_to is not None:
        open_repository(Path(commit_to).expanduser(), create=False)


def commit_claim(claim: Claim, repository: Path, create: bool) -> dict[str, str]:
    """Commit a claim to branch ``tune/<study>``; the same claim is not committed twice.

    Args:
        claim: the winner and its evidence.
        repository: where to commit.
        create: make the repository when there is none.

    Returns:
        ``repo``, ``branch``, ``hash``, ``file`` and ``function``.

    Raises:
        UserError: ``repository`` is no repository, the branch is checked out, or git refuses.
    """
    top = open_repository(repository, create)
    branch = branch_of(claim.study)
    at = tip_of(top, branch) or "HEAD"
    files = files_of(claim, read_file(top, at, TABLE), read_file(top, at, PAGE))
    what, sentence = _what(claim) or "baseline kept", wording.gain(claim.comparison)
    message = (
        f"Tune {claim.function.split(':')[-1]}: {what}\n\n"
        f"{sentence[0].upper()}{sentence[1:]} on {claim.num_devices} × {claim.hardware}, "
        f"study {claim.study}.\n"
    )
    if claim.approved_by:
        message += f"\nApproved-by: {claim.approved_by}\n"
    commit = commit_files(top, branch, files, message, sign=not create)
    return {"repo": str(top), "branch": branch, "hash": commit, "file": f"{claim.name}.py", "function": claim.name}


def files_of(claim: Claim, table: str | None, page: str | None) -> dict[str, str]:
    """The commit's files by name.

    Args:
        claim: the winner and its evidence.
        table: the change table as it is now, if there is one.
        page: the same for people.
    """
    # A lone carriage return would end a row where none ends.
    grown = add_row(table, {name: text.replace("\r", " ") for name, text in row_of(claim).items()})
    return {
        f"{claim.name}.py": docstring(wording.evidence(claim)) + "\n" + claim.module,
        claim.name + CLAIM: claim.to_json(),
        f"{claim.name}.report.md": wording.report(claim),
        TABLE: grown,
        PAGE: add_page(page, grown),
    }


def committed_claim(repository: Path, revision: str, name: str | None = None) -> tuple[Claim, str, str]:
    """A claim that a commit holds, the config file beside it, and the commit's full hash.

    Args:
        repository: where.
        revision: any name of the commit.
        name: the function's name, where there are several claims; those that the commit itself changed come first.

    Raises:
        UserError: no repository, commit or claim, or several claims.
    """
    top = open_repository(repository, create=False)
    try:
        commit = git(top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except UserError:
        raise UserError(
            f"{top} has no commit {revision!r}; `tune report STUDY` says in which repository a study's commit lies "
            "(--repo)"
        ) from None
    everywhere = git(top, "ls-tree", "-r", "--name-only", commit).splitlines()
    for files in (changed_files(top, commit), everywhere):
        claims = [file for file in files if file.endswith(CLAIM) and name in (None, Path(file).name[: -len(CLAIM)])]
        if len(claims) == 1:
            text, module = (read_file(top, commit, file) for file in (claims[0], claims[0][: -len(CLAIM)] + ".py"))
            if module is None:
                raise UserError(f"commit {revision}: {claims[0]} has no config file beside it")
            return Claim.from_json(text or "", claims[0]), module, commit
        if claims:
            raise UserError(
                f"commit {revision} holds several claims, name one with --name: {', '.join(sorted(claims))}"
            )
    named = f" named {name}" if name else ""
    raise UserError(f"commit {revision} of {top} holds no claim{named}; `tune commit` writes one")


def _what(claim: Claim) -> str:
    return "; ".join(f"{knob}={after}" for knob, (_, after) in claim.changed.items())


def row_of(claim: Claim) -> dict[str, str]:
    """The claim's row in the change table."""
    before, after, found = claim.before, claim.after, claim.comparison
    low, high = found["step_time_change_ci_pct"]
    return {
        "date": claim.date,
        "study": claim.study,
        "what": _what(claim),
        "why": claim.why,
        "config": f"{claim.name}.py",
        "before_step_time_s": f"{before.step_time_s:.5g}",
        "before_interval_s": "[{:.5g}, {:.5g}]".format(*before.step_time_ci_s),
        "after_step_time_s": f"{after.step_time_s:.5g}",
        "after_interval_s": "[{:.5g}, {:.5g}]".format(*after.step_time_ci_s),
        "change_pct": f"{found['step_time_change_pct']:+.2f}",
        "change_interval_pct": f"[{low:+.2f}, {high:+.2f}]",
        "before_p95_s": f"{before.step_time_p95_s:.5g}",
        "after_p95_s": f"{after.step_time_p95_s:.5g}",
        "before_tokens_per_s_per_device": f"{before.tokens_per_s_per_device:.5g}",
        "after_tokens_per_s_per_device": f"{after.tokens_per_s_per_device:.5g}",
        "before_mfu_pct": f"{before.mfu_pct:.2f}",
        "after_mfu_pct": f"{after.mfu_pct:.2f}",
        "before_peak_reserved_gib": f"{before.peak_reserved_gib:.2f}",
        "after_peak_reserved_gib": f"{after.peak_reserved_gib:.2f}",
        "loss": claim.parity["verdict"],
        "trace": (after.traces or ("",))[0],
        "versions": " ".join(f"{key}={value}" for key, value in claim.versions.items()),
        "approved_by": claim.approved_by,
    }


def read_rows(table: str | None) -> list[dict[str, str]]:
    """The rows of a change table."""
    return list(csv.DictReader(io.StringIO(table, newline=""))) if table else []


def add_row(table: str | None, row: dict[str, str]) -> str:
    """The change table with ``row`` in it; an earlier row of the same study is replaced."""
    rows = [old for old in read_rows(table) if old.get("study") != row["study"]] + [row]
    columns = list(dict.fromkeys([*COLUMNS, *(key for old in rows for key in old if key)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def add_page(page: str | None, table: str) -> str:
    """The page for people with the change table in it; what the user wrote around it stays."""
    lines = [BEGIN, f"| {' | '.join(name.replace('_', ' ') for name in SHOWN)} |", "|---" * len(SHOWN) + "|"]
    for row in read_rows(table):
        cells = [(row.get(name) or "").replace("|", "\\|").replace("\n", " ") for name in SHOWN]
        lines.append(f"| {' | '.join(cells)} |")
    block = "\n".join([*lines, END])
    if page is None:
        return f"# Tuning ledger\n\nEvery row is a configuration change with its evidence; see {TABLE}.\n\n{block}\n"
    if BEGIN in page and END in page[page.index(BEGIN) :]:
        start = page.index(BEGIN)
        return page[:start] + block + page[page.index(END, start) + len(END) :]
    return f"{page.rstrip()}\n\n{block}\n"

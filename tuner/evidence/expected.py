"""What a committed configuration claims: read from its file, its change table, a record, or a commit of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
import csv
from dataclasses import dataclass
from dataclasses import replace
import io
import json
from pathlib import Path
import re
from typing import Any

from search_space.errors import UserError
from tuner.repository import git


TABLE = "tuning_ledger.csv"
"""The change table beside committed configurations."""

_NUMBER = r"([-+]?\d[\d.,]*(?:e[-+]?\d+)?)"
_AFTER = re.compile(r"^\s*(?:after|claim)\s*:\s*(.+)$", re.M)
_STEP = re.compile(rf"step {_NUMBER} s(?: \[{_NUMBER}, {_NUMBER}\])?")
_RATE = re.compile(rf"{_NUMBER} tokens/s/device")
_MFU = re.compile(rf"MFU {_NUMBER}%")
_STUDY = re.compile(r"^\s*study\s*:\s*([^,\n]+)", re.M)


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a run of the configuration should show; None where the claim does not say."""

    source: str
    """Where it was read."""

    step_time_s: float | None = None
    """Median step time."""

    step_time_ci_s: tuple[float, float] | None = None
    """Its 95% interval."""

    tokens_per_s_per_device: float | None = None
    """Throughput."""

    mfu_pct: float | None = None
    """MFU by the product's own arithmetic."""

    study: str | None = None
    """Study that measured it."""

    trace: str | None = None
    """Trace on file."""

    @property
    def tolerance(self) -> float:
        """Relative slowdown that is still the claim: its own interval, and 1 MFU point, whichever is more.

        Differences under one MFU point are noise (design rule): MFU / (MFU - 1) - 1.
        """
        wide = 0.0
        if self.step_time_ci_s and self.step_time_s:
            wide = self.step_time_ci_s[1] / self.step_time_s - 1
        point = self.mfu_pct / (self.mfu_pct - 1) - 1 if self.mfu_pct and self.mfu_pct > 2 else 0.02
        return max(wide, point)

    def to_json(self) -> dict[str, Any]:
        """Every field, and the tolerance."""
        return {
            "source": self.source,
            "step_time_s": self.step_time_s,
            "step_time_ci_s": list(self.step_time_ci_s) if self.step_time_ci_s else None,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "mfu_pct": self.mfu_pct,
            "study": self.study,
            "trace": self.trace,
            "tolerance_pct": 100 * self.tolerance,
        }


def find_expectation(text: str, repository: Path | None = None) -> Expectation:
    """A claim from a file (config function, change table, JSON record) or a commit or branch of ``repository``.

    Raises:
        UserError: it is neither, or states no step time and no throughput.
    """
    path = Path(text).expanduser()
    found = _from_file(path) if path.is_file() else _from_commit(text, repository or Path.cwd())
    if found.step_time_s is None and found.tokens_per_s_per_device is None:
        raise UserError(
            f"--claim {text}: it states no step time and no tokens/s; name the config file of a tune commit"
        )
    return found


def _from_file(path: Path) -> Expectation:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--claim {path}: cannot be read as text ({error})") from None
    if path.suffix == ".csv":
        row = _last_row(text, str(path))
        claim = from_row(row, str(path))
        beside = path.parent / (row.get("config") or "")
        return merged(from_docstring(beside.read_text(), str(beside)), claim) if beside.is_file() else claim
    if path.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"--claim {path}: no JSON ({error})") from None
        if not isinstance(values, dict):
            raise UserError(f"--claim {path}: a JSON object is needed")
        return from_record(values, str(path))
    return from_docstring(text, str(path))


def _from_commit(text: str, repository: Path) -> Expectation:
    """The claim that a commit carries: its change-table row and its config file's docstring."""
    try:
        commit = git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}")
        files = git(repository, "ls-tree", "-r", "--name-only", commit).splitlines()
        changed = git(repository, "show", "--name-only", "--format=", commit).splitlines()
    except UserError:
        raise UserError(
            f"--claim {text}: no such file here, and no such commit in {repository} (--repo names another)"
        ) from None
    source = f"commit {commit[:12]}"
    claim = Expectation(source=source)
    config = next((name for name in changed if name.endswith(".py")), None)
    if TABLE in files:
        rows = list(csv.DictReader(io.StringIO(git(repository, "show", f"{commit}:{TABLE}"))))
        mine = [row for row in rows if config is None or row.get("config") == config]
        if mine:
            claim = from_row(mine[-1], source)
            config = config or mine[-1].get("config")
    if config in files:
        claim = merged(from_docstring(git(repository, "show", f"{commit}:{config}"), source), claim)
    return claim


def merged(first: Expectation, second: Expectation) -> Expectation:
    """The first claim, what it does not say from the second."""
    missing = {
        name: getattr(second, name)
        for name in Expectation.__dataclass_fields__
        if getattr(first, name) is None and getattr(second, name) is not None
    }
    return replace(first, **missing)


def from_docstring(text: str, source: str) -> Expectation:
    """The ``after:`` line of a committed config function; more lines and more figures may stand around it."""
    try:
        doc = ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError):
        doc = text
    lines = _AFTER.findall(doc)
    line = lines[-1] if lines else ""
    step, rate, mfu = _STEP.search(line), _RATE.search(line), _MFU.search(line)
    study = _STUDY.search(doc)
    return Expectation(
        source=source,
        step_time_s=_float(step[1]) if step else None,
        step_time_ci_s=_interval(step[2], step[3]) if step and step[2] else None,
        tokens_per_s_per_device=_float(rate[1]) if rate else None,
        mfu_pct=_float(mfu[1]) if mfu else None,
        study=study[1].strip() if study else None,
    )


def from_row(row: Mapping[str, str | None], source: str) -> Expectation:
    """A row of the change table; columns that a later version adds are read where they are known."""
    ends = re.findall(_NUMBER, row.get("after_step_time_ci_s") or row.get("after_interval_s") or "")
    return Expectation(
        source=source,
        step_time_s=_float(row.get("after_step_time_s")),
        step_time_ci_s=_interval(*ends) if len(ends) == 2 else None,
        tokens_per_s_per_device=_float(row.get("after_tokens_per_s_per_device") or row.get("after_tokens_per_s")),
        mfu_pct=_float(row.get("after_mfu_pct")),
        study=row.get("study") or None,
        trace=row.get("trace") or None,
    )


def from_record(values: dict[str, Any], source: str) -> Expectation:
    """A trial's record, or a claim as `tune commit` writes it, whose winner counts."""
    if isinstance(values.get("after"), dict):
        values = {"study": values.get("study"), **values["after"], "trace": next(iter(values["after"]["traces"]), None)}
    interval = values.get("step_time_ci_s")
    return Expectation(
        source=source,
        step_time_s=_float(values.get("step_time_s")),
        step_time_ci_s=_interval(*interval) if isinstance(interval, list) and len(interval) == 2 else None,
        tokens_per_s_per_device=_float(values.get("tokens_per_s_per_device")),
        mfu_pct=_float(values.get("mfu_pct")),
        study=values.get("study"),
        trace=values.get("trace"),
    )


def _last_row(text: str, name: str) -> dict[str, str]:
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows:
        raise UserError(f"--claim {name}: the table has no row")
    return rows[-1]


def _interval(low: Any, high: Any) -> tuple[float, float] | None:
    first, last = _float(low), _float(high)
    return (first, last) if first and last and first <= last else None


def _float(value: Any) -> float | None:
    """A positive number; None for anything else."""
    try:
        number = float(str(value).replace(",", ""))
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None

"""A claim: everything that a winner's commit says, as data that a later reader can check."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import replace
import json
from pathlib import Path
import re
from typing import Any

from search_space.errors import UserError
from tuner.evidence.machine import Control


@dataclass(frozen=True, kw_only=True)
class Side:
    """One configuration as it was measured."""

    candidate: dict[str, Any]
    """Every knob."""

    label: str
    """Short name."""

    trials: tuple[int, ...]
    """Trials behind the figures."""

    run_medians_s: tuple[float, ...]
    """Median step time of each of them, seconds."""

    step_time_s: float
    """Geometric mean of the runs' medians, seconds."""

    step_time_ci_s: tuple[float, float]
    """95% interval of the same; counts the noise between runs."""

    step_time_p95_s: float
    """95th percentile of all their steps, seconds."""

    tokens_per_s_per_device: float
    """Tokens of a step / step time / devices."""

    mfu_pct: float
    """Model FLOP utilisation, percent."""

    mfu_ci_pct: tuple[float, float]
    """95% interval of the same."""

    peak_reserved_gib: float
    """Largest reservation over all ranks and runs."""

    device_s: float
    """Mean charge of a run, device-seconds."""

    repeat_s: tuple[float, float] | None = None
    """Where the median of a run in another study should fall, 95%, seconds; None in claims of earlier versions."""

    control: Control = field(default_factory=Control)
    """How fast the machine was beside each run; empty in claims of earlier versions."""

    traces: tuple[str, ...] = ()
    """Profiler traces, relative to the folder of studies."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a committed configuration claims, and what it was measured with."""

    study: str
    """Name of the study."""

    date: str
    """Day of the claim, ISO."""

    function: str
    """The user's config function, ``module:function``."""

    name: str
    """Name of the committed function and of its file: model, hardware, scale."""

    hardware: str
    """Name of the hardware table."""

    num_devices: int
    """Devices of the gang."""

    seq_len: int
    """Tokens in one sequence."""

    global_batch_seqs: int
    """Sequences in one optimizer step."""

    precision: str
    """Compute precision."""

    peak_flops: float
    """Peak of one device that MFU is counted against, FLOP/s."""

    ideal_s: float
    """Model FLOP / (devices × peak), seconds."""

    data: str
    """``config`` or ``synthetic``."""

    versions: dict[str, str]
    """Software measured with."""

    git_head: str | None
    """Commit of the user's code."""

    job: dict[str, Any]
    """The job, as a study keeps it."""

    module: str
    """The config function's file without its docstring."""

    before: Side
    """The baseline."""

    after: Side
    """The winner; the baseline itself where it was kept."""

    comparison: dict[str, Any]
    """Winner against baseline."""

    parity: dict[str, Any]
    """Whether the losses agree."""

    noise: dict[str, Any]
    """Run-to-run noise: ``sd`` of the log median, ``dof``, ``repeats``, ``floor_pct``."""

    changes: tuple[dict[str, Any], ...] = ()
    """What each change from the baseline bought."""

    why: str = ""
    """Why this configuration, in words."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that the winner needs."""

    approved_by: str = ""
    """Who approved it; empty: nobody yet."""

    @property
    def control(self) -> Control:
        """How fast the machine was: the control beside the winner's runs, and beside the baseline's where its ranks had
        the same environment."""
        same = self.before.candidate.get("env") == self.after.candidate.get("env")
        alike = self.before.control.work == self.after.control.work
        if self.before == self.after or not (same and alike):
            return self.after.control
        return replace(self.after.control, runs_s=self.after.control.runs_s + self.before.control.runs_s)

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Knobs that differ: value before, value after."""
        before, after = self.before.candidate, self.after.candidate
        return {knob: (before[knob], value) for knob, value in after.items() if before.get(knob) != value}

    def approved(self, name: str) -> Claim:
        """The claim with who approved it."""
        return replace(self, approved_by=name)

    def to_json(self) -> str:
        """The claim as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Claim:
        """Read :meth:`to_json`'s text; keys of later versions are ignored.

        Args:
            text: the JSON.
            where: what to call it in an error.

        Raises:
            UserError: it is no claim.
        """
        try:
            values = json.loads(text)
            for side in ("before", "after"):
                control = _known(Control, values[side].pop("control", {}))
                values[side] = _known(Side, {**values[side], "control": control})
            found: Claim = _known(cls, values)
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", found.name):
                # It becomes the name of a file in the user's repository.
                raise ValueError(f"name {found.name!r} is no Python name")
            return found
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{where}: not a claim of ledgertune ({type(error).__name__}: {error})") from None

    @classmethod
    def read(cls, path: Path) -> Claim:
        """Read a claim's file.

        Raises:
            UserError: there is none, or it is no claim.
        """
        try:
            return cls.from_json(path.read_text(), str(path))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None


def _known(kind: Any, values: dict[str, Any]) -> Any:
    names = {item.name for item in fields(kind)}
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in names})

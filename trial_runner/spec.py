"""The order for one trial: what every rank process of a gang must know, as data on disk."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
import json
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """One trial as the ranks see it. Paths are absolute."""

    study: str
    """Name of the study."""

    trial: int
    """Number of the trial."""

    folder: str
    """Folder that receives every record of the trial."""

    config_file: str
    """Python file with the candidate's torchtitan config function."""

    config_function: str
    """Name of that function."""

    world_size: int
    """Ranks of the gang."""

    device: str
    """``cpu`` or ``gpu``."""

    warmup_steps: int
    """Steps before the measured window."""

    steps: int
    """Steps in the measured window."""

    trace: bool = True
    """Whether one step after the window is traced."""

    seed: int = 42
    """Seed of initial weights and of the synthetic data."""

    data: str = "config"
    """``config``: the config function's own data loader; ``synthetic``: :mod:`trial_runner.rank.tokens`."""

    user_path: str | None = None
    """Folder of the user's own modules, put first on the ranks' import path."""

    workdir: str | None = None
    """Working folder of the ranks, which relative paths of the user's config mean; None: the trial's folder."""

    threads: int = 1
    """Intra-operator threads of one CPU rank."""

    program: str = "trial_runner.rank"
    """Module that a rank runs; ``trial_runner.rehearse`` trains nothing."""

    weights: str | None = None
    """Folder of the seed weights: loaded before the first step, saved there if they are missing; None: from scratch."""

    control: dict[str, Any] | None = None
    """The control to run before the program, :class:`trial_runner.control.ControlWork` as data; None: none."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the candidate."""

    header: dict[str, Any] = field(default_factory=dict)
    """What every rank log starts with: arguments, versions, commit."""

    def write(self, path: Path) -> None:
        """Write the order as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> TrialSpec:
        """Read an order written by :meth:`write`; unknown keys are ignored."""
        values = json.loads(path.read_text())
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def rank_log(folder: Path, rank: int) -> Path:
    """Where the standard output and error of ``rank`` go."""
    return folder / f"rank{rank}.log"


def rank_steps(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes one JSON line per step."""
    return folder / f"rank{rank}.jsonl"


def rank_error(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes the error that ended it."""
    return folder / f"rank{rank}.error.json"


def node_clocks(folder: Path, node: int) -> Path:
    """Where the clock samples of the gang's ``node`` go."""
    return folder / f"clocks-node{node}.jsonl"


def rank_trace(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes its profiler trace."""
    return folder / f"rank{rank}.trace.json.gz"

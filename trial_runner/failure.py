"""Failure classes: what ended a trial, from the earliest primary error over all its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
import json
from pathlib import Path
import re
import signal
from typing import Any

from trial_runner.spec import rank_error
from trial_runner.spec import rank_log


TAIL_BYTES = 4000
"""How much of a rank's log a failure keeps."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no measurement."""

    kind: str
    """Class: one of :data:`CLASSES`, or ``unknown``."""

    rank: int | None
    """Rank whose error came first; None when no rank is to blame."""

    text: str
    """The first error's text."""

    log_tail: str = ""
    """End of that rank's log."""

    def to_json(self) -> dict[str, Any]:
        """Keys of the command-line contract: ``class``, ``rank``, ``text``, and the log tail."""
        facts = asdict(self)
        return {"class": facts.pop("kind"), **facts}


@dataclass(frozen=True, kw_only=True)
class FailureClass:
    """One class of failures and the texts that tell it."""

    kind: str
    """Name."""

    pattern: str
    """Regular expression over the error's type and text."""

    secondary: bool = False
    """Whether such an error is usually the echo of a peer's death, so a primary one on another rank wins."""


CLASSES = (
    FailureClass(kind="out_of_memory", pattern=r"OutOfMemoryError|CUDA out of memory|HIP out of memory"),
    FailureClass(kind="host_out_of_memory", pattern=r"MemoryError|Cannot allocate memory|DefaultCPUAllocator"),
    FailureClass(kind="disk_full", pattern=r"No space left on device"),
    FailureClass(kind="compile_error", pattern=r"torch\._dynamo|torch\._inductor|BackendCompilerFailed|InductorError"),
    FailureClass(kind="nan_loss", pattern=r"Loss is not finite|loss is nan"),
    FailureClass(kind="data_error", pattern=r"DataloaderExhausted|DatasetNotFound|tokenizer|dataset|load_dataset"),
    FailureClass(
        kind="collective_timeout",
        pattern=r"Timed out waiting|collective operation timeout|WorkNCCL.*[Tt]imeout|Watchdog caught",
        secondary=True,
    ),
    FailureClass(
        kind="peer_lost",
        pattern=r"Connection closed by peer|Connection reset by peer|Broken pipe|NCCL remote error|ncclRemoteError",
        secondary=True,
    ),
    FailureClass(kind="rendezvous", pattern=r"EADDRINUSE|address already in use|DistNetworkError|DistStoreError"),
    FailureClass(
        kind="framework_invalid",
        pattern=r"ValueError|AssertionError|NotImplementedError|must be divisible|is invalid for input",
    ),
)
"""The classes, asked in this order; the first whose pattern is found names the failure."""


def classify(text: str) -> FailureClass | None:
    """The first class whose pattern occurs in ``text``."""
    return next((kind for kind in CLASSES if re.search(kind.pattern, text)), None)


def find_failure(
    folder: Path,
    world_size: int,
    ended: str,
    exit_codes: Mapping[int, int | None],
    exit_unix_s: Mapping[int, float] | None = None,
) -> Failure:
    """Name what ended a trial.

    Args:
        folder: the trial's folder.
        world_size: ranks of the gang.
        ended: why the gang is over, as :class:`trial_runner.gang.GangState` says.
        exit_codes: exit code by rank, negative for a signal.
        exit_unix_s: when each rank ended.

    Returns:
        The failure: a rank killed by a signal before any rank reported an error, else the earliest primary
        error, else a secondary one, else what the gang's end says.
    """
    times = exit_unix_s or {}
    candidates: list[tuple[bool, float, Failure]] = []
    for rank in range(world_size):
        error = _read_error(folder, rank)
        if error is not None:
            found = classify(f"{error['module']}.{error['type']}: {error['text']}")
            kind = found.kind if found else "exception"
            text = f"{error['type']}: {error['text']}"
            failure = Failure(kind=kind, rank=rank, text=text, log_tail=log_tail(folder, rank))
            candidates.append((bool(found and found.secondary), error["unix_s"], failure))
            continue
        code = exit_codes.get(rank)
        if code is not None and code < 0:
            name = _signal_name(-code)
            found = classify(log_tail(folder, rank))
            kind = found.kind if found and code == -signal.SIGABRT else "rank_killed"
            failure = Failure(
                kind=kind, rank=rank, text=f"rank {rank} was ended by {name}", log_tail=log_tail(folder, rank)
            )
            candidates.append((False, times.get(rank, 0.0), failure))
        elif code:
            failure = Failure(
                kind="exception", rank=rank, text=f"rank {rank} left with code {code}", log_tail=log_tail(folder, rank)
            )
            candidates.append((True, times.get(rank, 0.0), failure))
    if ended == "timeout":
        return Failure(kind="timeout", rank=None, text="the trial outlived its allowance", log_tail=log_tail(folder, 0))
    if candidates:
        return min(candidates, key=lambda item: item[:2])[2]
    words = {"stopped": "the trial was stopped", "killed": "the gang's agent was killed"}
    kind = {"stopped": "stopped", "killed": "agent_lost"}.get(ended, "unknown")
    return Failure(
        kind=kind, rank=None, text=words.get(ended, f"the gang ended: {ended}"), log_tail=log_tail(folder, 0)
    )


def _read_error(folder: Path, rank: int) -> dict[str, Any] | None:
    """What a rank wrote of its error; None when it wrote nothing readable."""
    try:
        facts: dict[str, Any] = json.loads(rank_error(folder, rank).read_text())
    except (OSError, ValueError):
        return None
    return facts


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(folder: Path, rank: int) -> str:
    """The last :data:`TAIL_BYTES` bytes of a rank's log; empty when there is none."""
    path = rank_log(folder, rank)
    if not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - TAIL_BYTES))
        return log.read().decode(errors="replace")

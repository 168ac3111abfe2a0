"""Failure classes: what ended a trial, from the earliest primary error over all its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
import json
from pathlib import Path
import signal
from typing import Any

from trial_runner.failure.classes import classify
from trial_runner.failure.classes import failure_class
from trial_runner.failure.faults import FAULTS
from trial_runner.failure.faults import find_fault
from trial_runner.failure.memory import library_found_it_full
from trial_runner.failure.memory import read_out_of_memory
from trial_runner.failure.silence import least_advanced
from trial_runner.failure.xid import find_xid
from trial_runner.failure.xid import XIDS
from trial_runner.spec import rank_error
from trial_runner.spec import rank_log


TAIL_BYTES = 4000
"""How much of a rank's log a failure keeps."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no measurement."""

    kind: str
    """Class: a name in :data:`trial_runner.failure.classes.CLASSES`."""

    rank: int | None
    """Rank whose error came first; None when no rank is to blame."""

    text: str
    """The first error's text."""

    log_tail: str = ""
    """End of that rank's log."""

    fault: str | None = None
    """Code of the known fault that the text tells of, see :mod:`trial_runner.failure.faults`."""

    memory: dict[str, float | None] | None = None
    """Numbers of an out-of-memory error, bytes, see :class:`trial_runner.failure.memory.OutOfMemory`."""

    @property
    def advice(self) -> str:
        """What the user can do: the known fault's own words, else the class's."""
        known = next((fault for fault in FAULTS if fault.code == self.fault), None)
        return known.advice if known else failure_class(self.kind).advice

    def to_json(self) -> dict[str, Any]:
        """Keys of the command-line contract: ``class``, ``rank``, ``text``; and the rest by name, advice included."""
        facts = asdict(self)
        return {"class": facts.pop("kind"), **facts, "advice": self.advice}


def find_failure(
    folder: Path,
    world_size: int,
    ended: str,
    exit_codes: Mapping[int, int | None],
    exit_unix_s: Mapping[int, float] | None = None,
    host_oom_kills: int = 0,
) -> Failure:
    """Name what ended a trial.

    Args:
        folder: the trial's folder.
        world_size: ranks of the gang.
        ended: why the gang is over, as :class:`trial_runner.gang.GangState` says.
        exit_codes: exit code by rank, negative for a signal.
        exit_unix_s: when each rank ended.
        host_oom_kills: processes that the kernel killed for memory on the gang's nodes while it ran.

    Returns:
        The failure: a rank killed by a signal before any rank reported an error, else the earliest primary
        error, else a secondary one, else what the gang's end says.
    """
    times = exit_unix_s or {}
    candidates: list[tuple[bool, float, Failure]] = []
    for rank in range(world_size):
        error = _read_error(folder, rank)
        if error is not None:
            text, used = f"{error['type']}: {error['text']}", error.get("device_used_share")
            failure = named(text, error["module"], rank, log_tail(folder, rank), used)
            candidates.append((failure_class(failure.kind).secondary, error["unix_s"], failure))
            continue
        code = exit_codes.get(rank)
        if code is not None and code < 0:
            name, tail = _signal_name(-code), log_tail(folder, rank)
            text = f"rank {rank} was ended by {name}"
            found = classify(tail) if code in (-signal.SIGABRT, -signal.SIGBUS) else None
            if found is not None:
                failure = replace(named(tail, "", rank, tail), text=f"{text}; its log tells of {found.kind}")
            elif code == -signal.SIGBUS:
                # Touching a mapping that /dev/shm has no room for ends in a bus error.
                failure = Failure(kind="shared_memory", rank=rank, text=text, log_tail=tail)
            elif code == -signal.SIGKILL and host_oom_kills:
                failure = Failure(
                    kind="host_out_of_memory",
                    rank=rank,
                    text=f"{text}; the kernel killed {host_oom_kills} process(es) for memory meanwhile",
                    log_tail=tail,
                )
            else:
                failure = Failure(kind="rank_killed", rank=rank, text=text, log_tail=tail)
            candidates.append((False, times.get(rank, 0.0), failure))
        elif code:
            failure = Failure(
                kind="exception", rank=rank, text=f"rank {rank} left with code {code}", log_tail=log_tail(folder, rank)
            )
            candidates.append((True, times.get(rank, 0.0), failure))
    if ended == "timeout":
        text = "the trial outlived its allowance"
        return Failure(kind="timeout", rank=None, text=text, log_tail=log_tail(folder, 0))
    if candidates:
        return _with_silent_rank(min(candidates, key=lambda item: item[:2])[2], folder, world_size)
    words = {"stopped": "the trial was stopped", "killed": "the gang's agent was killed"}
    kind = {"stopped": "stopped", "killed": "agent_lost"}.get(ended, "unknown")
    return Failure(
        kind=kind, rank=None, text=words.get(ended, f"the gang ended: {ended}"), log_tail=log_tail(folder, 0)
    )


def silent_failure(kind: str, folder: Path, world_size: int) -> Failure:
    """The failure of a gang that fell silent and was stopped for it; names the rank that got least far."""
    rank, step = least_advanced(folder, world_size)
    where = f"rank {rank} fell silent after step {step}" if step else "no rank ended its first step"
    return Failure(kind=kind, rank=rank, text=f"{where}; the gang was stopped", log_tail=log_tail(folder, rank or 0))


def named(text: str, module: str, rank: int | None, tail: str = "", used_share: float | None = None) -> Failure:
    """The failure that one rank's error text tells of.

    Args:
        text: type and message.
        module: module of the error's type; empty when unknown.
        rank: whose error it is.
        tail: end of that rank's log.
        used_share: share of the device's memory in use when the error was raised; None: unknown.
    """
    whole = f"{module}.{text}" if module else text
    fault, found = find_fault(whole), classify(whole)
    kind = fault.kind if fault else found.kind if found else "exception"
    if library_found_it_full(whole, used_share):
        kind = "out_of_memory"
    xid = find_xid(f"{whole}\n{tail}")
    if xid is not None:
        event = XIDS.get(xid)
        kind = "hardware_fault" if event and event.quarantine else kind if found else "illegal_access"
        text = f"{text} (Xid {xid}{f', {event.family}' if event else ''})"
    memory = None
    if kind == "out_of_memory" and found is not None and found.kind == kind:
        numbers = read_out_of_memory(whole)
        kind, memory = numbers.kind, numbers.to_json()
    code = fault.code if fault else None
    return Failure(kind=kind, rank=rank, text=text, log_tail=tail, fault=code, memory=memory)


def _with_silent_rank(failure: Failure, folder: Path, world_size: int) -> Failure:
    """A collective's timeout names the rank that fell silent, not the one that waited for it."""
    if failure.kind != "collective_timeout" or world_size < 2:
        return failure
    rank, step = least_advanced(folder, world_size)
    if rank is None:
        return failure
    return replace(failure, rank=rank, text=f"{failure.text} (rank {rank} fell silent after step {step})")


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

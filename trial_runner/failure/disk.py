"""A full disk: it takes the very records that would say so."""

from __future__ import annotations

import errno
from pathlib import Path
import shutil

from trial_runner.failure.find import Failure


LEAST_FREE_BYTES = 1 << 20
"""Room on the disk below which nothing can be recorded, bytes."""

UNEXPLAINED = ("exception", "unknown", "rank_killed", "peer_lost", "agent_lost")
"""Classes that a full disk may hide behind."""


def perhaps_disk_full(failure: Failure, folder: Path) -> Failure:
    """The failure, or ``disk_full`` in its place where its folder's disk has no room for the reason."""
    if failure.kind not in UNEXPLAINED or shutil.disk_usage(folder).free >= LEAST_FREE_BYTES:
        return failure
    text = f"no room left in {folder} to write records ({failure.text})"
    return Failure(kind="disk_full", rank=failure.rank, text=text)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that led to it, is that of a full disk or an exhausted quota."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "database or disk is full" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False

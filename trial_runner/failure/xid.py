"""NVIDIA driver events (Xid) in logs: whose fault each is."""

from __future__ import annotations

from dataclasses import dataclass
import re


@dataclass(frozen=True)
class Xid:
    """One kind of event."""

    family: str
    """``hardware``, ``memory``, ``nvlink`` or ``program``."""

    quarantine: bool
    """Whether the node should be taken out."""


XIDS = {
    13: Xid("program", False),
    31: Xid("program", False),
    43: Xid("program", False),
    48: Xid("memory", True),
    63: Xid("memory", True),
    64: Xid("memory", True),
    74: Xid("nvlink", True),
    79: Xid("hardware", True),
    92: Xid("memory", True),
    94: Xid("memory", True),
    95: Xid("memory", True),
    119: Xid("hardware", True),
    120: Xid("hardware", True),
}
"""Events by number (NVIDIA, XID errors, driver release 550 and later); others are a program's until known better."""


def find_xid(text: str) -> int | None:
    """The first event number that a kernel or program log names; None when it names none."""
    found = re.search(r"Xid \([^)]*\): (\d+)|\bXid[ :=]+(\d+)\b", text)
    return int(found[1] or found[2]) if found else None

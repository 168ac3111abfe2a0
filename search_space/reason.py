"""Why a candidate is refused: one typed reason with the numbers that decide."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One hard reason against a candidate.

    The candidate is refused because ``required`` does not fit ``available`` (both in ``unit``).
    """

    code: str
    """Stable machine-readable name, e.g. ``memory`` or ``tp_divides_heads``."""

    required: float
    """What the candidate needs, in ``unit``."""

    available: float
    """What there is, in ``unit``."""

    unit: str
    """Unit of both numbers: ``GiB``, ``heads``, ``layers``, ``stages`` …"""

    text: str
    """One sentence for a person, with the numbers in it."""

    def to_json(self) -> dict[str, object]:
        """The reason with the keys of the command-line contract."""
        return asdict(self)

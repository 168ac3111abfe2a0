"""The budget: device-hours asked for, device-seconds charged, and whether one more trial fits."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
import re

from search_space.errors import UserError


_UNITS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?|\.\d+)[\s-]*(?:gpu|device|cpu)[\s-]*(second|minute|hour|day)s?\s*$", re.I)


def parse_budget(text: str) -> float:
    """Device-seconds of a budget text such as ``40-gpu-hours``, ``90-gpu-minutes`` or ``0.2-gpu-hours``.

    Raises:
        UserError: the text is no amount with a unit, or the amount is not positive.
    """
    found = _PATTERN.match(text)
    if found is None:
        raise UserError(f"budget: found {text!r}, needs an amount with a unit, like 40-gpu-hours or 90-gpu-minutes")
    seconds = float(found[1]) * _UNITS[found[2].lower()]
    if seconds <= 0:
        raise UserError(f"budget: found {text!r}, needs more than zero")
    return seconds


@dataclass
class Meter:
    """Charges devices × wall time, and holds back what running trials may still cost.

    All amounts are device-seconds.
    """

    limit: float
    """What may be spent."""

    spent: float = 0.0
    """What finished trials cost."""

    reserved: dict[str, float] = field(default_factory=dict)
    """Worst-case cost of each running trial."""

    @property
    def left(self) -> float:
        """What is neither spent nor held back."""
        return self.limit - self.spent - sum(self.reserved.values())

    def fits(self, worst_case: float) -> bool:
        """Whether a trial of this worst-case cost may start."""
        return worst_case <= self.left

    def reserve(self, name: str, worst_case: float) -> None:
        """Hold back the worst-case cost of a trial that is about to start.

        Raises:
            ValueError: it does not fit in what is left.
        """
        if not self.fits(worst_case):
            raise ValueError(f"{name}: worst case {worst_case:.1f} exceeds what is left {self.left:.1f}")
        self.reserved[name] = worst_case

    def settle(self, name: str, cost: float) -> None:
        """Replace what was held back for a trial by what it cost."""
        self.reserved.pop(name, None)
        self.spent += cost

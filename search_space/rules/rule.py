"""What a validity rule is, and how a pool is judged by a list of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search_space.pool import Pool
from search_space.reason import Reason
from search_space.setting import Setting


Numbers = Callable[[Pool, Setting], np.ndarray | float]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One validity rule. Arrays have shape (n,) for a pool of n candidates."""

    code: str
    """Stable name of the reason."""

    frameworks: tuple[str, ...]
    """Frameworks that the rule holds for."""

    versions: str = "any"
    """Framework versions that it was checked against."""

    source: str
    """Where the rule comes from."""

    violated: Callable[[Pool, Setting], np.ndarray]
    """Mask of the candidates that break the rule."""

    required: Numbers
    """What a candidate needs, in ``unit``."""

    available: Numbers
    """What there is, in ``unit``."""

    unit: str
    """Unit of both numbers."""

    text: str
    """Sentence with ``{required}``, ``{available}`` and any knob name in braces."""

    words: Callable[[Setting], dict[str, object]] = lambda setting: {}
    """Further words for the sentence, by name."""

    def reason(self, pool: Pool, setting: Setting, i: int) -> Reason:
        """The typed reason against candidate ``i``."""
        one = pool.take(np.array([i]))
        required = float(np.ravel(self.required(one, setting))[0])
        available = float(np.ravel(self.available(one, setting))[0])
        words = one.candidate(0).to_json() | {
            "required": f"{required:.12g}",
            "available": f"{available:.12g}",
        }
        words |= self.words(setting)
        return Reason(
            code=self.code, required=required, available=available, unit=self.unit, text=self.text.format(**words)
        )


@dataclass(frozen=True)
class Judgement:
    """The outcome of the rules over a pool."""

    rules: tuple[Rule, ...]
    """The rules that were asked, in order."""

    violations: np.ndarray
    """Mask of shape (rules, n): rule r is broken by candidate i."""

    @property
    def legal(self) -> np.ndarray:
        """Mask of the candidates that break no rule, shape (n,)."""
        return np.asarray(~self.violations.any(axis=0))

    def reasons(self, pool: Pool, setting: Setting, i: int) -> list[Reason]:
        """Every reason against candidate ``i``."""
        return [rule.reason(pool, setting, i) for rule, row in zip(self.rules, self.violations) if row[i]]


def judge(pool: Pool, setting: Setting, rules: Sequence[Rule]) -> Judgement:
    """Ask every rule that holds for the setting's framework about every candidate."""
    asked = tuple(rule for rule in rules if setting.framework in rule.frameworks)
    rows = [np.broadcast_to(rule.violated(pool, setting), (len(pool),)) for rule in asked]
    return Judgement(asked, np.array(rows, dtype=bool).reshape(len(asked), len(pool)))

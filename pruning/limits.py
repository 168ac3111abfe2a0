"""How far one candidate can be pushed before it no longer fits: sequence length, expert imbalance."""

from __future__ import annotations

from dataclasses import replace

from pruning.accounts.account import find_account
from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.setting import Setting


MOST_TOKENS = 1 << 24
"""Longest sequence that is asked for, tokens."""


def max_seq_len(candidate: Candidate, setting: Setting, step: int = 1024) -> int:
    """The longest sequence, in multiples of ``step`` tokens, that still fits the device minus the margin; 0 if none.

    Args:
        candidate: the configuration.
        setting: its setting; the sequence length is varied.
        step: granularity, tokens.
    """
    allowed = setting.hardware.memory_bytes * (1 - setting.memory_margin)
    pool = Pool.from_candidates([candidate])

    def fits(pieces: int) -> bool:
        return bool(price(pool, replace(setting, seq_len=pieces * step)).memory_bytes[0] <= allowed)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high * step < MOST_TOKENS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def max_expert_imbalance(candidate: Candidate, setting: Setting) -> float | None:
    """Tokens of the fullest rank over the mean up to which the candidate fits; None for dense models.

    0 means that it does not fit even with perfectly balanced routing.
    """
    if not setting.shape.is_moe:
        return None
    allowed = setting.hardware.memory_bytes * (1 - setting.memory_margin)
    pool, account = Pool.from_candidates([candidate]), find_account(setting.framework)

    def fits(imbalance: float) -> bool:
        habits = replace(account, expert_imbalance=imbalance)
        return bool(price(pool, setting, account=habits).memory_bytes[0] <= allowed)

    if not fits(1.0):
        return 0.0
    low, high = 1.0, 64.0
    if fits(high):
        return high
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

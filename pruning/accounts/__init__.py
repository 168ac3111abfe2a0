"""Accounts: what a framework keeps, gathers and sends, by framework version."""

from __future__ import annotations

from pruning.accounts.account import Account
from pruning.accounts.account import find_account


__all__ = ["Account", "find_account"]

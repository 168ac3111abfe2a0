"""Dry run: the real torchtitan program on fake tensors, at full world size, on one CPU.

Every validity rule of the installed framework fires by itself, and the storages alive give allocated memory.
"""

from __future__ import annotations

from trial_runner.dry_run.run import dry_run
from trial_runner.dry_run.run import DryRun
from trial_runner.dry_run.run import RankFacts
from trial_runner.dry_run.run import truth
from trial_runner.dry_run.run import with_layers
from trial_runner.dry_run.session import Session


__all__ = ["DryRun", "RankFacts", "Session", "dry_run", "truth", "with_layers"]

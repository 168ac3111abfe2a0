"""What ended a trial, what it teaches, and what to do."""

from __future__ import annotations

from trial_runner.failure.classes import classify
from trial_runner.failure.classes import failure_class
from trial_runner.failure.classes import FailureClass
from trial_runner.failure.disk import is_disk_full
from trial_runner.failure.disk import perhaps_disk_full
from trial_runner.failure.faults import Fault
from trial_runner.failure.faults import find_fault
from trial_runner.failure.find import Failure
from trial_runner.failure.find import find_failure
from trial_runner.failure.find import log_tail
from trial_runner.failure.find import named
from trial_runner.failure.find import silent_failure
from trial_runner.failure.silence import hung


__all__ = [
    "Failure",
    "FailureClass",
    "Fault",
    "classify",
    "failure_class",
    "find_failure",
    "find_fault",
    "hung",
    "is_disk_full",
    "log_tail",
    "named",
    "perhaps_disk_full",
    "silent_failure",
]

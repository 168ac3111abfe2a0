"""docs/failures.md is the table of failure classes, word for word."""

from __future__ import annotations

from pathlib import Path

from trial_runner.failure.classes import CLASSES
from trial_runner.failure.faults import FAULTS


def test_every_class_and_fault_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    for item in CLASSES:
        assert f"| `{item.kind}` | {item.teaches} | {item.retries or ''} |" in text, item.kind
        assert item.why in text and item.advice in text, item.kind
    for fault in FAULTS:
        assert f"| `{fault.code}` | {fault.versions} | {fault.held} |" in text

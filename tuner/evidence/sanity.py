"""What keeps a fast trial from being a winner: memory that grows for ever, a loss outside the baseline's band."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any


LOSS_BAND = 0.1
"""How far a candidate's last loss may be above the baseline's, as a share.

Initial weights differ by layout, which makes about 1-2% (torchtitan 0.3.0, debug model); a wrong shard or a wrong
cut of the vocabulary makes 50%. Parity runs judge finer.
"""


def unsound(record: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str | None:
    """Why a measured trial cannot win; None when nothing speaks against it.

    Args:
        record: a measured trial's record.
        baseline: the baseline's, if it was measured.
    """
    if "leak" in record.get("flags", ()):
        grows = record.get("leak_bytes_per_step", 0.0) / 2**20
        return f"memory grows by {grows:.0f} MiB a step: it would not last a long run"
    if "impossible_mfu" in record.get("flags", ()):
        return f"its MFU of {record['mfu_pct']:.0f}% is above what the declared peak allows: the peak is wrong"
    last, reference = record.get("loss_last"), (baseline or {}).get("loss_last")
    if last is None or reference is None:
        return None
    if not isfinite(last):
        return "its loss is not a number"
    if reference > 0 and last > (1 + LOSS_BAND) * reference:
        return f"its loss ended at {last:.3f}, the baseline's at {reference:.3f}: more than {LOSS_BAND:.0%} above"
    return None

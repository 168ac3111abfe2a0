from __future__ import annotations

import pytest

from pruning import decisions


def test_offload_pays_only_where_computation_is_longer_than_the_copies() -> None:
    slow = decisions.offload(285e6, 4, 4, 64e9, block_seconds=6e-3)
    assert slow.gain_bytes == pytest.approx(285e6 * 16)
    assert slow.cost_s == pytest.approx(4 * (8.906e-3 - 6e-3), rel=1e-3)
    assert decisions.offload(285e6, 4, 4, 64e9, block_seconds=20e-3).cost_s == 0


def test_zero1_where_it_fits_and_full_sharding_where_it_must() -> None:
    fits = decisions.zero1_or_fsdp(2.2e9, 16, 40e9)
    assert fits.choice == "zero1" and fits.fsdp_bytes > fits.zero1_bytes
    assert decisions.zero1_or_fsdp(8.8e9, 4, 40e9).choice == "fsdp"
    assert decisions.zero1_or_fsdp(2.2e9, 1, 40e9, reshard=False).fsdp_bytes == pytest.approx(6 * 2.2e9)


def test_thresholds() -> None:
    assert decisions.needs_context_parallel(32768) and not decisions.needs_context_parallel(8192)
    assert decisions.enough_micro_batches(16, 4) and not decisions.enough_micro_batches(8, 4)
    assert decisions.enough_micro_batches(1, 1)
    mixed = decisions.mixed_optimum(48000, 32768, 64)
    assert mixed.data * mixed.tensor == pytest.approx(64)

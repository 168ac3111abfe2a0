"""The tracker counts storages alive, freed, viewed and resized, and keeps the CUDA kernels' saved-tensor rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trial_runner.dry_run.kernels import FusedRMSNorm
from trial_runner.dry_run.track import peak_by_kind
from trial_runner.dry_run.track import StepTrack
from trial_runner.dry_run.track import Storage
from trial_runner.dry_run.track import Tracker


@pytest.fixture
def tracker() -> Iterator[Tracker]:
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        yield tracker


def alive(tracker: Tracker) -> int:
    return sum(storage.size for storage in tracker.storages.values())


def test_made_and_freed(tracker: Tracker) -> None:
    x = torch.empty(1000)
    y = x * 2
    assert alive(tracker) == 8000
    del y
    assert alive(tracker) == 4000


def test_a_view_keeps_its_base_and_costs_nothing(tracker: Tracker) -> None:
    x = torch.empty(1000)
    view = x[10:20]
    assert alive(tracker) == 4000
    del x
    assert alive(tracker) == 4000
    del view
    assert alive(tracker) == 0


def test_meta_tensors_cost_nothing(tracker: Tracker) -> None:
    kept = torch.empty(1000, device="meta")
    assert alive(tracker) == 0 and kept.shape == (1000,)


def test_resize_to_zero_frees_and_refilling_is_parameters(tracker: Tracker) -> None:
    x = torch.empty(100)
    x.untyped_storage().resize_(0)
    assert alive(tracker) == 0
    x.untyped_storage().resize_(400)
    assert alive(tracker) == 400
    number = tracker.number_of(x)
    assert number is not None and tracker.storages[number].kind == "parameters"


def test_what_backward_needs_stays_until_backward(tracker: Tracker) -> None:
    x = torch.empty(1000, requires_grad=True)
    loss = x.exp().sum()
    assert alive(tracker) == 8004
    loss.backward()
    del loss
    assert alive(tracker) == 8000  # x and its gradient


def test_fused_rms_norm_keeps_its_input_and_one_number_a_row(tracker: Tracker) -> None:
    """bf16 input of 64 rows × 128: kept are the input itself and 64 fp32 numbers, not three fp32 copies."""
    x = torch.empty((64, 128), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(128, dtype=torch.bfloat16, requires_grad=True)
    before = alive(tracker)
    out = FusedRMSNorm.apply(x * 1, weight, 1e-5)
    kept = alive(tracker) - before
    assert kept == 64 * 128 * 2 + 64 * 4 + out.numel() * 2


def test_flop_of_a_product(tracker: Tracker) -> None:
    a, b = torch.empty((8, 16), requires_grad=True), torch.empty((16, 4))
    tracker.begin_step()
    (a @ b).sum().backward()
    assert tracker.step is not None and tracker.step.flop == 2 * (2 * 8 * 16 * 4)


def test_peak_is_found_with_its_kinds() -> None:
    storages = {0: Storage("parameters", 0), 1: Storage("activations", 0), 2: Storage("gradients", 0)}
    track = StepTrack(start={0: 10}, changes=[(1, 5), (2, 1), (1, -5), (2, 3)])
    assert peak_by_kind(track, storages) == (16, {"parameters": 10, "activations": 5, "gradients": 1})

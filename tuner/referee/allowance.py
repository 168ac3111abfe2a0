"""What a dry run cannot see: the allocator's rounding and fragmentation, workspaces, CUDA context, communicators.

Stated apart from allocated bytes, each with its source, so that reserved memory is predicted beside them.
"""

from __future__ import annotations

from typing import Any

from pruning.accounts.account import find_account
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import memory_of
from pruning.ledger.pipeline import flow_of
from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.setting import Setting


WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS workspace of a Hopper or Blackwell device (PyTorch's default since 2.3), inside the caching allocator."""

SOURCES = {
    "allocator_gib": "reserved over allocated: ratio 1.025 ± 0.03 (a study's trials calibrate it)",
    "workspaces_gib": "cuBLAS: 32 MiB a device by PyTorch's default",
    "context_gib": "CUDA context and loaded kernels: about 0.6 GiB ± 0.4",
    "communicators_gib": "NCCL outside the allocator: 0.54 GB a pair, 0.69 GB a larger group (NVIDIA/nccl#964)",
}
"""Where each figure comes from."""

Z90 = 1.6449
"""Half-width of a 90% interval in standard deviations."""


def allowances(
    candidate: Candidate, setting: Setting, allocated_bytes: list[int], coefficients: Coefficients | None = None
) -> list[dict[str, Any]]:
    """The allowance of every pipeline rank, GiB.

    Args:
        candidate: the knobs.
        setting: cluster and recipe.
        allocated_bytes: peak of live tensors by pipeline rank, as a dry run counts it.
        coefficients: calibrated ones; absent: shipped priors.

    Returns:
        For each rank the four items, and ``reserved_gib`` (what the allocator holds) with its 90% interval, and
        ``device_gib`` (all that the device gives).
    """
    used = coefficients or prior(setting)
    layout = layout_of(Pool.from_candidates([candidate]), setting)
    account = find_account(setting.framework)
    ranks = ranks_of(layout, account.balances_head)
    terms = memory_of(layout, ranks, flow_of(layout, ranks), account, used, itemise=True).terms
    communicators = float(terms["communicators"].max()) / 2**30
    factor, sigma = used.value("reserved_factor"), used.sigma("reserved_factor")
    rows = []
    for size in allocated_bytes:
        allocated = size / 2**30
        allocator, workspaces = (factor - 1) * allocated, WORKSPACE_BYTES / 2**30
        reserved = allocated + allocator + workspaces
        context = used.value("fixed_bytes") / 2**30
        spread = Z90 * sigma * allocated
        rows.append(
            {
                "allocator_gib": allocator,
                "workspaces_gib": workspaces,
                "context_gib": context,
                "communicators_gib": communicators,
                "reserved_gib": reserved,
                "reserved_gib_interval": [max(allocated, reserved - spread), reserved + spread],
                "device_gib": reserved + context + communicators,
            }
        )
    return rows

"""Reports about communication; each test is named after its case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pruning.accounts.account import TORCHTITAN
from pruning.coefficients import prior
from pruning.ledger.communication import data_traffic
from pruning.ledger.layout import layout_of
from pruning.ledger.prices import price
from pruning.ledger.step_time import data_time
from pruning.ledger.step_time import hidden_time
from search_space.candidate import Candidate
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.setting import Setting


def setting(name: str = "llama3:llama3_8b", **changes: Any) -> Setting:
    shape = preset_shape(name)
    assert shape is not None
    values: dict[str, Any] = {
        "shape": shape,
        "hardware": find_hardware("H100-SXM"),
        "devices_per_node": 8,
        "nodes": 2,
        "seq_len": 8192,
        "global_batch_seqs": 16,
    }
    return Setting(**(values | changes))


def test_COM_01_a_slow_transport_changes_the_prediction() -> None:
    """A probe that measures sockets instead of InfiniBand overrides the table, and the ledger follows."""
    pool = Pool.from_candidates([Candidate(data_parallel_shard=16)])
    fast = price(pool, setting())
    slow_links = find_hardware("H100-SXM").override(nic_bandwidth=5e9 / 8)
    slow = price(pool, setting(hardware=slow_links))
    measured = price(pool, setting(), links=(np.array([450e9]), np.array([5e9 / 8])))
    assert slow.parts_s["exposed_communication"][0] > 3 * fast.parts_s["exposed_communication"][0]
    assert measured.step_time_s[0] == pytest.approx(slow.step_time_s[0])


def test_COM_03_overlap_is_never_free() -> None:
    layout = layout_of(Pool.from_candidates([Candidate(data_parallel_shard=16)]), setting())
    found = data_time(layout, TORCHTITAN, prior(setting()))
    share = prior(setting()).value("data_exposed")
    visible = hidden_time(found.hideable, np.full(1, 1e9), share)
    assert visible[0] == pytest.approx(share * found.hideable[0])
    assert share > 0


def test_COM_05_experts_are_gathered_over_their_own_ranks() -> None:
    where = setting("qwen3:qwen3_30b_a3b", nodes=1, global_batch_seqs=8, seq_len=4096)
    layout = layout_of(Pool.from_candidates([Candidate(data_parallel_shard=8, expert_parallel=4)]), where)
    found = data_traffic(layout, TORCHTITAN, prior(where))
    groups = {(t.dimension, t.primitive): int(t.group[0]) for t in found if t.bytes[0] > 0}
    assert groups[("data", "all_gather")] == 8
    assert groups[("expert_data", "all_gather")] == 2


def test_COM_07_containers_that_share_one_card_may_be_slower_packed_than_spread() -> None:
    """Eight ranks behind one 100 Gb/s card without NVLink, against eight nodes with a card each."""
    card = 12.5e9
    base = find_hardware("H100-SXM")
    packed = setting(
        nodes=1, global_batch_seqs=8, hardware=base.override(domain_bandwidth=card / 8, nic_bandwidth=card / 8)
    )
    spread = setting(nodes=8, devices_per_node=1, global_batch_seqs=8, hardware=base.override(nic_bandwidth=card))
    pool = Pool.from_candidates([Candidate(data_parallel_shard=8)])
    assert price(pool, spread).step_time_s[0] < price(pool, packed).step_time_s[0]


def test_fsdp_traffic_by_synchronisation() -> None:
    where = setting("llama3:llama3_70b", nodes=128, global_batch_seqs=512)
    always = Candidate(tensor_parallel=8, data_parallel_shard=128)
    seconds = []
    for candidate in (always, replace(always, accumulate_without_sync=True)):
        layout = layout_of(Pool.from_candidates([candidate]), where)
        seconds.append(float(sum(t.bytes[0] for t in data_traffic(layout, TORCHTITAN, prior(where)))) / 50e9)
    assert seconds[0] == pytest.approx(5.6, abs=0.1)
    assert seconds[1] == pytest.approx(3.5, abs=0.1)

"""Enumeration and the pool of arrays."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np

from search_space.candidate import Candidate
from search_space.enumerate import divisors
from search_space.enumerate import enumerate_pool
from search_space.hardware import find_hardware
from search_space.knobs import find_knob
from search_space.knobs import KNOBS
from search_space.knobs import parse_assignment
from search_space.model import ModelShape
from search_space.pool import canonical
from search_space.pool import Pool
from search_space.rules import judge
from search_space.rules import RULES
from search_space.setting import Setting


def small_settings() -> st.SearchStrategy[Setting]:
    shape = ModelShape(layers=6, hidden=256, heads=16, kv_heads=8, ffn=768, vocab=2048)
    return st.builds(
        lambda per_node, nodes, batch, gpu: Setting(
            shape=shape,
            hardware=find_hardware(gpu),
            devices_per_node=per_node,
            nodes=nodes,
            seq_len=256,
            global_batch_seqs=batch,
        ),
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from([1, 2, 3]),
        st.sampled_from([1, 2, 6, 8, 24, 48]),
        st.sampled_from(["cpu", "H100-SXM"]),
    )


@given(setting=small_settings())
@settings(max_examples=40, deadline=None)
def test_enumerated_candidates_use_all_devices_once(setting: Setting) -> None:
    pool = enumerate_pool(setting)
    candidates = pool.candidates()
    assert len({candidate.key() for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        assert candidate.num_devices == setting.num_devices
        assert setting.global_batch_seqs % (candidate.data_parallel * candidate.micro_batch) == 0
        assert canonical(candidate) == candidate


def test_names_on_record_stay_what_they_were() -> None:
    """Studies and tables on disk hold these; a knob that came later does not change them while it is off."""
    assert Candidate(micro_batch=8, activation_checkpoint="selective").key() == "630eef8806ff"
    assert Candidate(symm_mem=True).key() != Candidate().key()


@given(setting=small_settings())
@settings(max_examples=40, deadline=None)
def test_every_refusal_has_numbers_that_disagree(setting: Setting) -> None:
    pool = enumerate_pool(setting)
    judgement = judge(pool, setting, RULES)
    for i in np.flatnonzero(~judgement.legal)[:20]:
        reasons = judgement.reasons(pool, setting, int(i))
        assert reasons
        for reason in reasons:
            assert "{" not in reason.text and reason.unit and reason.code


def test_pool_round_trip() -> None:
    rows = [
        Candidate(),
        Candidate(tensor_parallel=2, compile=True, activation_checkpoint="memory_budget", memory_budget=0.4),
        Candidate(pipeline_parallel=2, schedule="ZBVZeroBubble", virtual_stages=2, env="fast"),
    ]
    assert Pool.from_candidates(rows).candidates() == rows


def test_asked_values_only(cpu_setting: Setting) -> None:
    pool = enumerate_pool(cpu_setting, {"tensor_parallel": (2,), "activation_checkpoint": ("full",)})
    assert set(pool["tensor_parallel"].tolist()) == {2}
    assert {candidate.activation_checkpoint for candidate in pool.candidates()} == {"full"}


def test_empty_pool(cpu_setting: Setting) -> None:
    assert len(enumerate_pool(cpu_setting, {"tensor_parallel": (3,)})) == 0


def test_tp_beyond_kv_heads_is_refused_with_both_numbers() -> None:
    shape = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    setting = Setting(
        shape=shape,
        hardware=find_hardware("H100-SXM"),
        devices_per_node=16,
        nodes=1,
        seq_len=8192,
        global_batch_seqs=16,
    )
    pool = Pool.from_candidates([Candidate(tensor_parallel=16)])
    reasons = judge(pool, setting, RULES).reasons(pool, setting, 0)
    kv = next(reason for reason in reasons if reason.code == "tp_divides_kv_heads")
    assert (kv.required, kv.available) == (16, 8)


def test_parse_assignment_short_and_long() -> None:
    assert parse_assignment("tp=8, pipeline_parallel=4,ac=full,compile=on,dp=2") == {
        "tensor_parallel": 8,
        "pipeline_parallel": 4,
        "activation_checkpoint": "full",
        "compile": True,
        "dp": 2,
    }


def test_knob_names_are_unique() -> None:
    shorts = [knob.short for knob in KNOBS]
    assert len(set(shorts)) == len(shorts)
    assert all(find_knob(knob.short) is find_knob(knob.name) for knob in KNOBS)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_label_and_key_tell_candidates_apart(cpu_setting: Setting) -> None:
    candidates = enumerate_pool(cpu_setting).candidates()
    assert len({candidate.label() for candidate in candidates}) == len(candidates)
    assert Candidate().key() != replace(Candidate(), micro_batch=2).key()


def test_selective_checkpointing_runs_backward_once() -> None:
    """Split schedules run it twice; compiled blocks, other schedules and other checkpointing are not refused for it."""
    code = "selective_checkpoint_runs_backward_once"
    setting = Setting(
        shape=ModelShape(layers=8, hidden=256, heads=16, kv_heads=8, ffn=768, vocab=2048),
        hardware=find_hardware("H100-SXM"),
        devices_per_node=2,
        nodes=1,
        seq_len=256,
        global_batch_seqs=8,
    )
    base = Candidate(pipeline_parallel=2, virtual_stages=2, activation_checkpoint="selective")
    cases = [
        *[(replace(base, schedule=name), True) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")],
        (replace(base, schedule="Interleaved1F1B"), False),
        (replace(base, schedule="ZBVZeroBubble", activation_checkpoint="full"), False),
        (replace(base, schedule="ZBVZeroBubble", compile=True), False),
    ]
    for candidate, refused in cases:
        pool = Pool.from_candidates([candidate])
        codes = [reason.code for reason in judge(pool, setting, RULES).reasons(pool, setting, 0)]
        assert (code in codes) == refused, candidate.label()

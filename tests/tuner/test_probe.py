"""The probe: figures that repeat, a rank slowed on purpose that is named, and what the ledger learns."""

from __future__ import annotations

from dataclasses import replace
import json
import os
from pathlib import Path
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from dashboards.live import describe
from pruning.coefficients import prior
from pruning.probed import Probed
from pruning.probed import with_probe
from search_space.errors import UserError
from search_space.setting import Setting
from trial_runner.probe.run import DeviceFigures
from trial_runner.probe.run import NodeFigures
from trial_runner.probe.run import shapes_of
from trial_runner.probe.run import suspects_of
from tuner.budget import Meter
from tuner.cli import main
from tuner.probing.node import document
from tuner.probing.node import probe
from tuner.probing.node import probed_of
from tuner.probing.start import probe_at_start
from tuner.records.journal import Journal
from tuner.records.journal import read_journal


def figures(rank: int, tflops: float, memory: float = 10.0) -> DeviceFigures:
    product = {"shape": [64, 256, 256], "tflops": tflops, "mean_tflops": tflops}
    links = [{"bytes": 4096, "seconds": 1e-4, "gb_s": 0.02}, {"bytes": 1 << 24, "seconds": 1e-2, "gb_s": 0.8}]
    return DeviceFigures(rank=rank, products=[product], memory_gb_s=memory, links=links)


def test_a_lagging_device_is_named_and_left_out(cpu_setting: Setting) -> None:
    devices = [figures(0, 0.1), figures(1, 0.1), figures(2, 0.05), figures(3, 0.1, memory=5.0)]
    found = suspects_of(devices)
    assert [(row["rank"], row["what"]) for row in found] == [(2, "matrix products"), (3, "memory bandwidth")]
    assert suspects_of([figures(0, 0.1), figures(1, 0.11)]) == []


@given(rate=st.floats(1e9, 1e11), memory=st.floats(1e9, 1e11))
@settings(max_examples=30, deadline=None)
def test_the_ledger_moves_towards_what_was_observed_and_is_surer(rate: float, memory: float) -> None:
    from search_space.hardware import find_hardware
    from search_space.model import ModelShape

    shape = ModelShape(layers=2, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=1000)
    hardware = find_hardware("cpu").override(peak_flops={"fp32": 5e10})
    setting = Setting(
        shape=shape, hardware=hardware, devices_per_node=2, nodes=1, seq_len=64, global_batch_seqs=4, precision="fp32"
    )
    before = prior(setting)
    after = with_probe(before, setting, Probed(products=[((64, 256, 512), rate)], memory_bytes_s=memory))
    observed = memory / hardware.memory_bandwidth
    low, high = sorted((before.value("memory_efficiency"), observed))
    assert low * 0.999 <= after.value("memory_efficiency") <= high * 1.001
    for name in ("gemm_efficiency", "memory_efficiency"):
        assert after.sigma(name) < before.sigma(name) and after.sigma(name) <= 0.1
    assert after.value("domain_share") == pytest.approx(before.value("domain_share"))


def test_products_have_the_models_shapes(cpu_setting: Setting) -> None:
    shapes = shapes_of(cpu_setting.shape, tokens=1 << 20, limit=1 << 28)
    assert [shape[1:] for shape in shapes] == [[256, 768], [256, 256], [256, 768], [768, 256]]
    assert all(rows * depth * width <= 1 << 28 for rows, depth, width in shapes)


@pytest.mark.e2e
def test_a_rank_slowed_on_purpose_is_named(cpu_setting: Setting) -> None:
    """Rank 1 is stopped four fifths of the time while it measures."""
    over = threading.Event()

    def slow(pids: list[int]) -> None:
        def toggle() -> None:
            while not over.is_set():
                for number, rest in ((signal.SIGSTOP, 0.08), (signal.SIGCONT, 0.02)):
                    try:
                        os.kill(pids[1], number)
                    except ProcessLookupError:
                        return
                    time.sleep(rest)

        threading.Thread(target=toggle, daemon=True).start()

    try:
        found = probe(replace(cpu_setting, devices_per_node=2), "cpu", 2, seconds=2.0, started=slow)
    finally:
        over.set()
    assert 1 in {suspect["rank"] for suspect in found.suspects}
    assert 0 not in {suspect["rank"] for suspect in found.suspects}
    facts = document(found, cpu_setting)
    assert facts["suspects"] and probed_of(found).link_bytes_s is not None


def start(tmp_path: Path, setting: Setting, monkeypatch: pytest.MonkeyPatch, left: float = 1000.0, **facts: Any) -> Any:
    """A study's state with what a probe at its start touches, after that probe."""
    plan = SimpleNamespace(
        setting=setting,
        device="cpu",
        rehearsal=False,
        job=SimpleNamespace(measure=SimpleNamespace(probe=facts.get("probe", True))),
    )
    journal = Journal(tmp_path / "journal.jsonl")
    learned: list[Any] = []
    state: Any = SimpleNamespace(
        plan=plan,
        folder=SimpleNamespace(journal=tmp_path / "journal.jsonl", transfer=tmp_path / "transfer.json"),
        meter=Meter(left),
        knowledge=SimpleNamespace(start_from=learned.append),
        emit=journal.write,
        learned=learned,
    )
    node = NodeFigures(node="n", devices=[figures(0, 0.04), figures(1, 0.02)], suspects=[], elapsed_s=1.0)
    node = replace(node, suspects=suspects_of(node.devices))
    monkeypatch.setattr("tuner.probing.start.probe", facts.get("probing", lambda *args: node))
    session: Any = SimpleNamespace(local=facts.get("local", True))
    probe_at_start(state, session)
    return state


def test_a_study_probes_once_and_goes_on_from_what_it_learned(
    tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path, cpu_setting, monkeypatch)
    events = read_journal(tmp_path / "journal.jsonl")
    assert [event["event"] for event in events] == ["probe", "warning"] and "device 1 lags" in events[1]["text"]
    assert first.meter.spent == pytest.approx(events[0]["device_s"], abs=1e-3) and not first.meter.reserved
    assert describe(events[0])[0].startswith("probe: 2 devices")
    again = start(tmp_path, cpu_setting, monkeypatch)
    assert again.meter.spent == 0 and len(read_journal(tmp_path / "journal.jsonl")) == 2
    assert again.learned[0].value("gemm_efficiency") == pytest.approx(first.learned[0].value("gemm_efficiency"))


@pytest.mark.parametrize("facts", [{"probe": False}, {"local": False}, {"left": 70.0}], ids=str)
def test_a_study_does_not_probe_where_it_should_not(
    facts: dict[str, Any], tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = start(tmp_path, cpu_setting, monkeypatch, **facts)
    assert not read_journal(tmp_path / "journal.jsonl") and state.meter.spent == 0 and not state.learned


@pytest.mark.e2e
def test_the_verb_prints_the_contracts_keys(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\ntorchtitan = "llama3:llama3_debugmodel"\n[cluster]\ngpu = "cpu"\ngpus_per_node = 2\n'
        'peak_tflops = 0.05\n[recipe]\nseq_len = 128\nglobal_batch_seqs = 8\nprecision = "fp32"\n'
    )
    assert main(["probe", "--seconds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"]
    assert main(["probe", str(job), "--seconds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    device = found["nodes"][0]["devices"][0]
    assert device["products"][0]["tflops"] > 0 and device["memory_gb_s"] > 0
    assert [row["bytes"] for row in device["links"]] == sorted(row["bytes"] for row in device["links"])
    assert "suspects" in found and found["coefficients"]["gemm_efficiency"]["value"] > 0


def test_a_probe_that_fails_is_charged_in_the_journal(
    tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise UserError("rank 1 left with code 1")

    state = start(tmp_path, cpu_setting, monkeypatch, probing=fails)
    (event,) = read_journal(tmp_path / "journal.jsonl")
    assert event["event"] == "probe_failed" and "rank 1" in event["text"]
    assert state.meter.spent == pytest.approx(event["device_s"], abs=0.001) and not state.learned

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
from tests.e2e.conftest import raylets
from trial_runner.gang import free_port
from trial_runner.probe import DeviceFigures
from trial_runner.probe import node_figures
from trial_runner.probe import NodeFigures
from trial_runner.probe import probe_node
from trial_runner.probe import shapes_of
from trial_runner.probe.figures import MARK
from trial_runner.probe.figures import read_figures
from trial_runner.probe.suspects import SUSPECT
from trial_runner.probe.suspects import suspects_of
from tuner.budget import Meter
from tuner.cli import main
from tuner.cluster.session import check_answers
from tuner.cluster.session import join
from tuner.probing.cluster import able_nodes
from tuner.probing.cluster import ClusterProbe
from tuner.probing.cluster import probe_cluster
from tuner.probing.node import document
from tuner.probing.node import order_for
from tuner.probing.node import probed_of
from tuner.probing.node import suspect_text
from tuner.probing.start import probe_at_start
from tuner.records.journal import Journal
from tuner.records.journal import read_journal


def figures(
    rank: int, tflops: float, memory: float = 10.0, link: float = 0.8, exchange: float | None = None
) -> DeviceFigures:
    product = {"shape": [64, 256, 256], "tflops": tflops, "mean_tflops": tflops}
    small = {"bytes": 4096, "seconds": 1e-4, "gb_s": 0.02, "mean_gb_s": 0.02}
    links = [small, {"bytes": 1 << 24, "seconds": 1e-2, "gb_s": link, "mean_gb_s": link}]
    network = [] if exchange is None else [small, links[1] | {"gb_s": exchange, "mean_gb_s": exchange}]
    return DeviceFigures(
        rank=rank,
        products=[product],
        memory_gb_s=memory,
        memory_mean_gb_s=memory,
        links=links,
        network=network,
        exchange_gb_s=exchange,
    )


def test_a_lagging_device_is_named_and_left_out() -> None:
    devices = [figures(0, 0.1), figures(1, 0.1), figures(2, 0.05), figures(3, 0.1, memory=5.0)]
    (found,) = suspects_of([devices])
    assert [(row["rank"], row["what"]) for row in found] == [(2, "matrix products"), (3, "memory bandwidth")]
    assert suspects_of([[figures(0, 0.1), figures(1, 0.11)]]) == [[]]
    probed = probed_of(node_figures(devices, ["n"], 1.0))
    assert probed.products[0][1] == pytest.approx(0.1e12) and probed.memory_bytes_s == pytest.approx(10e9)


def test_a_node_of_slow_devices_is_judged_by_the_other_nodes() -> None:
    nodes = [
        [figures(0, 0.1), figures(1, 0.1)],
        [figures(0, 0.1), figures(1, 0.1)],
        [figures(0, 0.05), figures(1, 0.05)],
    ]
    assert [len(found) for found in suspects_of(nodes)] == [0, 0, 2]


@given(
    slow=st.integers(0, 4),
    share=st.floats(0.01, 1.0),
    inside=st.booleans(),
    nodes=st.integers(2, 5),
)
@settings(max_examples=60, deadline=None)
def test_slow_links_of_a_node_are_named_and_left_out(slow: int, share: float, inside: bool, nodes: int) -> None:
    """45 GB/s where the others have 425, say: all ranks of the node are held up, so the node is named, not a device."""

    def node(at: int) -> list[DeviceFigures]:
        rate = share if at == slow % nodes else 1.0
        link, exchange = (425.0 * rate, 45.0) if inside else (425.0, 45.0 * rate)
        return [figures(rank, 0.1, link=link, exchange=exchange) for rank in range(2)]

    devices = [device for at in range(nodes) for device in node(at)]
    found = node_figures(devices, [f"n{at}" for at in range(nodes)], 1.0)
    named = [at for at in range(nodes) if found[at].suspects]
    judged = share < SUSPECT and nodes > 2
    assert named == ([slow % nodes] if judged else [])
    if not judged:
        return
    (row,) = found[slow % nodes].suspects
    assert row["rank"] is None and row["what"] == ("links inside the node" if inside else "links to other nodes")
    assert f"node n{slow % nodes} lags" in suspect_text(f"n{slow % nodes}", row)
    probed = probed_of(found)
    assert probed.link_bytes_s == pytest.approx(425e9) and probed.network_bytes_s == pytest.approx(45e9)


def test_no_figures_is_an_error() -> None:
    with pytest.raises(UserError, match="without figures"):
        read_figures(["a warning", MARK.removesuffix(":")])


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
    assert after.value("network_share") == pytest.approx(before.value("network_share"))
    probed = Probed(products=[((64, 256, 512), rate)], memory_bytes_s=memory, network_bytes_s=memory)
    share = with_probe(before, setting, probed).value("network_share")
    low, high = sorted((before.value("network_share"), memory / hardware.nic_bandwidth))
    assert low * 0.999 <= share <= high * 1.001


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
        found = probe_node(order_for(replace(cpu_setting, devices_per_node=2), "cpu", 2.0), started=slow)
    finally:
        over.set()
    assert 1 in {suspect["rank"] for suspect in found.suspects}
    assert 0 not in {suspect["rank"] for suspect in found.suspects}
    facts = document([found], cpu_setting)
    assert facts["suspects"] and probed_of([found]).link_bytes_s is not None


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
        folder=SimpleNamespace(root=tmp_path, journal=tmp_path / "journal.jsonl", transfer=tmp_path / "transfer.json"),
        meter=Meter(left),
        knowledge=SimpleNamespace(start_from=learned.append),
        emit=journal.write,
        learned=learned,
    )
    node = NodeFigures(node="n", devices=[figures(0, 0.04), figures(1, 0.02)], suspects=[], elapsed_s=1.0)
    node = replace(node, suspects=suspects_of([node.devices])[0])
    monkeypatch.setattr("tuner.probing.start.probe_node", facts.get("probing", lambda *args, **more: node))
    nodes = [SimpleNamespace(devices=count) for count in facts.get("nodes", ())]
    session: Any = SimpleNamespace(local=not nodes, nodes=lambda: nodes)
    probe_at_start(state, session)
    return state


def test_a_study_probes_once_and_goes_on_from_what_it_learned(
    tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path, cpu_setting, monkeypatch)
    events = read_journal(tmp_path / "journal.jsonl")
    assert [event["event"] for event in events] == ["probe", "warning"] and "device 1 of n lags" in events[1]["text"]
    assert first.meter.spent == pytest.approx(events[0]["device_s"], abs=1e-3) and not first.meter.reserved
    assert describe(events[0])[0].startswith("probe: 2 devices")
    again = start(tmp_path, cpu_setting, monkeypatch)
    assert again.meter.spent == 0 and len(read_journal(tmp_path / "journal.jsonl")) == 2
    assert again.learned[0].value("gemm_efficiency") == pytest.approx(first.learned[0].value("gemm_efficiency"))


@pytest.mark.parametrize("facts", [{"probe": False}, {"nodes": (1, 1)}, {"left": 70.0}], ids=str)
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
    assert device["memory_gb_s"] >= device["memory_mean_gb_s"] > 0 and found["nodes"][0]["others_share"] <= 1
    assert "suspects" in found and found["coefficients"]["gemm_efficiency"]["value"] > 0


def test_a_probe_that_fails_is_charged_in_the_journal(
    tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **more: Any) -> Any:
        raise UserError("rank 1 left with code 1")

    state = start(tmp_path, cpu_setting, monkeypatch, probing=fails)
    (event,) = read_journal(tmp_path / "journal.jsonl")
    assert event["event"] == "probe_failed" and "rank 1" in event["text"]
    assert state.meter.spent == pytest.approx(event["device_s"], abs=0.001) and not state.learned


@pytest.mark.parametrize(
    ("left", "asked"), [(1000.0, 3), (100.0, 1), (70.0, 0)], ids=["all nodes", "one trial's", "none"]
)
def test_every_node_of_a_cluster_is_probed_unless_that_is_too_dear(
    left: float, asked: int, tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of two devices; the third of four has one, so no node-share fits it."""
    setting = replace(cpu_setting, devices_per_node=2, nodes=1)
    counts = []

    def found(session: Any, order: Any, nodes: int, *rest: Any) -> ClusterProbe:
        counts.append(nodes)
        devices = [figures(rank, 0.04, exchange=0.5) for rank in range(2)] * nodes
        names = [f"n{i}" for i in range(nodes)]
        return ClusterProbe(nodes=node_figures(devices, names, 3.0), device_s=6.0 * nodes, node_ids=names)

    monkeypatch.setattr("tuner.probing.start.probe_cluster", found)
    monkeypatch.setattr("tuner.probing.start.ALLOWANCE_S", 8.0)
    state = start(tmp_path, setting, monkeypatch, left=left, nodes=(2, 2, 1, 2))
    assert counts == ([asked] if asked else [])
    events = read_journal(tmp_path / "journal.jsonl")
    assert [event["event"] for event in events] == ["probe"] * bool(asked)
    assert state.meter.spent == pytest.approx(6.0 * asked)
    if asked:
        assert describe(events[0])[0].startswith(f"probe: {2 * asked} devices")


class FakeNodes:
    """A cluster whose nodes can be put out of use."""

    local = False

    def __init__(self, count: int) -> None:
        self.left = {f"id{i}": f"10.0.0.{i}" for i in range(count)}

    def nodes(self) -> list[Any]:
        return [SimpleNamespace(devices=2, node_id=name, address=at) for name, at in self.left.items()]

    def quarantine(self, node_id: str) -> Any:
        address = self.left.pop(node_id, None)
        return SimpleNamespace(node_id=node_id, address=address) if address else None


@given(
    shares=st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.3]), min_size=3, max_size=6),
    needed=st.integers(1, 3),
    busy=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_nodes_that_lag_are_put_out_of_use_while_enough_are_left(shares: list[float], needed: int, busy: bool) -> None:
    """By whatever it learned in an earlier session too; the slowest first, and never so many that no trial fits."""
    from tuner.probing.start import _leave_out

    rates = [0.04 * share for share in shares]
    middle = sorted(rates)[len(rates) // 2]
    suspects = [
        {"node": f"n{i}", "node_id": f"id{i}", "rank": 0, "what": "matrix products", "value": rate, "median": middle}
        | {"others_share": 0.5 if busy else 0.0}
        for i, rate in enumerate(rates)
        if rate < SUSPECT * middle
    ]
    said: list[dict[str, Any]] = []
    setting = SimpleNamespace(devices_per_node=2, nodes=needed)
    state: Any = SimpleNamespace(
        plan=SimpleNamespace(setting=setting, device="cpu"),
        emit=lambda event, **facts: said.append({"event": event, **facts}),
    )
    session: Any = FakeNodes(len(shares))
    _leave_out(state, session, suspects)
    out = min(len(suspects), len(shares) - needed) if not busy else 0
    assert [event["event"] for event in said] == ["quarantine"] * out and len(session.left) == len(shares) - out
    gone = [suspect for suspect in suspects if suspect["node_id"] not in session.left]
    kept = [suspect for suspect in suspects if suspect["node_id"] in session.left]
    assert all(a["value"] <= b["value"] for a in gone for b in kept)
    _leave_out(state, session, suspects)
    assert len(said) == out, "put out of use twice"


@pytest.mark.e2e
def test_a_gang_that_fails_costs_what_it_held_and_frees_its_nodes(
    tmp_path: Path, cpu_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    setting = replace(cpu_setting, devices_per_node=1)
    order = order_for(setting, "cpu", 0.5)
    with raylets(2) as cluster, join("cpu", 1, cluster.address) as session:
        assert able_nodes(session, 1) == 2 and able_nodes(session, 2) == 0
        said = {"no_such_program": "No module named no_such_program", "json.tool": "rank 0 ended without figures"}
        for program, why in said.items():
            monkeypatch.setattr("tuner.probing.cluster.PROGRAM", program)
            probed = probe_cluster(session, order, 2, tmp_path / program / "ranks", 60)
            assert not probed.nodes and why in probed.failed and probed.device_s > 0
        monkeypatch.undo()
        interrupted = probe_cluster(session, order, 2, tmp_path / "interrupted" / "ranks", 60, lambda: True)
        assert interrupted.failed.startswith("interrupted") and not interrupted.nodes
        waited = probe_cluster(session, order, 3, tmp_path / "waited" / "ranks", 1.0)
        assert "were not free within 1 s" in waited.failed and waited.device_s == 0

        def silent(gang: Any, deadline_s: float) -> None:
            raise ray.exceptions.GetTimeoutError("the node does not answer")

        monkeypatch.setattr("tuner.cluster.placed_gang.PlacedGang.start", silent)
        lost = probe_cluster(session, order, 2, tmp_path / "lost" / "ranks", 60)
        assert lost.failed == "GetTimeoutError: the node does not answer" and lost.device_s > 0
        monkeypatch.undo()
        # Nothing of all that is still held.
        good = probe_cluster(session, order, 2, tmp_path / "good" / "ranks", 60)
        assert [len(node.devices) for node in good.nodes] == [1, 1] and not good.failed
        assert len({node.node for node in good.nodes}) == 2
        probed_of(good.nodes)


def test_a_cluster_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray itself would try for more than a minute."""
    address = f"127.0.0.1:{free_port()}"
    assert main(["probe", "--address", address]) == 2
    said = capsys.readouterr().err
    assert f"Ray at '{address}' does not answer" in said and "ray start --head" in said


@pytest.mark.parametrize("address", ["auto", "local", "somewhere"])
def test_an_address_without_a_port_is_left_to_ray(address: str) -> None:
    check_answers(address)

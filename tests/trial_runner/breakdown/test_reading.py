"""The reader: every spelling of a trace, and files that are cut, broken or hostile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
import pickle
import resource
import tempfile
import time
from typing import Any

from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from search_space.errors import UserError
from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import stream
from trial_runner.breakdown import TraceError
from trial_runner.breakdown.read import find_rank
from trial_runner.breakdown.read import read_trace
from trial_runner.breakdown.trace import Trace


DATA = Path(__file__).parents[2] / "data" / "traces"
SMALL = gzip.decompress((DATA / "amd_trace__mi250_minitoy_train_ROCm6_2_kineto.json.gz").read_bytes())
NASTY = 'a "quoted\\" },{ name with \\\\ and [brackets] and a } , { too'


def nasty_trace() -> synth.Trace:
    trace = synth.Trace(rank=2, world_size=4, header={"before": {"traceEvents": [1, {"x": NASTY}]}})
    trace.step(0, 0, 5000)
    trace.kernel(NASTY, 0, 10, nested={"list": [{"a": [1, {"b": "}, {"}]}, {"c": NASTY}]})
    for index in range(40):
        trace.kernel(f"gemm{index}", 20 + index * 10, 5, **{NASTY: NASTY, "Input Dims": [[1, 2], []]})
    return trace


def columns(trace: Trace) -> list[Any]:
    return [trace.start.tolist(), trace.end.tolist(), [trace.names[i] for i in trace.name], trace.correlation.tolist()]


@pytest.mark.parametrize("block", [7, 64, 333, 1 << 20])
@pytest.mark.parametrize("style", ["compact", "default", "kineto", "gz", "bare"])
def test_every_spelling_and_block_size_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, style: str
) -> None:
    trace = nasty_trace()
    expected = columns(read_trace(trace.write(tmp_path / "expected_rank2.json")))
    monkeypatch.setattr(stream, "BLOCK_BYTES", block)
    path = tmp_path / ("rank2.json.gz" if style == "gz" else "rank2.json")
    trace.write(path, bare=style == "bare", indent=2 if style == "kineto" else None)
    if style == "compact":
        path.write_text(json.dumps(trace.document(), separators=(",", ":")))
    found = read_trace(path)
    assert columns(found) == expected
    assert found.rank == 2
    assert found.world_size == (None if style == "bare" else 4)
    assert len(found.start) == 42


def test_keys_after_the_events_are_read(tmp_path: Path) -> None:
    document = nasty_trace().document()
    last = {key: document[key] for key in ("traceEvents", "schemaVersion", "distributedInfo")}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(last | {"baseTimeNanoseconds": 10**18}))
    found = read_trace(path)
    assert (found.rank, found.origin_ns) == (2, 10**18)


def test_old_categories_and_events_of_no_interest(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "Kernel", "name": "gemm", "pid": 0, "tid": "stream 7", "ts": 10, "dur": 5, "args": {}},
        {"ph": "X", "cat": "Operator", "name": "ProfilerStep#4", "pid": 1, "tid": "1", "ts": 0, "dur": 100, "args": {}},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": "1", "ts": 1, "dur": 2},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 1, "id": 3},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 5, "args": {"Bytes": -4}},
        {"ph": "X", "cat": "python_function", "name": "train.py(3): step", "pid": 1, "tid": 1, "ts": 0, "dur": 90},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 900},
    ]
    path = tmp_path / "old_rank0.json"
    path.write_text(json.dumps(events))
    step = break_down([path]).steps[0]
    assert (step.step, step.kernels, step.launches, step.step_s) == (4, 1, 1, pytest.approx(1e-4))


def test_not_a_number_and_broken_text_are_mended(tmp_path: Path) -> None:
    text = json.dumps(nasty_trace().document(), indent=1)
    text = text.replace('"device": 0', '"device": NaN', 3).replace("gemm7", "gemm\udc80", 1)
    path = tmp_path / "rank2.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert len(read_trace(path).start) == 42


@pytest.mark.parametrize(
    ("field", "values", "kept"),
    [
        ("ts", [None, "x", [1], {"a": 1}, 1e300, -1e300, float("inf"), "NaN", True], 1),
        ("dur", [-5, 1e300, "-3", float("inf")], 0),
        ("dur", [None, "x", [1]], 3),
        ("name", [None, 5, ["a"], {"b": 1}, "n" * 100_000], 5),
        ("pid", [None, [1], {"a": 1}, "x", 1.5], 5),
        ("args", [None, {"correlation": "x"}, {"correlation": 1 << 80}, {"External id": [1]}], 4),
        ("args", [5, "x", [1]], 3),
        ("cat", [None, 5, ["kernel"], "nothing"], 0),
    ],
)
def test_values_of_any_type(tmp_path: Path, field: str, values: list[Any], kept: int) -> None:
    trace = synth.Trace()
    for value in values:
        trace.events.append(
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 1, "tid": 1, "ts": 5, "dur": 5, "args": {}}
            | {field: value}
        )
    assert len(read_trace(trace.write(tmp_path / "t.json")).start) == kept


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"   \n", "an empty file"),
        (b"hello", "starts with b'hello'"),
        (pickle.dumps({"traceEvents": []}), "starts with"),
        (b"{}", "no list"),
        (b'{"traceEvents": 5}', "no list"),
        (b'{"a": {"traceEvents": []}}', "no list"),
        (b'{"traceEvents": [', "incomplete"),
        (b'{"traceEvents": [{"ph": "X"', "incomplete"),
        (b'{"traceEvents": [{"ph": "X"},', "incomplete"),
        (b'{"traceEvents": []', "incomplete"),
        (b'{"traceEvents": [{"ph": "X", "name": }]}', "not valid JSON"),
        (b'{"traceEvents": [{"ph": "X"} xx ]}', "not valid JSON"),
        (b'{"traceEvents": [{"ph": "X"}}', "unbalanced"),
        (b'{"traceEvents": [' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]}", "nested deeper"),
        (b'{"traceEvents": [' + b"[" * 1_000_000, "nested deeper"),
        (b"[" * 1_000_000, "nested deeper"),
        (b'{"traceEvents": []}', "nothing to break down"),
        (b"\x1f\x8b\x08\x00broken", "incomplete"),
        (b"SQLite format 3\x00" + b"\x00" * 100, "SQLite"),
    ],
)
def test_what_is_no_trace_gives_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        break_down([path])


def test_a_missing_file_gives_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be opened"):
        break_down([tmp_path / "none.json"])
    with pytest.raises(TraceError, match="cannot be opened"):
        break_down([tmp_path])
    with pytest.raises(UserError, match="no trace given"):
        break_down([])


def test_one_endless_event_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_ITEM_BYTES", 1 << 20)
    path = tmp_path / "x.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "' + b"a" * (3 << 20) + b'"}]}')
    with pytest.raises(TraceError, match="larger than"):
        read_trace(path)
    path.write_bytes(b'{"a": "' + b"a" * (3 << 20) + b'", "traceEvents": []}')
    with pytest.raises(TraceError, match="before the first event"):
        read_trace(path)
    path.write_bytes(b'{"traceEvents": [], "a": "' + b"a" * (3 << 20) + b'"}')
    with pytest.raises(TraceError, match="after the last event"):
        read_trace(path)


def test_a_packed_bomb_ends_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_BYTES", 8 << 20)
    event = json.dumps({"ph": "M", "name": "x" * 200}).encode()
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + (event + b",") * 100_000 + event + b"]}", 1))
    with pytest.raises(TraceError, match="unpacked"):
        read_trace(path)


def test_too_many_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trial_runner.breakdown.read.MAX_EVENTS", 30)
    with pytest.raises(TraceError, match="profile fewer steps"):
        read_trace(nasty_trace().write(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3_trace.json", 3),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("worker.rank_12.json", 12),
        ("Rank7.json.gz", 7),
        ("trace.json", None),
        ("frank.json", None),
    ],
)
def test_rank_in_a_file_name(name: str, rank: int | None) -> None:
    assert find_rank(Path(name)) == rank


def read_or_refuse(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        path.write_bytes(content)
        try:
            result = break_down([path])
        except UserError as error:
            assert str(path) in str(error) or "step" in str(error)
            return
        for step in result.steps:
            total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
            assert total == pytest.approx(step.step_s, abs=1e-6)
        json.dumps(result.to_json(), allow_nan=False)


@settings(max_examples=150, deadline=2000)
@given(st.data())
def test_fuzz_damaged_traces_are_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat", "drop"]))
        if action == "flip":
            content[at] = data.draw(st.integers(0, 255))
        elif action == "cut" and at > 10:
            del content[at:]
        elif action == "insert":
            content[at:at] = data.draw(
                st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"1e999", b"null", b"\x00"])
            )
        elif action == "repeat":
            content[at:at] = content[at : at + data.draw(st.integers(1, 3000))]
        else:
            del content[at : at + data.draw(st.integers(1, 3000))]
        if not content:
            break
    read_or_refuse(bytes(content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
fields = {
    "ph": st.sampled_from(["X", "X", "X", "M", "s", "B"]) | json_values,
    "cat": st.sampled_from(["kernel", "cpu_op", "user_annotation", "gpu_memcpy", "cuda_runtime"]) | json_values,
    "name": st.sampled_from(["ProfilerStep#1", "ProfilerStep#2", "gemm", "ncclKernel_x", "aten::mm"]) | json_values,
    "ts": st.floats() | st.integers() | json_values,
    "dur": st.floats() | st.integers() | json_values,
    "pid": json_values,
    "tid": json_values,
    "args": st.dictionaries(
        st.sampled_from(["correlation", "External id", "stream", "Input Dims", "Collective name", "Sequence number"]),
        json_values,
        max_size=4,
    )
    | json_values,
}


@settings(max_examples=150, deadline=2000)
@given(st.lists(st.fixed_dictionaries({}, optional=fields), max_size=20), json_values)
@example([{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 8e15, "dur": 1e14}], None)
def test_fuzz_events_of_any_json(events: list[Any], info: Any) -> None:
    read_or_refuse(json.dumps({"distributedInfo": info, "traceEvents": events}).encode())


@settings(max_examples=100, deadline=2000)
@given(st.binary(max_size=300))
def test_fuzz_any_bytes(content: bytes) -> None:
    read_or_refuse(content)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='{}[]",\\ :a', max_size=60))
def test_brackets_outside_strings_agree_with_a_plain_scanner(text: str) -> None:
    position, depth = stream.brackets(text.encode())
    expected, inside, escaped, level = [], False, False, 0
    for index, letter in enumerate(text):
        if inside and letter == "\\":
            escaped = not escaped
            continue
        if letter == '"' and not escaped:
            inside = not inside
        elif not inside and letter in "{}[]":
            level += 1 if letter in "{[" else -1
            expected.append((index, level))
        escaped = False
    if "\\" not in text or all(text[:i].count('"') % 2 for i, c in enumerate(text) if c == "\\"):
        assert list(zip(position.tolist(), depth.tolist())) == expected


def test_memory_stays_small_on_a_large_trace(tmp_path: Path) -> None:
    """60 MB of events of which few are kept: the reader holds a block at a time and not the file."""
    event = {"ph": "X", "cat": "python_function", "name": "x.py(1): f", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2.5}
    piece = json.dumps(event | {"args": {"Python id": 1, "Call stack": "y" * 150}}).encode() + b",\n"
    path = tmp_path / "rank0.json"
    with path.open("wb") as file:
        file.write(b'{"traceEvents": [')
        for _ in range(60):
            file.write(piece * (1_000_000 // len(piece)))
        file.write(
            json.dumps({"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 9, "dur": 5}).encode()
        )
        file.write(b"]}")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    trace = read_trace(path)
    assert len(trace.start) == 1 and trace.num_events > 200_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 60
    assert time.perf_counter() - start < 20
    assert np.array_equal(trace.end - trace.start, [5000])


def test_half_a_surrogate_in_a_name_does_no_harm(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 100)
    trace.kernel("mystery\ud800", 0, 50)
    result = break_down([trace.write(tmp_path / "t.json")])
    json.dumps(result.to_json(), ensure_ascii=False).encode()
    assert result.steps[0].unknown_kernels[0]["name"] == "mystery?"


@pytest.mark.parametrize("rank", [None, "3", -1, 1.5, [2]])
def test_a_rank_that_is_none_falls_back_to_the_file_name(tmp_path: Path, rank: Any) -> None:
    document = {"distributedInfo": {"rank": rank}, "traceEvents": nasty_trace().events}
    path = tmp_path / "rank7.json"
    path.write_text(json.dumps(document))
    assert read_trace(path).rank == 7

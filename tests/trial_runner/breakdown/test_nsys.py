"""Nsight Systems' SQLite export: the same parts as the same step in a JSON trace."""

from __future__ import annotations

from pathlib import Path
import sqlite3

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from search_space.errors import UserError
from tests.trial_runner.breakdown import synth
from tests.trial_runner.breakdown.test_reading import read_or_refuse
from trial_runner.breakdown import break_down


US = 1000


def export(path: Path, processes: int = 1) -> Path:
    """Two steps of 1,000 µs: 400 compute, 100 gathered alone, 200 send-receive alone, 100 in the loader."""
    strings = [synth.GEMM, synth.ALL_GATHER, synth.SEND_RECV, "cudaLaunchKernel_v7000", synth.NEXT_BATCH]
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        file.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(strings))
        file.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, "
            "correlationId INT, globalPid INT, demangledName INT, shortName INT)"
        )
        file.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, streamId INT, copyKind INT)")
        file.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, "
            "correlationId INT, nameId INT)"
        )
        file.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, globalTid INT, text TEXT, textId INT)")
        file.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT)")
        file.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000)")
        for step in range(2):
            at = 50 * US + step * 1000 * US
            kernels = [(0, 400, 7, 0), (350, 150, 20, 1), (500, 200, 20, 2)]
            for index, (start, length, stream, name) in enumerate(kernels):
                number, process = 10 * step + index, index % processes
                row = (at + start * US, at + (start + length) * US, 0, stream, number, process, name, name)
                file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?)", row)
                launch = (at + start * US - 900, at + start * US - 100, 5, number, 3)
                file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", launch)
            file.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?)", (at + 900 * US, at + 950 * US, 7, 1)
            )
            ranges = [(0, 1000, f"iteration {step}", None), (700, 100, None, 4), (1, 5, "aten::mm, seq = 3", None)]
            for start, length, text, number in ranges:
                row = (at + start * US, at + (start + length) * US, 5, text, number)
                file.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?)", row)
    file.close()
    return path


def test_parts_of_an_export(tmp_path: Path) -> None:
    result = break_down([export(tmp_path / "rank1.sqlite")])
    assert [(step.rank, step.step) for step in result.steps] == [(1, 0), (1, 1)]
    for step in result.steps:
        assert step.useful_s == pytest.approx(400e-6)
        found = {part: round(value * 1e6) for part, value in step.parts_s.items() if value}
        assert found == {"bubble": 200, "exposed_communication": 100, "data_wait": 150, "cpu_launch": 150}
        assert (step.kernels, step.launches_without_kernel) == (3, 0)
    assert [step.launches for step in result.steps] == [3, 2]


def test_several_processes_and_other_databases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kernels of 2 processes"):
        break_down([export(tmp_path / "two.sqlite", processes=2)])
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE x (y INT)")
        file.execute("CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT 1 AS start")
    with pytest.raises(UserError, match="no Nsight Systems export"):
        break_down([other])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return export(tmp_path_factory.mktemp("nsys") / "x.sqlite").read_bytes()


@settings(max_examples=100, deadline=2000)
@given(st.data())
def test_fuzz_damaged_exports_are_read_or_refused(sound: bytes, data: st.DataObject) -> None:
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(16, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(content))

"""A live job against its claim: planted falls are found where they were planted, unchanged runs raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
from pathlib import Path
import subprocess
import sys
import threading
import time
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from search_space.errors import UserError
from tuner.cli import main
from tuner.evidence.expected import Expectation
from tuner.evidence.expected import find_expectation
from tuner.evidence.expected import from_docstring
from tuner.evidence.run_log import parse
from tuner.evidence.run_log import Point
from tuner.evidence.run_log import read_run
from tuner.evidence.watch import CANNOT_TELL
from tuner.evidence.watch import changes
from tuner.evidence.watch import HOLD
from tuner.evidence.watch import REGRESSED
from tuner.evidence.watch import watch


CLAIM = Expectation(
    source="t", step_time_s=4.75, step_time_ci_s=(4.7, 4.8), tokens_per_s_per_device=862.0, mfu_pct=42.0
)
NOISE = 0.01
"""Log standard deviation of a logged step."""


def noise(seed: int, n: int, correlated: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    own = rng.normal(0, 1, n)
    for i in range(1, n):
        own[i] = correlated * own[i - 1] + np.sqrt(1 - correlated**2) * own[i]
    return NOISE * own


def points(levels: np.ndarray, seed: int = 0, correlated: float = 0.0) -> list[Point]:
    times = CLAIM.step_time_s * levels * np.exp(noise(seed, len(levels), correlated))  # type: ignore[operator]
    return [Point(step=i + 1, unix_s=1e9 + i, step_time_s=float(t)) for i, t in enumerate(times)]


def test_no_alarm_in_twenty_unchanged_runs() -> None:
    """None regressed, and at most two that cannot tell."""
    verdicts = [watch(points(np.ones(200), seed, 0.3), CLAIM).verdict for seed in range(20)]
    assert REGRESSED not in verdicts and verdicts.count(CANNOT_TELL) <= 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(40, 160), st.floats(0.05, 1.0))
def test_a_planted_fall_is_found_where_it_was_planted(seed: int, at: int, slower: float) -> None:
    levels = np.ones(200)
    levels[at:] += slower
    found = watch(points(levels, seed), CLAIM)
    assert found.verdict == REGRESSED and found.fell is not None
    assert abs(found.fell.first_step - (at + 1)) <= 3
    assert found.fell.ratio == pytest.approx(1 + slower, rel=0.02)


def test_twice_the_noise_floor_is_a_regression() -> None:
    """Twice one MFU point, the design's noise floor."""
    verdicts = []
    for seed in range(20):
        levels = np.ones(300)
        levels[150:] *= 42 / 40
        verdicts.append(watch(points(levels, seed), CLAIM).verdict)
    assert verdicts.count(REGRESSED) >= 19


def test_a_recovered_job_holds_again() -> None:
    levels = np.ones(300)
    levels[100:200] = 1.3
    found = watch(points(levels), CLAIM)
    assert found.verdict == HOLD and len(found.stretches) == 3


def test_single_slow_steps_are_no_change() -> None:
    levels = np.ones(300)
    levels[::50] = 3.0
    found = watch(points(levels), CLAIM)
    assert found.verdict == HOLD and len(found.stretches) == 1


def test_slow_from_the_start() -> None:
    found = watch(points(np.full(60, 1.2)), CLAIM)
    assert found.verdict == REGRESSED and "from the first step on" in found.why


def test_too_few_steps_and_too_wide_intervals_cannot_tell() -> None:
    assert watch(points(np.ones(15)), CLAIM).verdict == CANNOT_TELL
    wide = [replace(point, step_time_s=4.75 * (1.0 if i % 2 else 1.3)) for i, point in enumerate(points(np.ones(24)))]
    assert watch(wide, CLAIM).verdict == CANNOT_TELL
    assert watch([], CLAIM).verdict == CANNOT_TELL


def test_warm_up_after_a_restart_is_left_out() -> None:
    run = points(np.ones(60))
    slow = [replace(point, step=point.step + 40, step_time_s=40.0) for point in points(np.ones(10))]
    rest = [replace(point, step=point.step + 50) for point in points(np.ones(60))]
    assert watch([*run, *slow, *rest], CLAIM).verdict == HOLD


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 400))
def test_noise_alone_is_one_stretch(seed: int, n: int) -> None:
    assert changes(noise(seed, n)) == []


def test_long_logs_are_thinned() -> None:
    levels = np.concatenate([np.zeros(6000), np.full(6000, 0.3)])
    (at,) = changes(levels + noise(1, 12000))
    assert abs(at - 6000) <= 30


def test_throughput_stands_for_step_time() -> None:
    run = [Point(step=i, unix_s=None, rate=862.0 * (1 if i < 60 else 0.8)) for i in range(1, 120)]
    found = watch(run, CLAIM)
    assert found.verdict == REGRESSED and found.fell is not None and found.fell.first_step == 60
    with pytest.raises(UserError, match="cannot be compared"):
        watch(run, replace(CLAIM, tokens_per_s_per_device=None))


COLOURED = (
    "\x1b[31mstep: {0}  \x1b[32mloss:  8.1  memory: 61.20GiB(77.3%)  \x1b[34mtps: {1:,}  \x1b[35mmfu: 42.00%\x1b[39m"
)


def test_torchtitans_console_log() -> None:
    lines = ["[titan] 2026-11-29 10:00:00,123 - root - INFO - " + COLOURED.format(10, 1234), "noise"]
    lines += ["[rank0]:[titan] 2026-11-29 10:00:41,001 - root - INFO - " + COLOURED.format(20, 1250)]
    lines += ["validate step: 20  loss: 7.1  tps: 99", "step: 30 tps: 0"]
    found = parse(lines)
    assert [(point.step, point.rate) for point in found] == [(10, 1234.0), (20, 1250.0)]
    assert found[1].unix_s is not None and found[0].unix_s is not None and found[1].unix_s - found[0].unix_s == 41


LOGGER = """
import sys, time
from torchtitan.observability import structured_logger as sl
sl.init_structured_logger(source="training", output_dir=sys.argv[1], enable=True)
for step in range(1, 4):
    sl.set_step(step, relative_step=step)
    with sl.log_trace_span("step"):
        with sl.log_trace_span("fetching_batch"):
            time.sleep(0.002)
"""


@pytest.mark.e2e
def test_torchtitans_own_structured_log(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LOGGER, str(tmp_path)], check=True, capture_output=True)
    found = read_run(str(tmp_path))
    assert [point.step for point in found] == [1, 2, 3]
    for point in found:
        assert point.step_time_s is not None and 0.002 < point.spans["fetching_batch"] <= point.step_time_s < 1
        assert point.unix_s is not None and point.unix_s > 1.7e9


def test_the_phase_that_grew_is_named() -> None:
    records = []
    for i in range(1, 121):
        wait = 0.1 if i <= 60 else 0.6
        for name, seconds in (("fetching_batch", wait), ("fwd_bwd", 4.2), ("step", 4.65 + wait)):
            records.append(
                json.dumps({"step": i, "log_type_name": f"{name}_end", "value": 1e3 * seconds, "time_us": i * 5e6})
            )
    found = watch(parse([*records, '{"torn": ']), CLAIM)
    assert found.verdict == REGRESSED and found.fell is not None and found.fell.first_step == 61
    assert found.grew[0] == ("fetching_batch", pytest.approx(0.5))


DOC = '''"""llama3:llama3_70b tuned for 1024 × H100-SXM.

study: s1, trial 9 against baseline trial 0
before: step 6.2 s [6.1, 6.3], p95 6.5 s, 660.1 tokens/s/device, MFU 32.16%, peak reserved 60.00 GiB
after:  step 4.75 s [4.7, 4.8], p95 4.9 s, 862 tokens/s/device, MFU 42.00%, peak reserved 61.00 GiB, later 1.5 things
parity: something that a later version adds
"""


def f():
    return None
'''
TABLE = (
    "date,study,what,config,after_step_time_s,after_mfu_pct,trace,later\n"
    "2026-11-01,s0,x,other.py,9.0,20.0,,\n2026-11-29,s1,y,tuned.py,4.75,42.00,s1/trials/0009/rank0.trace.json.gz,z\n"
)


def test_the_claim_of_a_config_file_and_of_its_table(tmp_path: Path) -> None:
    claim = from_docstring(DOC, "d")
    assert (claim.step_time_s, claim.step_time_ci_s, claim.tokens_per_s_per_device) == (4.75, (4.7, 4.8), 862.0)
    assert claim.mfu_pct == 42.0 and claim.study == "s1"
    (tmp_path / "tuning_ledger.csv").write_text(TABLE)
    alone = find_expectation(str(tmp_path / "tuning_ledger.csv"))
    assert alone.step_time_s == 4.75 and alone.tokens_per_s_per_device is None
    (tmp_path / "tuned.py").write_text(DOC)
    both = find_expectation(str(tmp_path / "tuning_ledger.csv"))
    assert both.tokens_per_s_per_device == 862.0 and both.trace == "s1/trials/0009/rank0.trace.json.gz"
    assert claim.tolerance == pytest.approx(42 / 41 - 1)


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    folder = tmp_path / "repo"
    folder.mkdir()

    def git(*arguments: str) -> str:
        known = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(folder)]
        return subprocess.run([*known, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    (folder / "other.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (folder / "tuned.py").write_text(DOC)
    (folder / "tuning_ledger.csv").write_text(TABLE)
    git("add", ".")
    git("commit", "--quiet", "-m", "claim")
    return git


def test_the_claim_of_a_commit(tmp_path: Path, repository: Callable[..., str]) -> None:
    claim = find_expectation("main", tmp_path / "repo")
    assert claim.step_time_s == 4.75 and claim.tokens_per_s_per_device == 862.0 and claim.trace
    with pytest.raises(UserError, match="states no step time"):
        find_expectation("main~1", tmp_path / "repo")
    with pytest.raises(UserError, match="no such commit"):
        find_expectation("nowhere", tmp_path / "repo")
    with pytest.raises(UserError, match="no such commit"):
        find_expectation("--all", tmp_path / "repo")


def log(path: Path, rates: list[float], mode: str = "w") -> None:
    with path.open(mode) as file:
        for i, rate in enumerate(rates):
            file.write(
                f"[titan] 2026-11-29 10:{i // 60 % 60:02d}:{i % 60:02d} - INFO - step: {10 * (i + 1)}  tps: "
                f"{rate:,.0f}\n"
            )


@pytest.mark.parametrize(("now", "code"), [(862, 0), (700, 4)])
def test_the_command_and_its_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: float, code: int
) -> None:
    (tmp_path / "tuned.py").write_text(DOC)
    log(tmp_path / "run.log", [862 + i % 3 for i in range(40)] + [now + i % 3 for i in range(40)])
    arguments = ["watch", str(tmp_path / "run.log"), "--claim", str(tmp_path / "tuned.py")]
    assert main([*arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code and (found["fell"] is None) == (code == 0)
    assert main(arguments) == code
    assert "steps 410–" in capsys.readouterr().out or code == 0


def test_following_ends_when_it_falls(tmp_path: Path) -> None:
    (tmp_path / "tuned.py").write_text(DOC)
    log(tmp_path / "run.log", [862 + i % 3 for i in range(30)])
    codes: list[int] = []
    arguments = [
        "watch",
        str(tmp_path / "run.log"),
        "--claim",
        str(tmp_path / "tuned.py"),
        "--follow",
        "--every",
        "0.05",
    ]
    thread = threading.Thread(target=lambda: codes.append(main([*arguments, "--for", "60"])))
    thread.start()
    time.sleep(0.3)
    log(tmp_path / "run.log", [862 + i % 3 for i in range(30)] + [600 + i % 3 for i in range(30)])
    thread.join(60)
    assert codes == [4]


def test_following_an_empty_log_waits(tmp_path: Path) -> None:
    (tmp_path / "tuned.py").write_text(DOC)
    (tmp_path / "run.log").write_text("")
    arguments = ["watch", str(tmp_path / "run.log"), "--claim", str(tmp_path / "tuned.py")]
    assert main(arguments) == 2
    assert main([*arguments, "--follow", "--every", "0.05", "--for", "0.2"]) == 5


def test_an_mlflow_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'm.db'}"
    client = MlflowClient(tracking_uri=uri)
    run = client.create_run(client.create_experiment("e", artifact_location=str(tmp_path / "a")))
    for step in range(1, 60):
        client.log_metric(
            run.info.run_id, "throughput_tps", 862.0 if step < 30 else 600.0, step=step, timestamp=10**12 + step
        )
    client.log_metric(run.info.run_id, "step_time_s", 4.75)  # a summary beside it
    (tmp_path / "tuned.py").write_text(DOC)
    arguments = [
        "watch",
        f"mlflow:{run.info.run_id}",
        "--claim",
        str(tmp_path / "tuned.py"),
        "--tracking-uri",
        uri,
        "--json",
    ]
    assert main(arguments) == 4
    assert json.loads(capsys.readouterr().out)["fell"]["first_step"] == 30
    assert main([*arguments, "--metric", "nothing"]) == 2


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "tuned.py").write_text(DOC)
    claim = ["--claim", str(tmp_path / "tuned.py")]
    assert main(["watch", str(tmp_path / "none.log"), *claim]) == 2
    assert main(["watch", str(tmp_path), *claim]) == 2
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(UserError, match="states no step time"):
        find_expectation(str(tmp_path / "empty.py"))

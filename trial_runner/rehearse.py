"""A rank of a rehearsal: ``python -P -m trial_runner.rehearse ORDER.json``.

It stands where a training rank would, holds the same devices and writes the same records, but instead of training it
sleeps a moment for every step and reports the step time that the ledger predicted, with a little noise. So a study's
placement, budget, records and recovery can be tried out before a cluster is spent on it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import random
import sys
import time

from trial_runner.spec import rank_steps
from trial_runner.spec import TrialSpec


STEP_S = 0.02
"""What a step takes in a rehearsal, seconds, whatever it reports."""

STARTUP_S = 0.5
"""What starting up takes, seconds."""

NOISE = 0.01
"""Standard deviation of reported step times, as a share."""


def main() -> int:
    """Write the records of every asked step."""
    spec = TrialSpec.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    predicted = float(spec.header["predicted_step_s"])
    dice = random.Random(spec.seed * 1000003 + spec.trial)
    started = time.perf_counter()
    print(f"rehearsal: rank {rank} of {spec.world_size}, {predicted:.4g} s a step", flush=True)
    time.sleep(STARTUP_S)
    with rank_steps(Path(spec.folder), rank).open("w", buffering=1) as file:

        def write(**facts: object) -> None:
            file.write(json.dumps(facts) + "\n")

        for name in ("imported", "built", "training"):
            write(event=name, at_s=time.perf_counter() - started, unix_s=time.time())
        for step in range(1, spec.warmup_steps + spec.steps + 1):
            time.sleep(STEP_S)
            write(
                step=step,
                phase="warmup" if step <= spec.warmup_steps else "measured",
                step_time_s=predicted * max(0.5, dice.gauss(1, NOISE)),
                at_s=time.perf_counter() - started,
                loss=None,
                tokens=0,
                gc_s=0.0,
                compiles=0,
            )
        write(event="finished", at_s=time.perf_counter() - started, unix_s=time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())

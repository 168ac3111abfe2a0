"""One rank of a trial: ``python -P -m trial_runner.rank TRIAL.json``, with torchrun's environment variables."""

from __future__ import annotations

import time


STARTED = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

from trial_runner.rank import loading  # noqa: E402
from trial_runner.rank.recorder import StepRecorder  # noqa: E402
from trial_runner.rank.recorder import TrialComplete  # noqa: E402
from trial_runner.spec import rank_error  # noqa: E402
from trial_runner.spec import TrialSpec  # noqa: E402


RECORDED = ("NCCL_", "RCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "HIP_", "TRITON_", "OMP_", "MKL_", "MALLOC_")
"""Beginnings of the environment variables that a trial's log opens with: none of these holds a secret."""


def main() -> int:
    """Train as the order says; the exit code is 0 when every asked step was recorded."""
    spec = TrialSpec.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    if rank == 0:
        facts = {"trial": spec.trial, "study": spec.study, "environment": environment(), **spec.header}
        print(json.dumps(facts, indent=1), flush=True)
    recorder = StepRecorder(spec, rank, STARTED)
    try:
        train(spec, recorder)
    except TrialComplete:
        _leave(0)
    except BaseException as error:
        facts = {
            "rank": rank,
            "unix_s": time.time(),
            "type": type(error).__name__,
            "module": type(error).__module__,
            "text": str(error)[:4000],
            "traceback": traceback.format_exc()[-8000:],
            "device_used_share": _device_used_share(spec.device),
        }
        path = rank_error(Path(spec.folder), rank)
        scratch = path.with_suffix(".writing")
        scratch.write_text(json.dumps(facts))
        scratch.replace(path)
        traceback.print_exc()
        _leave(1)
    return 0


def train(spec: TrialSpec, recorder: StepRecorder) -> None:
    """Load the candidate's config function, build torchtitan's trainer and run its loop under the recorder."""
    if spec.device == "cpu":
        from trial_runner.rank import cpu

        cpu.install(spec.threads)
    if spec.control is not None:
        from trial_runner.control import ControlWork
        from trial_runner.rank.control import run_control

        recorder.event("control", **run_control(ControlWork(**spec.control), spec.device, Path(spec.folder)))
    from trial_runner.rank import tokens

    loading.add_user_path(spec.user_path)
    config = loading.load_function(spec.config_file, spec.config_function)()
    recorder.event("imported")
    if spec.device == "cpu":
        cpu.adapt(config)
    if spec.data == "synthetic":
        tokens.use_synthetic_tokens(config, spec.seed)
    prepare(config, spec)
    start_mode = "scratch" if spec.weights is None else "seed_weights"
    recorder.event("prepared", gc_freq=config.training.gc_freq, start_mode=start_mode)

    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = config.build()
    if spec.weights is not None:
        from trial_runner.rank import seed_weights

        known = seed_weights.exist(spec.weights)
        (seed_weights.load if known else seed_weights.save)(trainer.model_parts, spec.weights)
    recorder.event("built")
    recorder.attach(trainer)
    trainer.train()


def prepare(config: Any, spec: TrialSpec) -> None:
    """Set what belongs to the measurement and not to the candidate: step count, seed, no checkpoints, no validation.

    Every trial starts from scratch, or from the study's seed weights, and collects garbage as often as the user's
    function says: no knob changes either, and both are recorded.
    """
    config.training.steps = spec.warmup_steps + spec.steps + (2 if spec.trace else 0)
    config.debug.seed = spec.seed
    config.debug.enable_structured_logging = False
    config.checkpoint.enable = False
    config.validator.enable = False
    config.dump_folder = os.path.join(spec.folder, "outputs")
    config.metrics.enable_tensorboard = False
    config.metrics.enable_wandb = False
    config.metrics.disable_color_printing = True


def environment() -> dict[str, str]:
    """Variables that change how a trial runs; measurements compare only under the same ones."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)}


def _device_used_share(device: str) -> float | None:
    """Share of the device's memory in use, whoever holds it; None on a CPU or when the device no longer answers."""
    if device != "gpu":
        return None
    try:
        import torch

        free, total = torch.cuda.mem_get_info()
    except Exception:
        return None
    return float(1 - free / total)


def _leave(code: int) -> None:
    """End the process at once: tearing down process groups can hang when a peer is gone, and records are on disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        import torch.distributed as dist

        dist.barrier()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

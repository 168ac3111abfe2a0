"""Train a committed config function outside the tuner, with torchtitan's own entry, on a machine without a GPU.

    torchrun --nproc-per-node 2 -m trial_runner.outside --synthetic-tokens --module MODULE --config FUNCTION

Everything after the options of this program goes to ``torchtitan.train`` unchanged. On a machine with a GPU the
shim stays off, and ``python -m torchtitan.train`` does the same.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from trial_runner.rank import cpu


def main() -> None:
    """Install the CPU shim where it is needed, then hand over to torchtitan."""
    synthetic = "--synthetic-tokens" in sys.argv
    sys.argv = [arg for arg in sys.argv if arg != "--synthetic-tokens"]
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.install(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.path.insert(0, os.getcwd())

    from torchtitan.config import ConfigManager
    from torchtitan.train import main as train

    from trial_runner.rank import tokens

    parse = ConfigManager.parse_args

    def parse_args(self: Any, args: list[str] | None = None) -> Any:
        config = parse(self, args)
        if on_cpu:
            cpu.adapt(config)
        if synthetic:
            tokens.use_synthetic_tokens(config, seed=42)
            config.checkpoint.enable = config.validator.enable = False
        return config

    ConfigManager.parse_args = parse_args
    train()


if __name__ == "__main__":
    main()

"""Targets by name, and comments taken out again."""

from __future__ import annotations

from collections.abc import Callable
import re

from tuner.export import deepspeed
from tuner.export import kuberay
from tuner.export import launch
from tuner.export import megatron
from tuner.export import torchtitan_module
from tuner.export.subject import Export
from tuner.export.subject import Subject


TARGETS: dict[str, Callable[[Subject], Export]] = {
    "torchtitan": torchtitan_module.export,
    "megatron": megatron.export,
    "deepspeed": deepspeed.export,
    "torchrun": launch.torchrun,
    "slurm": launch.slurm,
    "kuberay": kuberay.export,
}
"""What ``--to`` takes."""

NEEDS_FUNCTION = ("torchtitan", "torchrun", "slurm", "kuberay")
"""Targets that run a torchtitan function."""


def without_comments(target: str, text: str) -> str:
    """The text of an export without the lines that are comments alone; shebang and ``#SBATCH`` lines stay."""
    if target == "torchtitan":
        return re.sub(r'\A""".*?"""\n+', "", text, count=1, flags=re.S)
    mark = r"\s*//" if target == "deepspeed" else r"\s*#(?!!|SBATCH)"
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(mark, line))

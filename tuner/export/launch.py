"""Launch files of torchtitan: torchrun in a shell, and an sbatch script; both write their config function first."""

from __future__ import annotations

import shlex

from tuner.export.subject import commented
from tuner.export.subject import Export
from tuner.export.subject import Gap
from tuner.export.subject import Subject
from tuner.export.torchtitan_module import gaps_of
from tuner.export.torchtitan_module import module


def torchrun(subject: Subject) -> Export:
    """A shell script: run it on every node with NODE_RANK and MASTER_ADDR set.

    Raises:
        UserError: the job names no torchtitan function, or the batch does not divide.
    """
    setting = subject.setting
    notes = ["run on every node with NODE_RANK=0… and MASTER_ADDR=<first node>; further arguments go to torchtitan"]
    lines = ["#!/usr/bin/env bash", *_comment(subject, notes), "set -euo pipefail"]
    lines += _write_module(subject, "${TMPDIR:-/tmp}")
    lines += [*_exports(subject), *_facts()]
    lines += [
        f"exec torchrun --nproc-per-node {setting.devices_per_node} --nnodes {setting.nodes} \\",
        '    --node-rank "${NODE_RANK:-0}" --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:'
        '${MASTER_PORT:-29500}" \\',
        f'    --role rank --tee 3 -m torchtitan.train --module {subject.function} --config {subject.function} "$@"',
    ]
    return _export(subject, lines, f"{subject.function}_torchrun.sh")


def slurm(subject: Subject) -> Export:
    """An sbatch script: one task a node, each starting torchrun.

    Raises:
        UserError: the job names no torchtitan function, or the batch does not divide.
    """
    setting = subject.setting
    notes = ["sbatch FILE; the working directory must be one that all nodes see"]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={subject.function[:60]}",
        f"#SBATCH --nodes={setting.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={setting.devices_per_node}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        *_comment(subject, notes),
        "set -euo pipefail",
        *_write_module(subject, "${SLURM_SUBMIT_DIR:-$PWD}"),
        *_exports(subject),
        *_facts(),
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_PORT=${MASTER_PORT:-29500}",
        "srun --kill-on-bad-exit=1 \\",
        f"    torchrun --nproc-per-node {setting.devices_per_node} --nnodes {setting.nodes} \\",
        '    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \\',
        f'    --role rank --tee 3 -m torchtitan.train --module {subject.function} --config {subject.function} "$@"',
    ]
    return _export(subject, lines, f"{subject.function}.sbatch")


def _export(subject: Subject, lines: list[str], file: str) -> Export:
    return Export(text="\n".join(lines) + "\n", file=file, gaps=tuple(_gaps(subject)))


def _gaps(subject: Subject) -> list[Gap]:
    return [gap for gap in gaps_of(subject) if gap.knob != "env"]


def _comment(subject: Subject, notes: list[str]) -> list[str]:
    return commented(subject, tuple(_gaps(subject)), notes, "#")


def _write_module(subject: Subject, folder: str) -> list[str]:
    """Lines that write the config function where every rank imports it."""
    text = module(subject).rstrip("\n")
    end = "END_OF_CONFIG"
    while end in text:
        end += "_"
    return [
        f'CONFIG_DIR="{folder}/{subject.function}"',
        'mkdir -p "$CONFIG_DIR"',
        f"cat > \"$CONFIG_DIR/{subject.function}.py\" <<'{end}'",
        text,
        end,
        'export PYTHONPATH="$CONFIG_DIR${PYTHONPATH:+:$PYTHONPATH}"',
    ]


def _exports(subject: Subject) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in subject.env.items()]


def _facts() -> list[str]:
    """The log begins with the commit, the arguments and the environment that decide what runs."""
    return [
        'echo "commit $(git rev-parse HEAD 2>/dev/null || echo none) arguments $*"',
        "env | grep -E '^(NCCL|TORCH|PYTORCH|CUDA|OMP)_' | sort || true",
    ]

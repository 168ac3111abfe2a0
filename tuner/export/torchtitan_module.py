"""A torchtitan config function for a candidate: the same file that a winner's commit holds."""

from __future__ import annotations

from search_space.errors import UserError
from trial_runner.recipe.config_file import render
from tuner.export.subject import Export
from tuner.export.subject import Gap
from tuner.export.subject import Subject


def export(subject: Subject) -> Export:
    """The module.

    Raises:
        UserError: the job names no torchtitan function, or the batch does not divide.
    """
    text = module(subject)
    return Export(text=text, file=f"{subject.function}.py", gaps=tuple(gaps_of(subject)))


def module(subject: Subject) -> str:
    """Text of the module, function :attr:`Subject.function`.

    Raises:
        UserError: the job names no torchtitan function, or the batch does not divide.
    """
    if subject.base is None:
        raise UserError('export: the job names no torchtitan function; set [model] torchtitan = "module:function"')
    header = [*subject.headline(), *(gap.line() for gap in gaps_of(subject))]
    if subject.base.user_path:
        header.append(f"needs {subject.base.module} on the import path")
    return render(subject.candidate, subject.base, subject.recipe, function=subject.function, header="\n".join(header))


def gaps_of(subject: Subject) -> list[Gap]:
    """Knobs that a config function does not hold."""
    candidate = subject.candidate
    gaps = []
    if candidate.env != "default":
        words = " ".join(f"{key}={value}" for key, value in subject.env.items())
        gaps.append(Gap(knob="env", value=candidate.env, why=f"variables of the process: {words}"))
    if candidate.zero_stage != 3:
        why = "torchtitan shards over data_parallel_shard ranks or replicates"
        gaps.append(Gap(knob="zero_stage", value=candidate.zero_stage, why=why))
    if candidate.accumulate_without_sync and candidate.pipeline_parallel > 1:
        why = "a pipeline reduces once a step by itself"
        gaps.append(Gap(knob="accumulate_without_sync", value=True, why=why))
    if candidate.accumulate_without_sync and candidate.pipeline_parallel == 1 and subject.micro_batches == 1:
        why = "there is one micro-batch"
        gaps.append(Gap(knob="accumulate_without_sync", value=True, why=why))
    return gaps

"""What is exported: one candidate with everything that a launch needs to know beside it."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
import re

from search_space.candidate import Candidate
from search_space.setting import Setting
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.config_file import microbatches
from trial_runner.recipe.config_file import Recipe


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One candidate, its setting and where it comes from."""

    candidate: Candidate
    """The knobs."""

    setting: Setting
    """Model, devices, scale, recipe."""

    source: str
    """The study or job, for the comment at the top."""

    why: str
    """Which candidate of it this is: winner, stated, baseline, fastest predicted."""

    seed: int = 42
    """Seed of weights and data order."""

    base: BaseFunction | None = None
    """The torchtitan function that the candidate changes; None where the job names none."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the candidate's list."""

    @property
    def recipe(self) -> Recipe:
        """Recipe in torchtitan's terms."""
        setting = self.setting
        return Recipe(seq_len=setting.seq_len, global_batch_seqs=setting.global_batch_seqs, precision=setting.precision)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one step.

        Raises:
            UserError: the batch does not divide.
        """
        return microbatches(self.candidate, self.recipe)

    @property
    def function(self) -> str:
        """Name of a config function for it: model, hardware, scale."""
        model = self.base.function if self.base else self.setting.shape.name
        parts = f"{model}_{self.setting.hardware.name}_{self.setting.num_devices}x"
        name = re.sub(r"\W+", "_", parts).strip("_").lower()
        return name if name[0].isalpha() else f"m_{name}"

    def headline(self) -> list[str]:
        """Comment lines that say what this is."""
        setting = self.setting
        return [
            f"{setting.shape.name} on {setting.nodes} nodes of {setting.devices_per_node} {setting.hardware.name}, "
            f"sequence {setting.seq_len}, global batch {setting.global_batch_seqs}",
            f"{self.candidate.label()} ({self.why}, {self.source})",
        ]


BREAKS = r"[\x00-\x1f\x7f\x85\u2028\u2029]+"
"""Characters that end a line, or that no line should hold."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A knob that the target cannot say."""

    knob: str
    """Its name."""

    value: object
    """Its value."""

    why: str
    """What the target does instead."""

    def line(self) -> str:
        """One comment."""
        return f"no counterpart for {self.knob} = {self.value}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Export:
    """One exported text."""

    text: str
    """The file."""

    file: str
    """Name that suits it."""

    gaps: tuple[Gap, ...] = ()
    """What it cannot say."""


def commented(subject: Subject, gaps: tuple[Gap, ...], notes: list[str], mark: str) -> list[str]:
    """The comment at the top of an exported file, each line begun by ``mark``, whatever a name holds."""
    lines = [*subject.headline(), *notes, *(gap.line() for gap in gaps)]
    return [f"{mark} {re.sub(BREAKS, ' ', line)}" for line in lines]

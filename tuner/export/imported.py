"""What an import found: a baseline candidate and a recipe, and the job file that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
import json
from typing import Any

from search_space.candidate import Candidate


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A configuration of another program in our words; None where the file does not say."""

    kind: str
    """``megatron``, ``deepspeed`` or ``torchtitan``."""

    framework: str
    """Whose accounts hold for the candidate."""

    candidate: Candidate
    """The baseline."""

    devices_per_node: int | None = None
    """Devices on one node."""

    nodes: int | None = None
    """Nodes."""

    seq_len: int | None = None
    """Tokens in one sequence."""

    global_batch_seqs: int | None = None
    """Sequences in one step."""

    precision: str | None = None
    """``bf16`` or ``fp32``."""

    seed: int | None = None
    """Seed of weights and data order."""

    model: dict[str, Any] = field(default_factory=dict)
    """Keys of the job's ``[model]``."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that the file sets."""

    ignored: tuple[str, ...] = ()
    """What was found and has no counterpart here."""

    assumed: tuple[str, ...] = ()
    """What had to be assumed."""

    missing: tuple[str, ...] = ()
    """What a job needs and the file does not say."""

    def to_json(self) -> dict[str, Any]:
        """The document of ``tune import``."""
        return {
            "kind": self.kind,
            "framework": self.framework,
            "candidate": self.candidate.to_json(),
            "label": self.candidate.label(),
            "recipe": {
                "seq_len": self.seq_len,
                "global_batch_seqs": self.global_batch_seqs,
                "precision": self.precision,
                "seed": self.seed,
            },
            "cluster": {"gpus_per_node": self.devices_per_node, "nodes": self.nodes},
            "model": self.model,
            "env": self.env,
            "ignored": list(self.ignored),
            "assumed": list(self.assumed),
            "missing": list(self.missing),
            "job": self.job_text(),
        }

    def job_text(self) -> str:
        """A job file with this baseline; what is missing stands there as a comment."""
        lines = [f"# Read from a {self.kind} configuration."]
        lines += [f"# assumed: {text}" for text in self.assumed]
        lines += [f"# to be set: {text}" for text in self.missing]
        lines += ["", "[model]"]
        lines += _lines(self.model) or ['# torchtitan = "llama3:llama3_8b"']
        lines += ["", "[cluster]", '# gpu = "H100-SXM"']
        lines += _lines({"gpus_per_node": self.devices_per_node, "nodes": self.nodes})
        lines += ["", "[recipe]"]
        recipe = {
            "seq_len": self.seq_len,
            "global_batch_seqs": self.global_batch_seqs,
            "precision": self.precision,
            "seed": self.seed,
        }
        lines += _lines(recipe)
        lines += ["", "[search]", f"framework = {json.dumps(self.framework)}", "", "[baseline]"]
        lines += _lines(self.baseline())
        if self.env:
            lines += ["", "[env.imported]", *_lines(self.env)]
        return "\n".join(lines) + "\n"

    def baseline(self) -> dict[str, Any]:
        """Knobs of ``[baseline]``: the degrees always, others where they differ from the defaults."""
        degrees = (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel_replicate",
            "data_parallel_shard",
            "micro_batch",
            "activation_checkpoint",
        )
        knobs = {name: getattr(self.candidate, name) for name in degrees} | self.candidate.changed()
        knobs.pop("env", None)
        return knobs | ({"env": "imported"} if self.env else {})


def _lines(values: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]

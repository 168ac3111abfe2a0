"""A commented job file, made from the fields' own docstrings so that it cannot fall behind them."""

from __future__ import annotations

import json
from typing import Any

from search_space.job import Job
from search_space.job import ModelSection
from search_space.knobs import KNOBS


def render_job(model: str | None, gpu: str | None, devices: int) -> str:
    """TOML text with every key: those that matter here set, the others commented out with their defaults.

    Args:
        model: torchtitan ``module:function``; None for the llama3 debug model with a quick recipe.
        gpu: the driver's name of this machine's GPUs; None when it has none.
        devices: GPUs, or CPU slots, of this machine.
    """
    quick = model is None
    chosen: dict[str, dict[str, Any]] = {
        "model": {"torchtitan": model or "llama3:llama3_debugmodel"},
        "cluster": {"gpus_per_node": devices},
        "recipe": {},
        "measure": {},
    }
    if gpu is None:
        chosen["cluster"]["gpu"] = "cpu"
    if quick:
        chosen["recipe"] = {"seq_len": 128, "global_batch_seqs": 4 * devices, "data": "synthetic"}
        chosen["recipe"]["precision"] = "fp32" if gpu is None else "bf16"
        chosen["measure"] = {"steps": 20, "warmup_steps": 5}
    lines = [
        "# A ledgertune job. Keys that are commented out show their defaults; `tune start FILE --budget B` runs it."
    ]
    for name, section in Job.model_fields.items():
        fields = getattr(section.annotation, "model_fields", None)
        lines += ["", f"[{name}]" if fields or name != "env" else "# [env.NAME]", f"# {section.description}"]
        if name == "model":
            fields = {key: ModelSection.model_fields[key] for key in ("torchtitan", "path", "huggingface")} | {
                key: field for key, field in ModelSection.model_fields.items()
            }
        for key, field in (fields or {}).items():
            if key == "knobs":
                continue
            if key in chosen.get(name, {}):
                lines.append(f"{key} = {_toml(chosen[name][key])}  # {field.description}")
            else:
                lines.append(f"# {key} = {_toml(field.default)}  # {field.description}")
        if name == "search":
            lines += [f"# {knob.name} = [{_example(knob.choices)}]  # {knob.help}" for knob in KNOBS]
        elif name == "baseline":
            lines += ["# tensor_parallel = 1", "# micro_batch = 1"]
        elif name == "env":
            lines += ['# NCCL_MIN_NCHANNELS = "16"']
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if value is None:
        return "…"
    return json.dumps(value)


def _example(choices: tuple[str, ...]) -> str:
    return ", ".join(json.dumps(choice) for choice in choices) or "…"

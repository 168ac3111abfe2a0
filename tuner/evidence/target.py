"""The target of an extrapolation: another scale, model or device, from ``gpus=1024,model=llama3_70b``."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.model_torchtitan import presets
from search_space.setting import Setting


KEYS = {
    "gpus": int,
    "model": str,
    "gpu": str,
    "gpus_per_node": int,
    "seq_len": int,
    "global_batch_tokens": int,
    "global_batch_seqs": int,
}
"""What ``--to`` takes, with types."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the ratios are carried to."""

    setting: Setting
    """Model, devices, scale and recipe."""

    notes: tuple[str, ...]
    """What was assumed because nothing said it."""


def parse_target(text: str) -> dict[str, Any]:
    """``gpus=1024,model=llama3_70b`` as values.

    Raises:
        UserError: a part is no pair, a key is unknown or doubled, a number is none, or nothing is asked.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in KEYS or not value:
            raise UserError(f"--to: found {part!r}, needs pairs such as gpus=1024; keys are {', '.join(KEYS)}")
        if key in values:
            raise UserError(f"--to: {key} is given twice")
        if KEYS[key] is int:
            digits = value.replace("_", "")
            if not digits.isdigit() or not 0 < int(digits) <= 10**12:
                raise UserError(f"--to: {key} = {value!r}, needs a positive whole number")
            values[key] = int(digits)
        else:
            values[key] = value
    if not values:
        raise UserError("--to: name a target, such as gpus=1024,model=llama3_70b")
    if "global_batch_tokens" in values and "global_batch_seqs" in values:
        raise UserError("--to: give global_batch_tokens or global_batch_seqs, not both")
    return values


def find_preset(name: str) -> tuple[str, dict[str, Any]]:
    """A shipped model by ``llama3_70b`` or ``llama3:llama3_70b``.

    Raises:
        UserError: none, or several, are called so.
    """
    known = presets()
    found = [key for key in known if key == name or key.partition(":")[2] == name]
    if len(found) != 1:
        raise UserError(f"model {name!r} is not shipped; known are {', '.join(sorted(known))}")
    return found[0], known[found[0]]


def make_target(start: Setting, values: dict[str, Any]) -> Target:
    """The setting that ``--to`` describes, seen from the small run's.

    The recipe's batch is stated or kept per device: which of the two a recipe means nobody but its owner can know, so
    what was assumed is noted.

    Raises:
        UserError: an unknown model or device, or sizes that do not fit each other.
    """
    notes: list[str] = []
    changes: dict[str, Any] = {}
    if "model" in values:
        function, entry = find_preset(values["model"])
        shape = ModelShape.from_json(entry["shape"])
        if shape != start.shape:
            changes["shape"] = shape
            if "seq_len" not in values and entry["seq_len"] != start.seq_len:
                changes["seq_len"] = int(entry["seq_len"])
                notes.append(f"sequence length {entry['seq_len']} as {function} says; seq_len=… changes it")
    if "seq_len" in values:
        changes["seq_len"] = values["seq_len"]
    if "gpu" in values:
        hardware = find_hardware(values["gpu"])
        if hardware.name != start.hardware.name:
            changes["hardware"] = hardware
            if start.precision not in hardware.peak_flops:
                changes["precision"] = "bf16"
                notes.append(f"precision bf16: {hardware.name} has no peak for {start.precision}")
    gpus = values.get("gpus", start.num_devices)
    moved = "hardware" in changes
    wanted = values.get("gpus_per_node", 8 if moved or start.on_cpu else start.devices_per_node)
    per_node = min(wanted, gpus)
    if "gpus_per_node" not in values and gpus > start.num_devices and start.nodes == 1 and not start.on_cpu:
        per_node = min(max(per_node, 8), gpus)
    if gpus % per_node:
        raise UserError(f"--to: {gpus} devices are no whole number of nodes of {per_node}; give gpus_per_node=…")
    changes |= {"devices_per_node": per_node, "nodes": gpus // per_node}
    seq_len = changes.get("seq_len", start.seq_len)
    if "global_batch_seqs" in values:
        changes["global_batch_seqs"] = values["global_batch_seqs"]
    elif "global_batch_tokens" in values:
        sequences, rest = divmod(values["global_batch_tokens"], seq_len)
        if rest or not sequences:
            raise UserError(
                f"--to: global_batch_tokens {values['global_batch_tokens']} is no multiple of the sequence length "
                f"{seq_len}"
            )
        changes["global_batch_seqs"] = sequences
    elif gpus != start.num_devices:
        each = start.global_batch_seqs / start.num_devices
        changes["global_batch_seqs"] = max(1, round(each * gpus))
        notes.append(
            f"global batch {changes['global_batch_seqs']} sequences: kept at {each:g} a device; the recipe's own "
            "is set "
            "with global_batch_tokens=… or global_batch_seqs=…"
        )
    return Target(setting=replace(start, **changes), notes=tuple(notes))

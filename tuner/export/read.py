"""Reading any of the three kinds of configuration, by what the file is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from search_space.errors import UserError
from search_space.model import ModelShape
from tuner.evidence.target import find_preset
from tuner.export import read_deepspeed
from tuner.export import read_megatron
from tuner.export import read_torchtitan
from tuner.export.imported import Imported


LARGEST = 4_000_000
"""Bytes of a configuration file, at most."""


def read_file(
    path: Path,
    devices: int | None,
    function: str | None = None,
    user_path: str | None = None,
    framework: str | None = None,
    model: str | None = None,
) -> Imported:
    """Read a file.

    Args:
        path: the file.
        devices: devices of the job, where the file does not say.
        function: config function of a torchtitan module.
        user_path: folder of modules that a torchtitan module imports.
        framework: whose knobs the candidate is to be in; None for the file's own.
        model: name of a shipped model, where the file names none.

    Raises:
        UserError: there is no such file, or it is none of the three kinds.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"import {path}: {path.stat().st_size} bytes, no configuration is that long")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"import {path}: cannot be read as text ({error})") from None
    if path.suffix == ".py":
        if model is not None:
            raise UserError("import: a torchtitan module names its model; leave --model out")
        if framework not in (None, "torchtitan"):
            raise UserError(
                f"import: a torchtitan module is in torchtitan's knobs, --framework {framework} is not possible"
            )
        return read_torchtitan.read(path, function, devices, user_path)
    if function is not None or user_path is not None:
        raise UserError("import: --function and --path belong to a torchtitan module (.py)")
    known = find_preset(model) if model else None
    shape = ModelShape.from_json(known[1]["shape"]) if known else None
    found = _other(path, text, devices, framework, shape)
    if known is None:
        return found
    missing = tuple(line for line in found.missing if not line.startswith("[model]"))
    return replace(found, model={"torchtitan": known[0]}, missing=missing)


def _other(path: Path, text: str, devices: int | None, framework: str | None, shape: ModelShape | None) -> Imported:
    if path.suffix in (".json", ".hjson") or read_deepspeed.COMMENT.sub("", text).lstrip().startswith("{"):
        return read_deepspeed.read(text, devices, framework or "deepspeed", shape)
    return read_megatron.read(text, devices, framework or "megatron")

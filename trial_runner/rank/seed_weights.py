"""Initial weights that do not depend on the layout: saved sharded by one run, loaded by runs of any other layout.

torchtitan's initial weights differ by layout under the same seed, so loss curves of two layouts compare only when both
start from the same saved weights. Its own seed checkpoint is made by a single process that holds the whole model; here
the ranks of the first run save what they hold, which works at any size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions


METADATA = ".metadata"
"""File that torch's distributed checkpoint writes last: with it the weights are whole."""


def exist(folder: str | Path) -> bool:
    """Whether ``folder`` holds whole weights."""
    return (Path(folder) / METADATA).exists()


def save(model_parts: list[Any], folder: str) -> None:
    """Save the weights of this rank's model parts; every rank of the run must call it."""
    dcp.save({"model": _state(model_parts)}, checkpoint_id=folder)


def load(model_parts: list[Any], folder: str) -> None:
    """Replace the weights of this rank's model parts by saved ones, whatever layout they were saved in."""
    state = _state(model_parts)
    dcp.load({"model": state}, checkpoint_id=folder)
    for part in model_parts:
        own = get_model_state_dict(part)
        set_model_state_dict(part, {name: state[name] for name in own}, options=StateDictOptions(strict=True))


def _state(model_parts: list[Any]) -> dict[str, Any]:
    """Names, as of the plain model, to (sharded) tensors of all parts."""
    state: dict[str, Any] = {}
    for part in model_parts:
        state |= get_model_state_dict(part)
    return state

"""Initial weights that do not depend on the layout: saved sharded by one run, loaded by runs of any other layout.

torchtitan's initial weights differ by layout under the same seed, so loss curves of two layouts compare only when both
start from the same saved weights. Its own seed checkpoint is made by a single process that holds the whole model; here
the ranks of the first run save what they hold, which works at any size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import ModelWrapper


METADATA = ".metadata"
"""File that torch's distributed checkpoint writes last: with it the weights are whole."""


def exist(folder: str | Path) -> bool:
    """Whether ``folder`` holds whole weights."""
    return (Path(folder) / METADATA).exists()


def save(model_parts: list[Any], folder: str) -> None:
    """Save the weights of this rank's model parts; every rank of the run must call it."""
    dcp.save({"model": ModelWrapper(model_parts).state_dict()}, checkpoint_id=folder)


def load(model_parts: list[Any], folder: str) -> None:
    """Replace the weights of this rank's model parts by saved ones, whatever layout they were saved in."""
    model = ModelWrapper(model_parts)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)

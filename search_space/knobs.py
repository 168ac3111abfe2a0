"""The table of knobs: names, short forms, types, and how a user's text becomes a value."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields
from typing import Any

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import Candidate
from search_space.candidate import RESHARD
from search_space.candidate import SCHEDULES
from search_space.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One thing that may be tuned."""

    name: str
    """Field of :class:`Candidate`."""

    short: str
    """Short form accepted on the command line."""

    kind: type
    """Type of the value."""

    choices: tuple[str, ...] = ()
    """Allowed texts; empty for numbers and switches."""

    numeric_change: bool = False
    """Whether the knob changes the numbers the model computes (such a candidate needs loss parity)."""

    help: str = ""
    """One line for a person."""


KNOBS = (
    Knob(name="tensor_parallel", short="tp", kind=int, help="ranks sharing each matrix product"),
    Knob(name="pipeline_parallel", short="pp", kind=int, help="pipeline ranks"),
    Knob(name="schedule", short="schedule", kind=str, choices=SCHEDULES, help="pipeline schedule"),
    Knob(name="virtual_stages", short="vp", kind=int, help="stages per pipeline rank"),
    Knob(name="context_parallel", short="cp", kind=int, help="ranks sharing one sequence"),
    Knob(name="expert_parallel", short="ep", kind=int, help="ranks sharing the experts"),
    Knob(name="data_parallel_replicate", short="dpr", kind=int, help="replicas of the sharded model"),
    Knob(name="data_parallel_shard", short="dps", kind=int, help="ranks the state is sharded over"),
    Knob(name="reshard_after_forward", short="reshard", kind=str, choices=RESHARD, help="free gathered parameters"),
    Knob(name="micro_batch", short="b", kind=int, help="sequences per forward pass"),
    Knob(name="activation_checkpoint", short="ac", kind=str, choices=ACTIVATION_CHECKPOINT, help="recompute policy"),
    Knob(name="memory_budget", short="ac_budget", kind=float, help="share of activations kept"),
    Knob(name="first_n", short="first_n", kind=int, help="checkpointed blocks per stage"),
    Knob(name="compile", short="compile", kind=bool, help="torch.compile"),
    Knob(name="async_tp", short="async_tp", kind=bool, help="overlap tensor-parallel collectives"),
    Knob(name="float8", short="float8", kind=bool, numeric_change=True, help="float8 linear layers"),
    Knob(name="fsdp_bucket", short="bucket", kind=int, help="blocks per FSDP group"),
    Knob(name="accumulate_without_sync", short="nosync", kind=bool, help="reduce gradients once per step"),
    Knob(name="forward_prefetch", short="prefetch", kind=int, help="FSDP groups gathered ahead"),
    Knob(name="symm_mem", short="symm_mem", kind=bool, help="FSDP collectives on symmetric memory"),
    Knob(name="loss_chunks", short="loss_chunks", kind=int, help="pieces of the loss"),
    Knob(name="zero_stage", short="zero", kind=int, help="ZeRO stage (other frameworks)"),
    Knob(name="env", short="env", kind=str, help="named environment list"),
)
"""Every knob, in the order of :class:`Candidate`."""

BY_NAME = {knob.name: knob for knob in KNOBS} | {knob.short: knob for knob in KNOBS}
"""Knobs under both their names."""

BY_NAME["v"] = BY_NAME["virtual_stages"]

assert {knob.name for knob in KNOBS} == {field.name for field in fields(Candidate)}

_TRUE = {"1", "true", "on", "yes"}
_FALSE = {"0", "false", "off", "no"}


def knob_value(knob: Knob, value: Any) -> Any:
    """``value`` (a text, or a TOML value) as the knob's type.

    Raises:
        UserError: the value is not one that the knob can take.
    """
    text = str(value).strip()
    try:
        if knob.kind is bool:
            if text.lower() in _TRUE:
                return True
            if text.lower() in _FALSE:
                return False
            raise ValueError
        if isinstance(value, bool):
            raise ValueError
        converted = knob.kind(text)
    except ValueError:
        wanted = {bool: "on or off", int: "a whole number", float: "a number", str: "a text"}[knob.kind]
        raise UserError(f"knob {knob.name}: found {text!r}, needs {wanted}") from None
    if knob.choices and converted not in knob.choices:
        for choice in knob.choices:
            if choice.lower() == text.lower():
                return choice
        raise UserError(f"knob {knob.name}: found {text!r}, allowed are {', '.join(knob.choices)}")
    if knob.kind is int and converted < (0 if knob.name in ("first_n", "forward_prefetch", "zero_stage") else 1):
        raise UserError(f"knob {knob.name}: found {converted}, needs a positive number")
    if knob.kind is int and converted > 1_000_000:
        raise UserError(f"knob {knob.name}: found {converted}, needs at most 1,000,000")
    if knob.name == "memory_budget" and not 0 <= converted <= 1:
        raise UserError(f"knob {knob.name}: found {converted:g}, needs a share from 0 to 1")
    return converted


def find_knob(name: str) -> Knob:
    """The knob called ``name`` in its long or short form.

    Raises:
        UserError: there is no such knob; the message lists those there are.
    """
    knob = BY_NAME.get(name.strip())
    if knob is None:
        known = ", ".join(f"{k.short} ({k.name})" if k.short != k.name else k.name for k in KNOBS)
        raise UserError(f"unknown knob {name.strip()!r}; known are: {known}")
    return knob


def parse_assignment(text: str) -> dict[str, Any]:
    """Knob values from ``tp=8,pp=4,dp=32,b=1`` (``dp`` is kept under that name).

    Raises:
        UserError: a part is no ``knob=value`` pair, a knob is unknown or named twice, a value does not fit.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"candidate: found {part!r}, needs knob=value pairs such as tp=8,pp=4,b=1")
        if name.strip() == "dp":
            knob = BY_NAME["data_parallel_shard"]
            key = "dp"
        else:
            knob = find_knob(name)
            key = knob.name
        if key in values:
            raise UserError(f"candidate: {key} is given twice")
        values[key] = knob_value(knob, value)
    return values

"""What an account is: the habits of one framework version that change memory and traffic."""

from __future__ import annotations

from dataclasses import dataclass

from search_space.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Account:
    """How one framework version treats state, activations and collectives."""

    name: str
    """Name of the account."""

    version: str
    """Framework version that it was read from."""

    sharded: bool
    """Whether the data-parallel shard degree shards all state (FSDP2); else the ZeRO stage says what is sharded."""

    parameter_bytes: float = 4.0
    """Bytes per parameter of the stored parameters."""

    gradient_bytes: float = 4.0
    """Bytes per parameter of the accumulated gradients."""

    optimizer_bytes: float = 8.0
    """Bytes per parameter of the optimizer, master copy included where it is apart."""

    reduce_bytes: float = 4.0
    """Bytes per gradient element on the wire."""

    gathers_inputs: bool = True
    """Whether inputs of column-parallel products are kept gathered over the tensor-parallel ranks."""

    overlaps_gradients: bool = True
    """Whether gradient reduction overlaps the last backward pass."""

    source: str = ""
    """Where the figures come from."""


TORCHTITAN = Account(
    name="torchtitan",
    version="0.3.0",
    sharded=True,
    source="torchtitan 0.3.0 distributed/fsdp.py and torch 2.14 fully_shard: fp32 shards, bf16 compute, fp32 reduce",
)
MEGATRON = Account(
    name="megatron",
    version="core 0.16",
    sharded=False,
    parameter_bytes=2.0,
    gradient_bytes=4.0,
    optimizer_bytes=12.0,
    gathers_inputs=False,
    source="Megatron-LM distributed optimizer: bf16 parameters, fp32 gradient buffer, fp32 master and Adam moments",
)
ACCOUNTS = {"torchtitan": TORCHTITAN, "megatron": MEGATRON, "deepspeed": MEGATRON}
"""Accounts by framework name."""


def find_account(name: str) -> Account:
    """The account called ``name``.

    Raises:
        UserError: there is no such account.
    """
    if name not in ACCOUNTS:
        raise UserError(f"unknown account {name!r}; known are {', '.join(ACCOUNTS)}")
    return ACCOUNTS[name]

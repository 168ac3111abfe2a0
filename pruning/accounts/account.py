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

    step_bytes: float = 0.0
    """Bytes per local parameter that the optimizer's step holds for a moment."""

    reduce_bytes: float = 4.0
    """Bytes per gradient element on the wire."""

    sequence_parallel: bool = True
    """Whether norms and residuals are split over the tensor-parallel ranks by tokens."""

    expert_imbalance: float = 1.5
    """Tokens of the fullest expert-parallel rank over the mean, early in a dropless run (DeepEP#99)."""

    attention: str = "fused"
    """``fused`` (flash or flex), ``fused_softmax`` or ``unfused`` (both keep score matrices)."""

    attention_speed: float = 1.0
    """Speed of the fused attention kernel over that of its second generation."""

    product_speed: float = 1.0
    """Speed of matrix products over that of the stated precision (4-bit formats)."""

    fused_norm: bool = True
    """Whether norms keep their input only, not fp32 internals."""

    fused_activation: bool = False
    """Whether SiLU and the product are one kernel that keeps gate and up only."""

    selective_by_operator: bool = True
    """Whether selective checkpointing is torchtitan's list of operators; else Megatron's core attention."""

    copies_attention_output: bool = False
    """Whether attention output is kept twice, as computed and in the layout of the output product."""

    keeps_boundaries: bool = False
    """Whether pipeline receives have a buffer for every micro-batch of the step, and looped and V schedules hold what
    they send until the step ends (torch.distributed.pipelining 2.14)."""

    parallel_logits: bool = True
    """Whether logits stay split over the tensor-parallel ranks by vocabulary; else every rank holds all of them."""

    logit_bytes: float = 12.0
    """Bytes per logit that live at once."""

    gathers_inputs: bool = True
    """Whether inputs of column-parallel products are kept gathered over the tensor-parallel ranks."""

    token_extra: float = 0.0
    """Sequence-sharded copies, in hidden widths per token, that a block keeps more."""

    parallel_extra: float = 0.0
    """Sequence-sharded copies, in hidden widths per token, that a block keeps more with tensor parallelism."""

    gathered_extra: float = 0.0
    """Gathered copies, in hidden widths per token, that a block keeps more with tensor parallelism."""

    balances_head: bool = False
    """Whether pipeline stages are cut by cost, the head counted, instead of by blocks."""

    regathers_inputs: bool = False
    """Whether the backward pass gathers the inputs of column-parallel products again (hidden behind products)."""

    kernels_per_block: float = 26.0
    """Kernels that one eager block launches forward."""

    overlaps_gathers: bool = True
    """Whether gathering updated parameters overlaps the next forward pass (optimizer sharded, parameters not)."""

    source: str = ""
    """Where the figures come from."""

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter of parameters, gradients and optimizer together, before any sharding."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


FOREACH_STEP_BYTES = 4.0
"""Temporary of a foreach Adam step, bytes per stored parameter: half of its two moments (verl#5364); fused has none."""

TORCHTITAN = Account(
    name="torchtitan",
    version="0.3.0",
    sharded=True,
    keeps_boundaries=True,
    logit_bytes=14.0,
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
    fused_activation=True,
    selective_by_operator=False,
    logit_bytes=10.0,
    source="Megatron-LM distributed optimizer: bf16 parameters, fp32 gradient buffer, fp32 master and Adam moments",
)
NANOTRON = Account(
    name="nanotron",
    version="0.5",
    sharded=False,
    parameter_bytes=2.0,
    gradient_bytes=6.0,
    optimizer_bytes=12.0,
    step_bytes=2.0,
    gathers_inputs=False,
    selective_by_operator=False,
    logit_bytes=8.0,
    token_extra=2.0,
    parallel_extra=3.0,
    balances_head=True,
    overlaps_gathers=False,
    source="nanotron 0.5: bf16 parameters and gradients, fp32 accumulated gradients, fp32 master and Adam moments",
)
FSDP1 = Account(
    name="fsdp1",
    version="torch 2.1",
    sharded=True,
    source="FullyShardedDataParallel of torch 2.0-2.1 as llm-foundry uses it: fp32 shards, bf16 compute and reduce",
    reduce_bytes=2.0,
    selective_by_operator=False,
    logit_bytes=4.0,
)
ACCOUNTS = {
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "deepspeed": MEGATRON,
    "nanotron": NANOTRON,
    "fsdp1": FSDP1,
}
"""Accounts by framework name."""


def find_account(name: str) -> Account:
    """The account called ``name``.

    Raises:
        UserError: there is no such account.
    """
    if name not in ACCOUNTS:
        raise UserError(f"unknown account {name!r}; known are {', '.join(ACCOUNTS)}")
    return ACCOUNTS[name]

"""Model shapes: the numbers that decide parameters, FLOP and activations."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer as numbers.

    Dense models leave the ``expert`` fields at zero.
    """

    name: str = "model"
    """Name for reports, e.g. ``llama3_70b``."""

    layers: int
    """Transformer blocks."""

    hidden: int
    """Width of the residual stream, elements."""

    heads: int
    """Query heads."""

    kv_heads: int
    """Key/value heads (grouped-query attention when fewer than ``heads``)."""

    head_dim: int = 0
    """Elements per head; 0 means hidden / heads."""

    ffn: int
    """Width of the feed-forward layer, elements."""

    vocab: int
    """Rows of the embedding table."""

    gated_mlp: bool = True
    """Three feed-forward matrices (gate, up, down) instead of two."""

    tied_embeddings: bool = False
    """Input embedding and output head share one matrix."""

    qk_norm: bool = False
    """RMSNorm over each query and key head (Qwen3)."""

    attention_bias: bool = False
    """Biases on the query, key and value products."""

    output_bias: bool = False
    """Bias on the attention output product."""

    mlp_bias: bool = False
    """Biases on the feed-forward products."""

    norm_bias: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""

    experts: int = 0
    """Routed experts per mixture-of-experts layer; 0 means dense."""

    experts_active: int = 0
    """Routed experts that each token uses."""

    expert_ffn: int = 0
    """Width of one expert, elements."""

    shared_experts: int = 0
    """Experts that every token uses, each ``expert_ffn`` wide."""

    dense_layers: int = 0
    """Leading layers of a mixture-of-experts model that are dense."""

    position_embeddings: int = 0
    """Rows of a learned table of positions; 0: none (rotary)."""

    router_bias: bool = False
    """Bias on the product that scores the experts (GPT-OSS)."""

    attention_sinks: bool = False
    """One learned logit per query head (GPT-OSS)."""

    sliding_window: int = 0
    """Tokens that a windowed layer looks back on; 0: no layer is windowed."""

    window_layers: int = 0
    """Layers with a sliding window."""

    q_lora_rank: int = 0
    """Rank of the compressed query of multi-head latent attention; 0: not compressed."""

    kv_lora_rank: int = 0
    """Rank of the compressed keys and values; above 0 the attention is multi-head latent (DeepSeek)."""

    qk_nope_head_dim: int = 0
    """Elements of a latent query or key head without position."""

    qk_rope_head_dim: int = 0
    """Elements of a latent query or key head with rotary position (one key head shared by all)."""

    v_head_dim: int = 0
    """Elements of a latent value head."""

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def is_moe(self) -> bool:
        """Whether some layers have routed experts."""
        return self.experts > 0

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def query_width(self) -> int:
        """Elements of all query heads together."""
        per_head = self.qk_nope_head_dim + self.qk_rope_head_dim if self.is_latent else self.head_dim
        return self.heads * per_head

    @property
    def value_width(self) -> int:
        """Elements of all attention outputs together: query heads × value elements."""
        return self.heads * (self.v_head_dim if self.is_latent else self.head_dim)

    @property
    def kept_kv_width(self) -> int:
        """Elements of keys and values together as the attention kernel sees them."""
        return self.query_width + self.value_width if self.is_latent else 2 * self.kv_heads * self.head_dim

    @property
    def score_width(self) -> float:
        """Mean of query and value width: 4 × width × context FLOP per token and layer make both score products."""
        return (self.query_width + self.value_width) / 2

    @property
    def moe_share(self) -> float:
        """Share of blocks that are mixtures of experts."""
        return (self.layers - self.dense_layers) / self.layers if self.is_moe else 0.0

    @property
    def feed_forward_width(self) -> float:
        """Feed-forward elements that one token passes through in an average block."""
        active = (self.experts_active + self.shared_experts) * self.expert_ffn
        return (1 - self.moe_share) * self.ffn + self.moe_share * active

    def context(self, seq_len: int) -> float:
        """Mean over layers of the tokens that a query may see at most, windows included."""
        if not self.sliding_window:
            return float(seq_len)
        windowed = self.window_layers * min(seq_len, self.sliding_window)
        return (windowed + (self.layers - self.window_layers) * seq_len) / self.layers

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelShape:
        """The inverse of :meth:`to_json`; unknown keys are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})

    @property
    def attention_params(self) -> int:
        """Parameters of one attention layer, norms excluded."""
        if self.is_latent:
            return self._latent_params
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (query + 2 * kv) + query * self.hidden
        biases = (query + 2 * kv) * self.attention_bias + self.hidden * self.output_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm + self.heads * self.attention_sinks

    @property
    def _latent_params(self) -> int:
        query = (
            self.hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * self.query_width
            if self.q_lora_rank
            else self.hidden * self.query_width
        )
        down = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + self.value_width * self.hidden

    def mlp_params(self, width: int) -> int:
        """Parameters of one feed-forward layer of ``width`` elements."""
        matrices = 3 if self.gated_mlp else 2
        biases = ((matrices - 1) * width + self.hidden) * self.mlp_bias
        return matrices * self.hidden * width + biases

    @property
    def norm_params(self) -> int:
        """Parameters of one normalisation layer."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def dense_layer_params(self) -> int:
        """Parameters of one dense block."""
        return self.attention_params + self.mlp_params(self.ffn) + 2 * self.norm_params

    @property
    def moe_layer_params(self) -> int:
        """Parameters of one mixture-of-experts block, every expert counted."""
        return (
            self.attention_params
            + (self.experts + self.shared_experts) * self.mlp_params(self.expert_ffn)
            + self.hidden * self.experts
            + self.experts * self.router_bias
            + 2 * self.norm_params
        )

    @property
    def embedding_params(self) -> int:
        """Parameters of the input embedding, learned positions included."""
        return (self.vocab + self.position_embeddings) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters of the output head; 0 when it shares the embedding."""
        return 0 if self.tied_embeddings else self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """All parameters."""
        dense = self.dense_layers if self.is_moe else self.layers
        return (
            dense * self.dense_layer_params
            + (self.layers - dense) * (self.moe_layer_params if self.is_moe else 0)
            + self.embedding_params
            + self.head_params
            + self.norm_params
        )

    @property
    def num_active_params(self) -> int:
        """Parameters that one token passes through (routed experts that stay idle are left out)."""
        if not self.is_moe:
            return self.num_params
        idle = (self.experts - self.experts_active) * self.mlp_params(self.expert_ffn)
        return self.num_params - (self.layers - self.dense_layers) * idle

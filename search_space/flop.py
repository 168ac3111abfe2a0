"""Model FLOP by the PaLM convention: what MFU divides by."""

from __future__ import annotations

from search_space.model import ModelShape


def flop_per_token(shape: ModelShape, seq_len: int) -> float:
    """FLOP that one token of training needs, recompute not counted.

    6 × (active parameters − input embedding) + 12 × layers × (heads × head_dim) × seq_len
    (PaLM, appendix B; the attention term counts the full, not the causal, score matrix; a windowed layer counts its
    window, latent attention the mean of its query and value width). A tied embedding
    still multiplies once as the output head, so it stays in the count.

    Args:
        shape: the model.
        seq_len: tokens in one sequence.
    """
    embedding = 0 if shape.tied_embeddings else shape.embedding_params
    attention = 12 * shape.layers * shape.score_width * shape.context(seq_len)
    return 6.0 * (shape.num_active_params - embedding) + attention


def flop_per_step(shape: ModelShape, seq_len: int, tokens: float) -> float:
    """FLOP of one optimizer step over ``tokens`` tokens."""
    return flop_per_token(shape, seq_len) * tokens


def recompute_flop_per_token(shape: ModelShape, seq_len: int) -> float:
    """FLOP of one more forward pass of the blocks per token: what full activation checkpointing adds."""
    outside = shape.embedding_params + shape.head_params
    blocks = shape.num_active_params - outside
    return 2.0 * blocks + 4 * shape.layers * shape.score_width * shape.context(seq_len)


def logits_bytes(shape: ModelShape, tokens: float, element_bytes: float) -> float:
    """Bytes of the logits of ``tokens`` tokens, whole vocabulary: tokens × vocab × bytes per element."""
    return tokens * shape.vocab * element_bytes

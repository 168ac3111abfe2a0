"""Which values an axis may take, for messages that list them."""

from __future__ import annotations

from search_space.setting import Setting


def legal_tensor_parallel(setting: Setting) -> list[int]:
    """Tensor-parallel degrees that divide query heads, key/value heads, feed-forward width and vocabulary.

    Degrees beyond the fast domain are legal too; see :func:`crosses_domain`.
    """
    shape = setting.shape
    whole = [shape.heads, shape.kv_heads, *(side for side in (shape.ffn, shape.expert_ffn) if side), shape.vocab]
    return [t for t in range(1, min(setting.num_devices, shape.kv_heads) + 1) if all(side % t == 0 for side in whole)]


def legal_by_heads(heads: int) -> list[int]:
    """Degrees that divide the query heads alone."""
    return [t for t in range(1, heads + 1) if heads % t == 0]


def crosses_domain(setting: Setting, tensor_parallel: int) -> bool:
    """Whether a tensor-parallel group leaves the fast domain: a cost, not an error."""
    return tensor_parallel > setting.fast_domain

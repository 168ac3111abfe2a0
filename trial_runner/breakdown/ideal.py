"""The ideal time of each rank from its own FLOP: pipeline stages differ, the other parallelisms split evenly."""

from __future__ import annotations

from search_space.candidate import Candidate
from search_space.flop import flop_per_step
from search_space.setting import Setting
from search_space.stages import layers_by_rank
from search_space.stages import stage_ranks


def ideal_by_rank(setting: Setting, candidate: Candidate) -> dict[int, float]:
    """Model FLOP of each rank / nominal peak, seconds, by global rank.

    The blocks' FLOP go with the layers that a pipeline rank holds, the output head's 6·vocab·hidden per token to the
    rank of the last stage; the embedding is a lookup. The mean over all ranks is the setting's ideal time.

    Args:
        setting: model, hardware, scale and recipe.
        candidate: the layout; ranks are laid out as torchtitan does, the pipeline outermost.
    """
    shape, pp = setting.shape, candidate.pipeline_parallel
    whole = flop_per_step(shape, setting.seq_len, setting.tokens_per_step)
    head = 6.0 * shape.vocab * shape.hidden * setting.tokens_per_step
    layers = layers_by_rank(shape.layers, candidate.schedule, pp, candidate.virtual_stages)
    last = stage_ranks(candidate.schedule, pp, candidate.virtual_stages)[-1]
    per_stage = setting.num_devices // pp
    peak = setting.hardware.peak(setting.precision)
    ideal = {}
    for rank in range(per_stage * pp):
        stage = rank // per_stage
        flop = (whole - head) * float(layers[stage]) / shape.layers + (head if stage == last else 0.0)
        ideal[rank] = flop / per_stage / peak
    return ideal

"""Samplers: which candidate of the pool to measure next."""

from search_space.sampler.pool_sampler import candidate_params
from search_space.sampler.pool_sampler import PoolSampler
from search_space.sampler.prior import Carried
from search_space.sampler.prior import Prior
from search_space.sampler.strategies import STRATEGIES


__all__ = ["Carried", "PoolSampler", "Prior", "STRATEGIES", "candidate_params"]

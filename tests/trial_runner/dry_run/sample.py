"""A stratified sample of candidates for the two-way validity test: legal ones, and for every rule some that break
only that rule."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
import random

from search_space.candidate import Candidate
from search_space.candidate import LOOPED_SCHEDULES
from search_space.candidate import SCHEDULES
from search_space.hardware import find_hardware
from search_space.pool import canonical
from search_space.pool import Pool
from search_space.rules import judge
from search_space.rules import RULES
from search_space.setting import Setting
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import describe


MODELS = ("llama3:llama3_debugmodel", "qwen3:qwen3_debugmodel")
SEQ_LENS = (64, 96)


@dataclass(frozen=True)
class Sampled:
    """One candidate in its setting."""

    stratum: str
    """``legal``, or the code of the one rule that it breaks."""

    base: BaseFunction
    """The model."""

    setting: Setting
    """Cluster and recipe; GPUs, so that what the CPU cannot do is no rule here."""

    candidate: Candidate
    """The knobs."""

    def label(self) -> str:
        """For messages."""
        batch = self.setting.global_batch_seqs
        return f"{self.base.function}: {self.candidate.label()}, batch {batch} × {self.setting.seq_len}"


def draw(rng: random.Random, base: BaseFunction) -> tuple[Candidate, Setting]:
    """A random candidate, legal or not, in a setting that has its devices."""
    pipeline = rng.choice((1, 1, 1, 2, 2, 3, 4))
    schedule = rng.choice(SCHEDULES) if pipeline > 1 else "1F1B"
    looped = schedule in LOOPED_SCHEDULES
    candidate = Candidate(
        tensor_parallel=rng.choice((1, 1, 2, 2, 4, 3, 5, 6, 8, 16, 32, 64)),
        pipeline_parallel=pipeline,
        schedule=schedule,
        virtual_stages=rng.choice((1, 2, 2, 3) if looped else (1, 1, 2, 2, 3)) if pipeline > 1 else 1,
        data_parallel_replicate=rng.choice((1, 1, 1, 2)),
        data_parallel_shard=rng.choice((1, 2, 2, 4)),
        reshard_after_forward=rng.choice(("default", "always", "never")),
        micro_batch=rng.choice((1, 1, 2)),
        activation_checkpoint=rng.choice(("none", "selective", "full", "memory_budget")),
        memory_budget=0.5,
    )
    micro_batches = rng.choice((1, 2, 3, 4, 5, 6, 8))
    setting = Setting(
        shape=base.shape,
        hardware=find_hardware("H100-SXM"),
        devices_per_node=candidate.num_devices,
        nodes=1,
        seq_len=rng.choice(SEQ_LENS),
        global_batch_seqs=micro_batches * candidate.micro_batch * candidate.data_parallel,
    )
    return canonical(candidate), setting


def broken(candidate: Candidate, setting: Setting) -> list[str]:
    """Codes of the rules that a candidate breaks."""
    pool = Pool.from_candidates([candidate])
    return [reason.code for reason in judge(pool, setting, RULES).reasons(pool, setting, 0)]


def sample(legal: int, per_rule: int, seed: int = 0, draws: int = 6_000) -> list[Sampled]:
    """``legal`` candidates that break no rule, and up to ``per_rule`` of every rule that break only that one."""
    rng = random.Random(seed)
    bases = [describe(model) for model in MODELS]
    wanted: dict[str, int] = {"legal": legal}
    found: dict[str, list[Sampled]] = {}
    seen: set[tuple[str, str, int, int]] = set()
    for _ in range(draws):
        base = rng.choice(bases)
        candidate, setting = draw(rng, base)
        codes = broken(candidate, setting)
        if len(codes) > 1:
            continue
        stratum = codes[0] if codes else "legal"
        mine = found.setdefault(stratum, [])
        key = (base.function, candidate.key(), setting.seq_len, setting.global_batch_seqs)
        if len(mine) >= wanted.get(stratum, per_rule) or key in seen:
            continue
        seen.add(key)
        mine.append(Sampled(stratum, base, replace(setting), candidate))
    return [one for stratum in sorted(found) for one in found[stratum]]

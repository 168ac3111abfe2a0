"""A deterministic token source: global sample ``i`` is the same tokens in every layout, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer


def sample_tokens(seed: int, index: int, seq_len: int, vocab: int) -> np.ndarray:
    """Tokens of global sample ``index``, shape (seq_len + 1,), int64.

    Ids follow a Zipf-like law and repeat with a period of their own, so a model has something to learn.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, index]))
    period = int(generator.integers(8, 33))
    motif = (vocab ** generator.random(period)).astype(np.int64) - 1
    repeated = np.resize(motif, seq_len + 1)
    noise = generator.random(seq_len + 1) < 0.1
    repeated[noise] = generator.integers(0, vocab, int(noise.sum()))
    return np.clip(repeated, 0, vocab - 1)


class TokenSource(BaseDataLoader):
    """Batches of :func:`sample_tokens`.

    Batch ``k`` of data-parallel rank ``r`` out of ``d`` holds the global samples ``k·b·d + r·b … + b``, so the
    samples of an optimizer step are the same set whatever the layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What the source needs to know."""

        vocab_size: int = 2048
        """Token ids are below this number."""

        seed: int = 42
        """Seed of the data."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        self._config = config
        self._replicas, self._replica = dp_world_size, dp_rank
        self._seq_len, self._batch = seq_len, local_batch_size
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self._seq_len).repeat(self._batch, 1)
        while True:
            first = (self._next * self._replicas + self._replica) * self._batch
            self._next += 1
            rows = [
                sample_tokens(self._config.seed, first + i, self._seq_len, self._config.vocab_size)
                for i in range(self._batch)
            ]
            tokens = torch.from_numpy(np.stack(rows))
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The number of batches handed out."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved number of batches."""
        self._next = state_dict["next"]


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan wants a tokenizer; the token source needs none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Refuse: there is no text here."""
        raise RuntimeError("the synthetic token source has no tokenizer")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Refuse: there is no text here."""
        raise RuntimeError("the synthetic token source has no tokenizer")

    def get_vocab_size(self) -> int:
        """No vocabulary of its own."""
        return 0


def use_synthetic_tokens(config: Any, seed: int) -> Any:
    """Give a torchtitan config the token source; returns the same object."""
    config.dataloader = TokenSource.Config(vocab_size=config.model_spec.model.vocab_size, seed=seed)
    config.tokenizer = NoTokenizer.Config()
    return config

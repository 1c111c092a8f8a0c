"""A model whose next token can be computed by hand, behind the interface of `PagedModel`.

Its cache holds, where the real one holds keys and values, a number that depends on a token and all tokens
before it; its logits are a pure function of the numbers that it finds there. So a block that was freed too
early, shared wrongly or filled with rejected drafts changes the answer.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.runtimes.cpu.engine.paged_model import TokenSlice

VOCAB = 12
Floats = npt.NDArray[np.float32]


def next_logits(tokens: list[int]) -> Floats:
    """Logits [VOCAB] after `tokens`."""
    states: list[int] = []
    for token in tokens:
        states.append(_state(states, token))
    return _logits(states, 0)


class FakeModel:
    block_size = 4
    block_bytes = 1
    vocab_size = VOCAB

    def __init__(self, noise: float = 0.0, max_positions: int = 200) -> None:
        """`noise`: how much it differs from one without."""
        self.max_positions = max_positions
        self._noise = noise
        self._cache: npt.NDArray[np.int64] = np.zeros((0, self.block_size), np.int64)

    def allocate(self, num_blocks: int) -> None:
        self._cache = np.zeros((num_blocks, self.block_size), np.int64)

    def forward(self, slices: list[TokenSlice]) -> Floats:
        for tokens, past, table, wanted in slices:
            assert wanted <= len(tokens) > 0
            for position, token in enumerate(tokens, start=past):
                state = _state(self._read(table, position), token)
                self._cache[table[position // self.block_size], position % self.block_size] = state
        rows = [
            _logits(self._read(table, until), self._noise)
            for tokens, past, table, wanted in slices
            for until in range(past + len(tokens) - wanted + 1, past + len(tokens) + 1)
        ]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def _read(self, table: npt.NDArray[np.int32], until: int) -> list[int]:
        states: list[int] = self._cache[table].reshape(-1)[:until].tolist()
        return states


def _state(before: list[int], token: int) -> int:
    return hash((*before[-1:], len(before), token)) % 2**62


def _logits(states: list[int], noise: float) -> Floats:
    return _logits_of(hash(tuple(states)) % 2**62, noise).copy()


@lru_cache(maxsize=100_000)
def _logits_of(seed: int, noise: float) -> Floats:
    logits = 3 * np.random.default_rng(seed).standard_normal(VOCAB)
    if noise:
        logits += noise * np.random.default_rng(seed ^ 1).standard_normal(VOCAB)
    return logits.astype(np.float32)

"""A model whose next token can be computed by hand, behind the interface of `PagedModel`.

Its cache holds token ids where the real one holds keys and values, and its logits are a pure function of the ids that
it finds there. So a block that was freed too early, shared wrongly or filled with rejected drafts changes the answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.runtimes.cpu.engine.paged_model import Slice

VOCAB = 12


def next_logits(history: list[int], noise: float = 0.0) -> npt.NDArray[np.float32]:
    """Logits [VOCAB] after `history`; with `noise`, a model that often agrees."""
    seed = hash(tuple(history)) % 2**63
    logits = 3 * np.random.default_rng(seed).standard_normal(VOCAB)
    if noise:
        logits += noise * np.random.default_rng(seed ^ 1).standard_normal(VOCAB)
    return logits.astype(np.float32)


class FakeModel:
    block_size = 4
    block_bytes = 1
    vocab_size = VOCAB

    def __init__(self, noise: float = 0.0, max_positions: int = 200) -> None:
        self.max_positions = max_positions
        self._noise = noise
        self._cache: npt.NDArray[np.int64] = np.zeros((0, self.block_size), np.int64)

    def allocate(self, num_blocks: int) -> None:
        self._cache = np.full((num_blocks, self.block_size), -1)

    def forward(self, slices: list[Slice]) -> npt.NDArray[np.float32]:
        rows = []
        for tokens, past, table, _ in slices:
            for position, token in enumerate(tokens, start=past):
                self._cache[table[position // self.block_size], position % self.block_size] = token
        for tokens, past, table, wanted in slices:
            end = past + len(tokens)
            history = self._cache[table].reshape(-1)[:end].tolist()
            assert -1 not in history
            rows += [next_logits(history[:until], self._noise) for until in range(end - wanted + 1, end + 1)]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

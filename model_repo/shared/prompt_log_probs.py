"""Log probabilities of a prompt's tokens, from the logits that an engine computes while it reads the prompt.

An engine may hand its logits over in pieces; each is reduced as it comes, so that the logits of a whole prompt (with a
vocabulary of 128 thousand tokens half a megabyte a token) need not be held at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from shared.refusal import RequestRefused

Array = npt.NDArray[Any]
# Input of `tensorrt_llm_bls` and of the cpu engine's model: how many alternatives; and what then comes.
RETURN_PROMPT_LOG_PROBS = "return_prompt_log_probs"
PROMPT_LOG_PROBS = ("prompt_log_probs", "prompt_log_probs_ids")
MOST_ALTERNATIVES = 20


class PromptLogProbTable:
    """A row for each token of a prompt: its own log probability, then those of the k most probable tokens there.

    Nothing comes before the first token that could tell its probability: its row holds NaN, and ids of -1.

    >>> table = PromptLogProbTable([7, 1], k=1)
    >>> table.read(np.zeros((1, 8), np.float32))
    >>> table.ids.tolist()
    [[7, -1], [1, 0]]
    """

    def __init__(self, prompt: Sequence[int], k: int) -> None:
        self.ids = np.full((len(prompt), 1 + k), -1, np.int32)
        self.log_probs = np.full((len(prompt), 1 + k), np.nan, np.float32)
        self.ids[:, 0] = prompt
        # Rows that are complete; the first one is from the beginning.
        self._known = 1

    def read(self, logits: Array) -> None:
        """Take the logits [tokens, vocab_size] after the next tokens of the prompt; further ones are ignored."""
        for row in logits[: len(self.ids) - self._known].astype(np.float32, copy=False):
            ids, values = self.ids[self._known], self.log_probs[self._known]
            ids[1:] = _most_probable(row, len(ids) - 1)
            top = row.max()
            values[:] = row[ids] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
            self._known += 1

    @property
    def complete(self) -> bool:
        """Whether the logits after all tokens of the prompt but its last have been read."""
        return self._known >= len(self.ids)

    def tensors(self) -> dict[str, Array]:
        """The outputs, [1, tokens, 1 + k] each."""
        return dict(zip(PROMPT_LOG_PROBS, (self.log_probs[np.newaxis], self.ids[np.newaxis]), strict=True))


def _most_probable(row: Array, k: int) -> Array:
    """The ids of the k greatest logits, the greatest first; of equal ones the lower id."""
    if not k:
        return np.zeros(0, np.intp)
    candidates = np.flatnonzero(row >= np.partition(row, -k)[-k])
    ids: Array = candidates[np.lexsort((candidates, -row[candidates]))][:k]
    return ids


def read_alternatives(array: Array) -> int:
    """Number of most probable tokens that a request wants at each token of its prompt.

    Raises:
        RequestRefused: More than there may be.
    """
    count = int(array.flat[0])
    if not 0 <= count <= MOST_ALTERNATIVES:
        raise RequestRefused(f"{RETURN_PROMPT_LOG_PROBS} = {count}: must be 0 to {MOST_ALTERNATIVES}")
    return count

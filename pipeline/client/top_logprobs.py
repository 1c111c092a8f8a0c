"""The likeliest tokens of each position, from the logits that a model returns with its answer.

The Triton models of TensorRT-LLM (0.19 to 1.2) have no output for them: they tell the log probability of the chosen
token and, where the engine was built to, the logits of all tokens (`generation_logits`) as the model gave them. After
the request's temperature these are what the log probabilities are told of, unless a penalty, a word that must not
come, a least length or a form has changed them; such requests are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK = 256
TopLogProbs = tuple[
    tuple[int, float], ...
]  # of one position: token ids and log probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class Likeliest:
    """How many tokens a position gets, and what the logits are divided by."""

    count: int
    temperature: float = 1.0

    def read(self, datatype: str, raw: bytes, positions: int) -> tuple[TopLogProbs, ...]:
        """From the content of `generation_logits` [1, 1, positions, vocabulary], FP32 or FP16."""
        import numpy as np

        if not positions:
            return ()
        values = np.frombuffer(raw, np.float16 if datatype == "FP16" else np.float32)
        return tuple(self._of(row) for row in values.reshape(positions, -1))

    def _of(self, logits: npt.NDArray[Any]) -> TopLogProbs:
        import numpy as np

        greatest = np.maximum.reduceat(logits, np.arange(0, len(logits), _BLOCK))  # of each block
        bar = np.partition(greatest, -self.count)[-self.count] if len(greatest) > self.count else -np.inf
        ids = np.flatnonzero(logits >= bar)  # few, and the likeliest are among them
        ids = ids[np.lexsort((ids, -logits[ids]))][: self.count]
        top = np.float32(logits[ids[0]])
        weights = np.exp((logits.astype(np.float32) - top) / np.float32(self.temperature))
        log_probs = (logits[ids].astype(np.float64) - top) / self.temperature - np.log(
            weights.sum(dtype=np.float64)
        )
        return tuple(zip(ids.tolist(), log_probs.tolist(), strict=True))

"""Log probabilities in outputs: rows of a token's own and the most probable tokens', or logits of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.client.answer import TopLogProbs
from pipeline.client.tensors import decode_numbers

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK = 256


def read_rows(tensor: Any, raw: bytes) -> list[tuple[float, ...]]:
    """Decode the rows of an output of two dimensions and more."""
    values, columns = decode_numbers(tensor.datatype, raw), tensor.shape[-1]
    return [values[at : at + columns] for at in range(0, len(values), columns)]


@dataclass(frozen=True, slots=True)
class TopLogProbsRequest:
    """Top-k log-prob request, answered from the logits that a model returns with its answer.

    The models of TensorRT-LLM's engines (1.0 to 1.2) have no output for top log probs. They return the log prob of the
    chosen token and, if the engine was built to, the model's raw logits of all tokens (`generation_logits`). Divided
    by the request's temperature these give the log probs, unless a penalty, a banned word or a minimum length changes
    the distribution; `read_sampling` refuses such requests. In guided decoding the engine `cpu` returns -inf for tokens
    that the form does not allow, which are left out; values of other servers are returned as they are.

    Attributes:
        k: tokens per position, 1 or more.
        temperature: divides the logits. Greedy requests use 1.
        bias: added to the logits before, by token id.
    """

    k: int
    temperature: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def read(self, datatype: str, raw: bytes, positions: int) -> tuple[TopLogProbs, ...]:
        """Compute the top log probs of each position.

        Args:
            datatype: FP32 or FP16.
            raw: content of `generation_logits`, [1, 1, positions, vocabulary].
        """
        import numpy as np

        if not positions:
            return ()
        kind = np.float16 if datatype == "FP16" else np.float32
        values: npt.NDArray[Any] = np.frombuffer(raw, kind).reshape(positions, -1)
        if self.bias:
            values = values.astype(np.float32)
            values[:, list(self.bias)] += np.array(list(self.bias.values()), np.float32)
        return tuple(map(self._top, values))

    def _top(self, logits: npt.NDArray[Any]) -> TopLogProbs:
        import numpy as np

        # The k-th greatest of the blocks' maxima is a lower bound of the k-th greatest logit, so few tokens remain.
        maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), _BLOCK))
        bound = np.partition(maxima, -self.k)[-self.k] if len(maxima) > self.k else -np.inf
        ids = np.flatnonzero((logits >= bound) & (logits > -np.inf))
        ids = ids[np.lexsort((ids, -logits[ids]))][: self.k]
        top = np.float32(logits[ids[0]])
        weights = np.exp((logits.astype(np.float32) - top) / np.float32(self.temperature))
        log_probs = (logits[ids].astype(np.float64) - top) / self.temperature - np.log(
            weights.sum(dtype=np.float64)
        )
        return tuple(zip(ids.tolist(), log_probs.tolist(), strict=True))

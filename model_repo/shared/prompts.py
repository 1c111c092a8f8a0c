"""Prompts and words of a batch, as the tensors that the engine takes.

Does what TensorRT-LLM's preprocessing model does: rows are padded on the right, words become [2, N] tensors, biased
words become a vector over the vocabulary. Shared by `preprocessing` and `tensorrt_llm_bls`, so that both mean the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from shared.refusal import RequestRefused
from shared.stop_words import pack
from shared.tokenizer import TextTokenizer

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Texts = Sequence[Sequence[str]]  # words of each row


@dataclass(frozen=True, slots=True)
class Prompts:
    """A batch of b prompts, the longest of L tokens."""

    input_ids: Int32  # [b, L], padded on the right
    input_lengths: Int32  # [b, 1]
    stop_words: Int32  # [b, 2, N]
    bad_words: Int32  # [b, 2, N]
    embedding_bias: Float32  # [b, vocabulary], or [b, 0] without biased words
    end_id: Int32  # [b, 1]
    pad_id: Int32  # [b, 1]
    table_ids: npt.NDArray[np.uint64] | None = None  # [b, L], for prompts with rows of a prompt table


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encodes batches for one model."""

    tokenizer: TextTokenizer
    end_id: int
    pad_id: int
    stop_token_ids: tuple[int, ...]  # end an answer as `end_id` does, unless a request has its own `end_id`
    vocab_size: int

    def encode(
        self,
        texts: Sequence[str],
        *,
        stop_words: Texts | None = None,
        bad_words: Texts | None = None,
        bias_words: Texts | None = None,
        bias_weights: npt.NDArray[Any] | None = None,
        end_id: npt.NDArray[Any] | None = None,
        pad_id: npt.NDArray[Any] | None = None,
        table_id: npt.NDArray[Any] | None = None,
    ) -> Prompts:
        """The tensors of a batch; what is not given has the model's default.

        Raises:
            RequestRefused: words and weights do not match in number.
        """
        rows = len(texts)
        ids = [self.tokenizer.encode(text) for text in texts]
        pads = _column(self.pad_id if pad_id is None else pad_id, rows)
        stops = self._word_ids(stop_words, rows)
        if end_id is None:
            stops = [[*row, *([token] for token in self.stop_token_ids)] for row in stops]
        input_ids = pad_right(ids, pads)
        return Prompts(
            input_ids=input_ids,
            input_lengths=np.array([[len(row)] for row in ids], np.int32),
            stop_words=pack(stops),
            bad_words=pack(self._word_ids(bad_words, rows)),
            embedding_bias=self._bias(bias_words, bias_weights, rows),
            end_id=_column(self.end_id if end_id is None else end_id, rows),
            pad_id=pads,
            table_ids=None if table_id is None else self._table_ids(input_ids, table_id),
        )

    def _table_ids(self, input_ids: Int32, table_id: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """The table's id at tokens beyond the vocabulary, which stand for rows of the table; 0 elsewhere."""
        return np.where(input_ids >= self.vocab_size, table_id.reshape(-1, 1), 0).astype(np.uint64)

    def _word_ids(self, texts: Texts | None, rows: int) -> list[list[list[int]]]:
        if texts is None:
            return [[] for _ in range(rows)]
        return [[self.tokenizer.encode_word(word) for word in row] for row in texts]

    def _bias(self, texts: Texts | None, weights: npt.NDArray[Any] | None, rows: int) -> Float32:
        if texts is None and weights is None:
            return np.zeros((rows, 0), np.float32)
        counts = [len(row) for row in texts or []]
        given = [] if weights is None else weights.reshape(rows, -1).tolist()
        if counts != [len(row) for row in given]:
            raise RequestRefused(
                f"embedding bias: {sum(counts)} words, {sum(map(len, given))} weights; one for each"
            )
        bias = np.zeros((rows, self.vocab_size), np.float32)
        for row, (row_words, row_weights) in enumerate(zip(texts or [], given, strict=True)):
            for word, weight in zip(row_words, row_weights, strict=True):
                bias[row, self.tokenizer.encode_word(word)] += weight
        return bias


def pad_right(rows: Sequence[Sequence[int]], pads: Int32) -> Int32:
    """Rows of unequal length as one array.

    >>> pad_right([[1, 2], [3]], np.array([[0], [9]])).tolist()
    [[1, 2], [3, 9]]
    """
    padded = np.tile(pads, (1, max(map(len, rows), default=0))).astype(np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _column(value: int | npt.NDArray[Any], rows: int) -> Int32:
    return np.broadcast_to(np.asarray(value, np.int32).reshape(-1, 1), (rows, 1)).copy()

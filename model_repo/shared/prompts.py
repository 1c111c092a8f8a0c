"""Prompts and words of a batch, as the tensors that the engine takes.

Does what TensorRT-LLM's preprocessing model does: rows are padded on the right, words become [2, N] tensors, biased
words become a vector over the vocabulary. Shared by `preprocessing` and `tensorrt_llm_bls`, so that both mean the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
TokenIds = Sequence[int]
# Row of the batch, tokens, and what is added to their logits.
Bias = tuple[int, list[int], float]

# Characters of all words of a kind in one prompt, as the gateway has it: each word is tokenized by itself.
_MAX_WORD_CHARS = 16_384


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
        prompts: Sequence[str | TokenIds],
        *,
        prior_output: TokenIds = (),
        stop_words: Texts | None = None,
        bad_words: Texts | None = None,
        bias_words: Texts | None = None,
        bias_weights: npt.NDArray[Any] | None = None,
        bias_ids: Sequence[TokenIds] | None = None,
        bias_values: npt.NDArray[Any] | None = None,
        stop_token_ids: Sequence[TokenIds] | None = None,
        end_id: npt.NDArray[Any] | None = None,
        pad_id: npt.NDArray[Any] | None = None,
        table_id: npt.NDArray[Any] | None = None,
    ) -> Prompts:
        """The tensors of a batch; what is not given has the model's default.

        Args:
            prompts: Texts, or token ids, which stay as they are.
            prior_output: Tokens of the answer that came before; they are put after the one prompt.
            stop_words: Texts that end an answer.
            bad_words: Texts that must not come.
            bias_words: Texts whose tokens get a bias.
            bias_weights: Weights of those words, [b, words].
            bias_ids: Tokens that get a bias.
            bias_values: Values of those ids, [b, ids].
            stop_token_ids: Tokens that end an answer.
            end_id: Instead of the model's own end token and stop tokens; -1 is none.
            pad_id: Fills up shorter rows.
            table_id: Id of a prompt table.

        Raises:
            RequestRefused: Words and weights do not match in number, or an id is not in the vocabulary.
        """
        rows = len(prompts)
        ids = [
            self.tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else self._known("prompt_token_ids", prompt)
            for prompt in prompts
        ]
        if prior_output:
            ids = [[*row, *self._known("prior_output_ids", prior_output)] for row in ids]
        pads = _column(self.pad_id if pad_id is None else pad_id, rows)
        stops = self._word_ids("stop_words", stop_words, rows)
        if stop_token_ids is not None:
            stops = [
                [*words, *([token] for token in self._known("stop_token_ids", tokens))]
                for words, tokens in zip(stops, stop_token_ids, strict=True)
            ]
        if end_id is None:
            stops = [[*row, *([token] for token in self.stop_token_ids)] for row in stops]
        biased = [self._known("logit_bias_token_ids", row) for row in bias_ids or [()] * rows]
        biases = [
            *_biases(
                "embedding bias",
                "words",
                self._word_ids("embedding_bias_words", bias_words, rows),
                bias_weights,
            ),
            *_biases("logit_bias_values", "token ids", [[[id] for id in row] for row in biased], bias_values),
        ]
        input_ids = pad_right(ids, pads)
        return Prompts(
            input_ids=input_ids,
            input_lengths=np.array([[len(row)] for row in ids], np.int32),
            stop_words=pack(stops),
            bad_words=pack(self._word_ids("bad_words", bad_words, rows)),
            embedding_bias=self._bias(biases, rows),
            end_id=_column(self.end_id if end_id is None else end_id, rows),
            pad_id=pads,
            table_ids=None if table_id is None else self._table_ids(input_ids, table_id),
        )

    def _table_ids(self, input_ids: Int32, table_id: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """The table's id at tokens beyond the vocabulary, which stand for rows of the table; 0 elsewhere."""
        return np.where(input_ids >= self.vocab_size, table_id.reshape(-1, 1), 0).astype(np.uint64)

    def _word_ids(self, name: str, texts: Texts | None, rows: int) -> list[list[list[int]]]:
        if texts is None:
            return [[] for _ in range(rows)]
        longest = max((sum(map(len, row)) for row in texts), default=0)
        if longest > _MAX_WORD_CHARS:
            raise RequestRefused(f"{name}: has {longest} characters in all, of at most {_MAX_WORD_CHARS}")
        return [[self.tokenizer.encode_word(word) for word in row] for row in texts]

    def _known(self, name: str, tokens: TokenIds) -> list[int]:
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise RequestRefused(f"{name} = {wrong}: must be token ids, 0 to {self.vocab_size - 1}")
        return list(tokens)

    def _bias(self, biases: Sequence[Bias], rows: int) -> Float32:
        """The sum of all biases, [b, vocabulary]; [b, 0] where there are none."""
        bias = np.zeros((rows, self.vocab_size if biases else 0), np.float32)
        for row, tokens, number in biases:
            bias[row, tokens] += number
        return bias


def _biases(
    name: str, kind: str, words: list[list[list[int]]], numbers: npt.NDArray[Any] | None
) -> Iterator[Bias]:
    """Pair the words of each row, as tokens, with the numbers that belong to them."""
    given = [[] for _ in words] if numbers is None else numbers.reshape(len(words), -1).tolist()
    counts = [len(row) for row in words]
    if counts != [len(row) for row in given]:
        raise RequestRefused(f"{name}: {sum(counts)} {kind}, {sum(map(len, given))} weights; one for each")
    for row, (tokens, weights) in enumerate(zip(words, given, strict=True)):
        yield from ((row, word, weight) for word, weight in zip(tokens, weights, strict=True))


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

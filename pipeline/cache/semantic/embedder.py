"""Sentence embeddings by ONNX Runtime: all-MiniLM-L6-v2, or another BERT encoder of sentence-transformers.

A folder holds tokenizer.json and one graph: model.onnx, or model_int8.onnx where that agrees. A text that the model
does not see whole has no embedding here: one that is longer than it was trained on, and one with characters that its
tokenizer drops, or replaces by its token for unknown words. Such texts look alike to it, as 👍👍👍 and 😡😡😡 do.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.cache.backend import Vector
from pipeline.reading import read_tokenizer

# Output of a graph: [batch, tokens, dimensions].
OUTPUT = "last_hidden_state"
# The first one that is there is used.
GRAPHS = ("model_int8.onnx", "model.onnx")
# Limit of all-MiniLM-L6-v2, the marks at both ends included.
MAX_TOKENS = 256
# Embeddings of recent questions.
_KEPT = 4096
# Without VNNI, ONNX Runtime sums pairs of 8-bit products in 16 bits, which do not hold them: a probability of 0.34 came
# out as 0.04. Products of unsigned numbers, which it makes then, are exact and slower; with VNNI nothing changes.
_EXACT = ("session.x64quantprecision", "1")


class Embedder:
    """Text to a vector of length 1; safe to use from any number of threads.

    >>> embedder = Embedder(Path("all-minilm-l6-v2"))                  # doctest: +SKIP
    >>> embedder("Where is my parcel?").shape                          # doctest: +SKIP
    (384,)
    """

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        """
        Args:
            folder: see the module.
            name: name of the model, by default that of the folder.

        Raises:
            FileNotFoundError: the folder holds no graph or no tokenizer.
        """
        graph = find_graph(folder, GRAPHS)
        self._session = load_graph(graph)
        self._inputs = {node.name for node in self._session.get_inputs()}
        outputs = {node.name for node in self._session.get_outputs()}
        # None: the only one there is.
        self._outputs = [OUTPUT] if OUTPUT in outputs else None
        # Without the file's own limit, which would cut at 128, silently.
        self._tokenizer: Any = read_tokenizer(folder / "tokenizer.json")
        self._unknown_id = _unknown_id(self._tokenizer)
        self.max_tokens = _max_tokens(folder)
        self.identity = f"{name or folder.name}/{graph.name}"
        self.digest = _digest(graph, folder / "tokenizer.json")
        self._cached = lru_cache(_KEPT)(self._embed)

    def __call__(self, text: str) -> Vector | None:
        """Embed a text: float32 [dimensions] of length 1; None if the model does not see all of it."""
        return self._cached(text)

    def tokens(self, text: str) -> int:
        """Count the tokens of a text, with the marks at both ends."""
        return len(self._encode(text))

    def _encode(self, text: str) -> Any:
        # `encode` would let no other thread run meanwhile.
        return self._tokenizer.encode_batch_fast([text])[0]

    def _embed(self, text: str) -> Vector | None:
        encoding = self._encode(text)
        if len(encoding) > self.max_tokens or self._unknown_id in encoding.ids or self._drops_from(text):
            return None
        row = np.array([encoding.ids], np.int64)
        arrays = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
        wanted = {name: array for name, array in arrays.items() if name in self._inputs}
        # [tokens, dimensions]
        states = self._session.run(self._outputs, wanted)[0][0]
        mean = states.mean(axis=0)
        vector: Vector = (mean / np.linalg.norm(mean)).astype(np.float32)
        return vector

    def _drops_from(self, text: str) -> bool:
        """Whether the normalizer leaves nothing of a character. Accents that it takes off letters are no such case."""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return False
        odd = {
            letter
            for letter in unicodedata.normalize("NFC", text)
            if not (letter.isspace() or "!" <= letter <= "~")
        }
        return any(not normalizer.normalize_str(letter).strip() for letter in odd)


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the token for unknown words; None if the tokenizer has none, because it knows every byte."""
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    id: int | None = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
    return id


def _digest(*files: Path) -> bytes:
    digest = blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()


def _max_tokens(folder: Path) -> int:
    settings = folder / "sentence_bert_config.json"
    if not settings.is_file():
        return MAX_TOKENS
    return min(
        MAX_TOKENS, int(json.loads(settings.read_text(encoding="utf-8")).get("max_seq_length", MAX_TOKENS))
    )


def find_graph(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of some graphs that a model's folder holds.

    Raises:
        FileNotFoundError: the folder holds no graph or no tokenizer.
    """
    graph = next((folder / name for name in names if (folder / name).is_file()), None)
    if graph is None or not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder}: needs tokenizer.json and one of {', '.join(names)}")
    return graph


def load_graph(graph: Path) -> Any:
    """Load a graph as an `onnxruntime.InferenceSession` whose 8-bit weights mean the same on every processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry(*_EXACT)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

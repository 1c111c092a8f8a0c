"""A cross-encoder as the judge of near questions: it reads both together, where the embedder saw each by itself.

Any published one for duplicate questions does that has one output (a logit) or two (different, same), such as
cross-encoder/quora-distilroberta-base. A folder holds tokenizer.json, config.json and a graph for ONNX Runtime:
model.onnx (in a repository of the Hub in the folder onnx), or model_int8.onnx where that agrees. The guards stay on:
what they forbid is not asked of the model.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.cache.semantic.decision import Decision, Verifier
from pipeline.cache.semantic.embedder import find_graph, load_graph
from pipeline.reading import read_json, read_tokenizer

# The first one that is there.
GRAPHS = ("model_int8.onnx", "model.onnx", "onnx/model.onnx")
# Of both questions together, the marks around them included: what published ones were trained with.
MAX_TOKENS = 512


class CrossEncoder:
    """Scores two texts; safe to use from any number of threads. The model is loaded when it is first asked.

    >>> judge = CrossEncoder(Path("quora-distilroberta-base"))              # doctest: +SKIP
    >>> judge("Where is my parcel?", "When does my parcel come?")           # doctest: +SKIP
    0.31
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: see the module.

        Raises:
            FileNotFoundError: the folder holds no graph or no tokenizer.
        """
        graph = find_graph(folder, GRAPHS)
        self._folder, self._graph = folder, graph
        self._loading = threading.Lock()
        self._loaded: _LoadedModel | None = None

    def __call__(self, question: str, candidate: str) -> float | None:
        """Return the probability that one answer serves both questions; None if they are too long together.

        Raises:
            ValueError: the graph is not that of a cross-encoder for two texts.
        """
        model = self._loaded or self._load()
        # `encode` would let no other thread run meanwhile.
        encoding = model.tokenizer.encode_batch_fast([(question, candidate)])[0]
        if len(encoding) > model.max_tokens:
            return None
        arrays = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        rows = {name: np.array([arrays[name]], np.int64) for name in model.inputs}
        logits = model.session.run(None, rows)[0].reshape(-1).astype(np.float64)
        if not np.isfinite(logits).all():
            raise ValueError("the cross-encoder gave what is not a number")
        # One logit gives the odds; of two, the second counts by how much it is above the first.
        odds = logits[-1] - (logits[0] if len(logits) == 2 else 0.0)
        return float(1 / (1 + np.exp(-np.clip(odds, -60, 60))))

    def _load(self) -> _LoadedModel:
        with self._loading:
            if self._loaded is None:
                self._loaded = _load(self._folder, self._graph)
            return self._loaded


class _LoadedModel(NamedTuple):
    session: Any
    tokenizer: Any
    inputs: tuple[str, ...]
    max_tokens: int


def _load(folder: Path, graph: Path) -> _LoadedModel:
    try:
        session = load_graph(graph)
    except Exception as error:
        # The library raises bare Exceptions.
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise ValueError(f"{graph.name} cannot be loaded: {str(error).splitlines()[0]}") from error
    inputs = tuple(node.name for node in session.get_inputs())
    known = ("input_ids", "attention_mask", "token_type_ids")
    if unknown := [name for name in inputs if name not in known]:
        raise ValueError(f"{graph.name} takes {', '.join(unknown)}: a cross-encoder takes {', '.join(known)}")
    shape = session.get_outputs()[0].shape
    if len(shape) != 2 or shape[1] not in (1, 2):
        raise ValueError(
            f"{graph.name} gives {shape}: a cross-encoder for duplicate questions gives [batch, 1] or [batch, 2]"
        )
    config = folder / "config.json"
    positions = read_json(config).get("max_position_embeddings") if config.is_file() else None
    tokens = min(MAX_TOKENS, positions) if isinstance(positions, int) else MAX_TOKENS
    # Without the file's own limit, which would cut silently.
    return _LoadedModel(session, read_tokenizer(folder / "tokenizer.json"), inputs, tokens)


@dataclass(frozen=True, slots=True)
class CrossEncoderVerifier:
    """See `pipeline.cache.semantic.decision.Verifier`.

    Attributes:
        guarded: verifier whose guards may forbid; its score counts where they do.
        model: its probability is the score of all other pairs.
        default_min_score: see `Verifier`. Models differ in how sure they are: `pipeline cache tune` chooses a score for
            the one at hand.
    """

    guarded: Verifier
    model: CrossEncoder
    default_min_score: float = 0.9

    def prepare(self, text: str) -> None:
        self.guarded.prepare(text)

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:
        """Judge by the guards, then by the model; pairs that are too long for the model score 0."""
        decision = self.guarded.decide(question, candidate, cosine)
        if decision.forbidden is not None:
            return decision
        return Decision(self.model(question, candidate) or 0.0)

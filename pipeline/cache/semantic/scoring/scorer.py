"""Decomposable attention (Parikh et al. 2016, arXiv:1606.01933) over token states of a frozen sentence encoder.

Each token is held beside what the other question has for it, the differences are looked at one by one, and their sum
and their largest decide, together with what the checks say. The encoder has run for the embedding anyway; what is left
are a few small products. Trained by scripts/train_scorer on pairs that were written for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.semantic.scoring.facts import NAMES

Array = NDArray[np.float32]
StatesOf = Callable[[str], "Array | None"]
FILE = "scorer.npz"
PROBE = "How do I change the battery of a smoke detector?"
_SAME_ENCODER = 0.98  # mean cosine of the probe's states
_KEPT = 4096  # questions of which the projection is kept, about 6 KB each
_EPSILON = np.float32(1e-5)


class AnotherEncoder(ValueError):
    """The scorer was trained with the states of another encoder."""


class Projected(NamedTuple):
    """The tokens of a question, as the scorer holds them beside those of another."""

    values: Array  # [tokens, width]
    keys: Array  # [tokens, width], of length 1


class Scorer:
    """Scores pairs; safe to use from any number of threads.

    Args:
        weights: as scripts/train_scorer writes them.
        states: token states of a text, float32 [tokens, 2 * dimensions] (see `Embedder.states`).

    Raises:
        AnotherEncoder: the weights are not for these states. ValueError: they are for other facts than ours.
    """

    def __init__(self, weights: Mapping[str, Array], states: StatesOf) -> None:
        self._w = {
            name: np.array(np.transpose(value), np.float32, order="C")  # matrices as [in, out]
            for name, value in weights.items()
            if name != "facts"
        }
        self._states = states
        if tuple(str(name) for name in weights["facts"]) != NAMES:
            raise ValueError("the scorer was trained with other facts: run scripts/train_scorer")
        self._expect_same_encoder()
        self._into, self._moved = self._projection()
        self._layers = {name: self._layer(name) for name in ("compare1", "compare2", "out1", "out2")}
        self.min_score = float(self._w["min_score"])  # that a hit needs
        self.min_score_unopposed = float(self._w["min_score_unopposed"])  # where no check objects
        self._projected = lru_cache(_KEPT)(self._project)

    def __call__(self, asked: str, kept: str, facts: Array) -> float | None:
        """The logit that one answer serves both; None if a text has no states.

        Args:
            facts: float32 [len(NAMES)].
        """
        one, other = self._projected(asked), self._projected(kept)
        if one is None or other is None:
            return None
        beside, count = self._beside(one, other), len(one.values)
        seen = _silu(self._linear("compare2", _silu(self._linear("compare1", beside))))
        total = seen[:count].sum(axis=0) / np.float32(count**0.5)
        total += seen[count:].sum(axis=0) / np.float32(len(other.values) ** 0.5)
        decisive = np.concatenate([total, seen.max(axis=0), facts])
        return float(self._linear("out2", _silu(self._linear("out1", decisive)))[0])

    def prepare(self, text: str) -> None:
        """Keep what is needed of a text, as long as the encoder's states of it are at hand.

        Args:
            text: of a question.
        """
        self._projected(text)

    def _beside(self, one: Projected, other: Projected) -> Array:
        """Each token of both beside what the other has for it: float32 [tokens of both, 4 * width + 1].

        Column by column: the token, the other's, how far they are apart, their product, and how near the nearest is.
        """
        count, width = one.values.shape
        made = np.empty((count + len(other.values), 4 * width + 1), np.float32)
        here, there, apart, product = (made[:, at * width : (at + 1) * width] for at in range(4))
        peak = made[:, -1]
        here[:count], here[count:] = one.values, other.values
        near = one.keys @ other.keys.T
        weights = np.exp(near * self._w["sharpness"])  # small enough: the keys' products are at most 1
        np.matmul(weights / weights.sum(axis=1)[:, None], other.values, out=there[:count])
        np.matmul((weights / weights.sum(axis=0)).T, one.values, out=there[count:])
        np.abs(np.subtract(here, there, out=apart), out=apart)
        np.multiply(here, there, out=product)
        near.max(axis=1, out=peak[:count])
        near.max(axis=0, out=peak[count:])
        return made

    def _project(self, text: str) -> Projected | None:
        states = self._states(text)
        if states is None:
            return None
        size = np.float32(states.shape[1])
        mean, square = states.sum(axis=1) / size, _squares(states) / size
        deviation = np.sqrt(square - mean * mean + _EPSILON)
        values, keys = np.hsplit((states @ self._into) / deviation[:, None] + self._moved, 2)
        lengths = np.sqrt(_squares(keys))
        return Projected(np.tanh(values), keys / np.maximum(lengths, _EPSILON)[:, None])

    def _linear(self, name: str, given: Array) -> Array:
        weight, bias = self._layers[name]
        product: Array = given @ weight
        product += bias
        return product

    def _projection(self) -> tuple[Array, Array]:
        """[in, 2 * width] and its offset: to values and keys side by side, the norm but for the deviation included."""
        both = np.hstack([self._w["value.weight"], self._w["key.weight"]])
        offset = np.concatenate([self._w["value.bias"], np.zeros_like(self._w["value.bias"])])
        gained = self._w["norm.weight"][:, None] * both
        return gained - gained.mean(axis=0), self._w["norm.bias"] @ both + offset

    def _layer(self, name: str) -> tuple[Array, Array]:
        """[in, out] and its bias; of facts as they are, for the layer that takes them."""
        weight, bias = self._w[f"{name}.weight"], self._w[f"{name}.bias"]
        if name == "out1":
            weight = weight.copy()
            weight[-len(NAMES) :] /= self._w["deviation"][:, None]
            bias = bias - self._w["mean"] @ weight[-len(NAMES) :]
        return weight, bias

    def _expect_same_encoder(self) -> None:
        found, wanted = self._states(PROBE), self._w["probe"].T
        if found is None or found.shape != wanted.shape or _agreement(found, wanted) < _SAME_ENCODER:
            raise AnotherEncoder(
                "the scorer knows only all-MiniLM-L6-v2, with a graph that was made here from its checkpoint"
            )


def load_scorer(states: StatesOf) -> Scorer:
    """The one of this package, for all-MiniLM-L6-v2.

    Args:
        states: returns the encoder's states of a text, float32 [tokens, width], or None if it has none.

    Raises:
        AnotherEncoder: `states` are not those of that encoder.
    """
    return Scorer(_weights(), states)


@cache
def _weights() -> Mapping[str, Array]:
    with as_file(files(__package__) / "data" / FILE) as path, np.load(path) as stored:
        return dict(stored)


def _agreement(one: Array, other: Array) -> float:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(axis=1) / lengths).mean())


def _squares(rows: Array) -> Array:
    """The sum of each row's squares."""
    found: Array = np.einsum("ij,ij->i", rows, rows)
    return found


def _silu(given: Array) -> Array:
    result: Array = np.negative(given)
    np.exp(result, out=result)
    result += 1
    return np.divide(given, result, out=result)

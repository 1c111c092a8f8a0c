"""Files to tune with, a JSON object a line: labelled pairs, or a log of questions.

Pairs are {a, b, same, category?}, lines of a log {question, scope?}. A log is what `pipeline cache export` writes. It
has no labels: `find_repeats` tells how many questions are near another, and which pairs a person should label.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.semantic.decision import Embed, Verifier
from pipeline.reading import check_line, checked_json

Row = TypeVar("Row")
_LABELS = {0: False, 1: True}  # false and true are equal to them


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions, and whether the same answer serves both."""

    a: str
    b: str
    same: bool
    category: str = ""


@dataclass(frozen=True, slots=True)
class LoggedQuestion:
    """A question that was asked; only questions of one scope are compared."""

    question: str
    scope: str = ""


class BadLines(ValueError):
    """Lines of a file are malformed; lists all of them."""

    def __init__(self, faults: Iterable[tuple[int, str]]) -> None:
        self.faults = tuple(faults)  # (line, from 1, or 0 for the file; what is wrong)
        super().__init__("; ".join(f"line {line}: {problem}" for line, problem in self.faults))


def read_pairs(lines: Iterable[str]) -> list[Pair]:
    """Read labelled pairs, one JSON object a line; empty lines are skipped.

    A pair that stands there again, in either order, is taken once: a copy shows nothing new.

    Raises:
        BadLines: lines are malformed, or one label is missing; it names everything that is wrong.
    """
    unique: dict[tuple[frozenset[str], bool], Pair] = {}
    for pair in _each(lines, _pair):
        unique.setdefault((frozenset((pair.a, pair.b)), pair.same), pair)
    pairs = list(unique.values())
    labels = {pair.same for pair in pairs}
    if len(labels) < 2:
        lacking = 1 if labels == {False} else 0
        problem = "is empty" if not labels else f"holds no pair with same = {lacking}"
        raise BadLines([(0, f'{problem}: needs lines like {{"a": "…", "b": "…", "same": {lacking}}}')])
    return pairs


def read_log(lines: Iterable[str]) -> list[LoggedQuestion]:
    """Read questions, a line each, as JSON objects or as plain text; empty lines are skipped.

    Raises:
        BadLines: lines are malformed; it names everything that is wrong.
    """
    log = _each(lines, _logged)
    if not log:
        raise BadLines([(0, 'is empty: needs questions, a line each, or lines like {"question": "…"}')])
    return log


def question_groups(pairs: Sequence[Pair]) -> list[int]:
    """Return a number of 32 bits for each pair: the same for pairs that hang together by their questions.

    What is chosen by some pairs must be tried on others that share no question with them. The numbers do not depend on
    the order of the pairs, and are the same each time.

    Args:
        pairs: labelled or not.

    >>> pairs = [Pair("a", "b", True), Pair("c", "d", True), Pair("b", "e", False)]
    >>> first, second, third = question_groups(pairs)
    >>> first == third, first == second
    (True, False)
    """
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        while parent.setdefault(text, text) != text:
            # Each step halves the way, so that long chains stay short.
            parent[text] = text = parent[parent[text]]
        return text

    for pair in pairs:
        smaller, larger = sorted((root(pair.a), root(pair.b)))
        parent[larger] = smaller
    return [zlib.crc32(root(pair.a).encode()) for pair in pairs]


def _each(lines: Iterable[str], read: Callable[[str], Row]) -> list[Row]:
    rows, faults = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(read(check_line(line)))
            except ValueError as error:
                faults.append((number, str(error)))
    if faults:
        raise BadLines(faults)
    return rows


def _object(line: str, example: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = checked_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}: needs {example}") from None
    except ValueError as error:
        raise ValueError(f"{error}: needs {example}") from None
    return row


def _pair(line: str) -> Pair:
    row = _object(line, '{"a": "…", "b": "…", "same": 1}')
    problems = [f"{name}: needs a text" for name in "ab" if not _is_text(row.get(name))]
    same = row.get("same")
    if same is None:
        problems.append("same: not labelled yet (1 if the same answer serves both, else 0)")
    elif not isinstance(same, int) or same not in _LABELS:
        problems.append(f"same = {json.dumps(same)}: 1 if the same answer serves both, else 0")
    if not isinstance(row.get("category", ""), str):
        problems.append("category: needs a text")
    if problems:
        raise ValueError("; ".join(problems))
    return Pair(row["a"], row["b"], _LABELS[row["same"]], row.get("category", ""))


def _logged(line: str) -> LoggedQuestion:
    if not line.lstrip().startswith("{"):
        return LoggedQuestion(line.strip())
    row = _object(line, '{"question": "…"}')
    if not _is_text(row.get("question")) or not isinstance(row.get("scope", ""), str):
        raise ValueError('question, scope: need texts, like {"question": "…"}')
    return LoggedQuestion(row["question"], row.get("scope", ""))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


# Questions that are compared.
MOST = 50_000
# Pairs that are less near are left out.
MIN_SIMILARITY = 0.5
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class NearPair:
    """A question, and the nearest other one of its scope."""

    a: str
    b: str
    similarity: float
    # Whether a cache would serve one with the answer to the other.
    served: bool


@dataclass(frozen=True, slots=True)
class Repeats:
    """A log of questions, compared with itself."""

    questions: int
    # Different texts, per scope.
    different: int
    # Each pair once, the nearest first.
    nears: tuple[NearPair, ...]

    def near(self, threshold: float) -> int:
        """Count the pairs that are at least as near."""
        return sum(near.similarity >= threshold for near in self.nears)

    def served(self, threshold: float) -> int:
        """Count those of them that would share an answer."""
        return sum(near.similarity >= threshold and near.served for near in self.nears)

    def merged(self) -> list[NearPair]:
        """Return those that would share an answer, the nearest first."""
        return [near for near in self.nears if near.served]


def find_repeats(
    log: Sequence[LoggedQuestion], embed: Embed, verifier: Verifier, min_score: float
) -> Repeats:
    """Compare the last `MOST` questions, each with the others of its scope.

    Args:
        verifier: judges which pairs would share an answer.
        min_score: score that they need.
    """
    texts = list(dict.fromkeys(log[-MOST:]))
    scopes: dict[str, list[str]] = {}
    for logged in texts:
        scopes.setdefault(logged.scope, []).append(logged.question)
    nears = [
        NearPair(a, b, similarity, verifier.decide(a, b, similarity).serves(min_score))
        for questions in scopes.values()
        for a, b, similarity in _nearest(questions, embed)
    ]
    return Repeats(len(log), len(texts), tuple(sorted(nears, key=lambda near: -near.similarity)))


def _nearest(questions: Sequence[str], embed: Embed) -> list[tuple[str, str, float]]:
    embedded = [(text, vector) for text in questions if (vector := embed(text)) is not None]
    if len(embedded) < 2:
        return []
    vectors: NDArray[np.float32] = np.stack([vector for _, vector in embedded])
    pairs: dict[tuple[int, int], float] = {}
    for start in range(0, len(embedded), _BLOCK):
        cosines = vectors[start : start + _BLOCK] @ vectors.T  # [block, questions]
        cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))] = -1  # itself
        for row, at in enumerate(cosines.argmax(axis=1).tolist()):
            if cosines[row, at] >= MIN_SIMILARITY:
                left = start + row
                pairs[min(left, at), max(left, at)] = float(cosines[row, at])
    return [(embedded[a][0], embedded[b][0], similarity) for (a, b), similarity in pairs.items()]

"""Files to tune with, a JSON object a line: labelled pairs, or a log of questions.

Pairs are {a, b, same, category?}, lines of a log {question, scope?}. A log is what `pipeline cache export` writes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
        what = "is empty" if not labels else f"holds no pair with same = {lacking}"
        raise BadLines([(0, f'{what}: needs lines like {{"a": "…", "b": "…", "same": {lacking}}}')])
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
        one, other = sorted((root(pair.a), root(pair.b)))
        parent[other] = one
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

"""Files to tune with, a JSON object a line: labelled pairs, or a log of questions.

Pairs are {a, b, same, category?}, lines of a log {question, scope?}. A log is what `pipeline cache export` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_LABELS = {0: False, 1: True}  # false and true are equal to them


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions, and whether the same answer serves both."""

    a: str
    b: str
    same: bool
    category: str = ""


@dataclass(frozen=True, slots=True)
class Logged:
    """A question that was asked; only questions of one scope are compared."""

    question: str
    scope: str = ""


class BadLines(ValueError):
    """Everything that is wrong with a file."""

    def __init__(self, faults: Iterable[tuple[int, str]]) -> None:
        self.faults = tuple(faults)  # (line, from 1, or 0 for the file; what is wrong)
        super().__init__("; ".join(f"line {line}: {problem}" for line, problem in self.faults))


def read_lines(lines: Iterable[str]) -> list[Pair] | list[Logged]:
    """Pairs, or a log, whichever it is; empty lines are passed over.

    Raises:
        BadLines: with all that is wrong.
    """
    pairs: list[Pair] = []
    logged: list[Logged] = []
    faults: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = _read(line)
        except ValueError as error:
            faults.append((number, str(error)))
            continue
        if isinstance(read, Pair):
            pairs.append(read)
        else:
            logged.append(read)
        if pairs and logged:
            faults.append((number, "pairs and questions of a log are mixed: one file holds either"))
            break
    if not (pairs or logged or faults):
        faults.append((0, 'is empty: needs lines like {"a": "…", "b": "…", "same": 1}'))
    if faults:
        raise BadLines(faults)
    return pairs or logged


def _read(line: str) -> Pair | Logged:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError('is not an object like {"a": "…", "b": "…", "same": 1}')
    if "question" in row and "a" not in row:
        return _logged(row)
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


def _logged(row: dict[str, Any]) -> Logged:
    if not _is_text(row["question"]) or not isinstance(row.get("scope", ""), str):
        raise ValueError("question, scope: need texts")
    return Logged(row["question"], row.get("scope", ""))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())

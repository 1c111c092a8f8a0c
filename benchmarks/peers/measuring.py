"""One cache, measured: the same for ours and for its peers, each in a process of its own.

    python measuring.py WAY FOLDER COUNT REDIS_URL        prints a JSON object

FOLDER holds stored.npy (float32 [COUNT, 384]), near.npy and far.npy (questions that are near a stored one, and none).
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ANSWER = " ".join(f"token{n}" for n in range(32))
BUDGET_S = 8.0  # that one figure may take; stores take what they take


class Way(Protocol):
    """A cache. Texts are looked up in `Questions`, so that no embedder's time is in any figure."""

    def store(self, text: str, answer: str) -> None: ...
    def lookup(self, text: str) -> str | None: ...
    def size(self) -> int | None: ...  # bytes
    def close(self) -> None: ...


class Questions:
    """Texts and their embeddings."""

    def __init__(self, folder: Path) -> None:
        self.stored, self.near, self.far = (
            np.load(folder / f"{name}.npy") for name in ("stored", "near", "far")
        )
        self.targets: list[int] = np.load(folder / "targets.npy").tolist()  # stored question of each near one
        self._near_to = {target: at for at, target in enumerate(self.targets)}

    def text(self, number: int) -> str:
        return f"Where is parcel number {number}?"

    def near_text(self, at: int) -> str:
        return f"where is my parcel number {self.targets[at]}"

    def far_text(self, at: int) -> str:
        return f"Who wrote book {at}?"

    def embed(self, text: str) -> Any:
        """The embedding of a text; a near question is asked once for each of its targets."""
        kind, number = text.split()[0], int(text.rstrip("?").split()[-1])
        if kind == "Where":
            return self.stored[number]
        return self.near[self._near_to[number]] if kind == "where" else self.far[number]


def measure(way: Way, questions: Questions) -> dict[str, float | None]:
    """Medians in ms, bytes an entry beside the answer, share of near questions that find theirs."""
    count = len(questions.stored)
    store = timed(lambda n: way.store(questions.text(n), f"{n} {ANSWER}"), range(count), budget_s=1e9)
    order = np.random.default_rng(1).permutation(count).tolist()[:2000]
    size = way.size()
    found = [
        answer_of(way.lookup(questions.near_text(at))) == questions.targets[at] for at in range(50)
    ]  # warms, too
    hit = timed(lambda n: way.lookup(questions.text(n)), order)
    near = timed(lambda at: way.lookup(questions.near_text(at)), range(50, len(questions.near)))
    found += [
        answer_of(way.lookup(questions.near_text(at))) == questions.targets[at]
        for at in range(50, 50 + len(near))
    ]
    miss = timed(lambda at: way.lookup(questions.far_text(at)), range(len(questions.far)))
    return {
        "store": median_ms(store),
        "hit": median_ms(hit),
        "near": median_ms(near),
        "miss": median_ms(miss),
        "recall": float(np.mean(found)),
        "bytes": None if size is None else size / count - len(ANSWER) - 6,
    }


def answer_of(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0])


def timed(call: Callable[[Any], object], items: Iterable[Any], budget_s: float = BUDGET_S) -> list[float]:
    """Seconds of each call, as many as fit into the budget."""
    seconds, until = [], time.perf_counter() + budget_s
    for item in items:
        began = time.perf_counter()
        call(item)
        seconds.append(time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    return seconds


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def main() -> None:
    name, folder, count, redis_url = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    questions = Questions(folder)
    questions.stored = questions.stored[:count]
    module, _, maker = name.partition(":")
    make = getattr(importlib.import_module(f"way_{module}"), maker)
    way: Way = make(questions, folder / f"{module}-{maker}-{count}", redis_url)
    figures = measure(way, questions)
    way.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

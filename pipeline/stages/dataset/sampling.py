"""Which rows become samples: an order that the seed fixes, and a reason for every row that is passed over."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.progress import Progress
from pipeline.stages.dataset.encoding import Encoder, TemplateRefusal
from pipeline.stages.dataset.rows import Row

# One token predicts nothing, and a handful says nothing about activations.
SHORTEST = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one row, cut."""

    row: int  # 0-based in its file
    tokens: tuple[int, ...]
    cut: bool


@dataclass(slots=True)
class Draw:
    """The samples drawn, and why the other rows that were looked at were not."""

    samples: list[Sample] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)


def order(rows: int, seed: int, purpose: str) -> list[int]:
    """A permutation of the rows that depends on seed and purpose alone, on no library's generator."""
    return sorted(range(rows), key=lambda row: hashlib.sha256(f"{seed}:{purpose}:{row}".encode()).digest())


def draw(
    rows: Sequence[Row],
    encoder: Encoder,
    *,
    count: int,
    max_tokens: int,
    seed: int,
    purpose: str,
    without: Iterable[Sample] = (),
    same_file: bool = False,
    progress: Progress,
) -> Draw:
    """Up to `count` samples; none equals another, or one of `without`."""
    without = list(without)
    drawn, seen = Draw(), {sample.tokens for sample in without}
    taken = {sample.row for sample in without} if same_file else set()
    with progress.task(f"{purpose} samples", total=count, unit="samples") as task:
        for row in order(len(rows), seed, purpose):
            if len(drawn.samples) == count:
                break
            if row in taken:
                continue
            try:
                tokens = tuple(encoder.encode(rows[row]))
            except TemplateRefusal as refusal:
                drawn.passed_over[str(refusal)] += 1
                continue
            kept = tokens[:max_tokens]
            if len(kept) < SHORTEST:
                drawn.passed_over[f"shorter than {SHORTEST} tokens"] += 1
            elif kept in seen:
                drawn.passed_over["the same as another sample"] += 1
            else:
                seen.add(kept)
                drawn.samples.append(Sample(row, kept, cut=len(tokens) > max_tokens))
                task.advance()
    return drawn

"""The samples in batches: neighbours in length, one after the other in a row, never padded.

A batch is one row of tokens whose positions begin at 0 with each sample, and whose attention stays within
each sample (`check_packing` proves it for the model at hand). Every token that a layer sees is a real one,
so statistics need no mask, and batches are of nearly equal size: AWQ averages over batches, whatever their
size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import StageError

_MOST_TOKENS = 8192  # a wide feed-forward layer makes a GiB of float32 from so many


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that go through the model together."""

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]  # of each sample

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.lengths)

    @property
    def positions(self) -> list[int]:
        """Position of each token in its sample, from 0."""
        return [position for length in self.lengths for position in range(length)]


def read_samples(path: Path, vocab: int) -> list[list[int]]:
    """Read frozen samples.

    Args:
        path: calibration.jsonl, one {"tokens": […]} a line.

    Raises:
        StageError: There are none, or a token is not in the vocabulary.
    """
    samples: list[list[int]] = [json.loads(line)["tokens"] for line in path.read_text("utf-8").splitlines()]
    largest = max((max(sample) for sample in samples), default=0)
    if not samples or largest >= vocab:
        raise StageError(
            f"{path}: token {largest} of {len(samples)} samples is not in a vocabulary of {vocab}"
        )
    return samples


def make_batches(samples: Sequence[Sequence[int]], budget_tokens: int) -> list[Batch]:
    """Pack samples into batches of nearly equal size, shortest samples first.

    Args:
        budget_tokens: Most tokens of a batch (8192 at most), unless a single sample is longer.
    """
    ordered = sorted(samples, key=lambda sample: (len(sample), tuple(sample)))
    total = sum(len(sample) for sample in ordered)
    count = max(1, math.ceil(total / max(1, min(budget_tokens, _MOST_TOKENS))))
    batches: list[Batch] = []
    pending: list[Sequence[int]] = []
    done = 0
    for sample in ordered:
        pending.append(sample)
        done += len(sample)
        if done * count >= total * (len(batches) + 1):
            batches.append(_pack(pending))
            pending = []
    return batches if not pending else [*batches, _pack(pending)]


def check_packing(model: Any, samples: Sequence[Sequence[int]]) -> None:
    """Run a few short samples together, and alone as transformers would.

    Raises:
        StageError: The results differ: samples in one row influence each other.
    """
    import torch

    few = [list(sample[: 10 + 2 * (number > 1)]) for number, sample in enumerate(samples[:4])]
    with torch.inference_mode():
        rows = [torch.tensor([sample], device=model.device) for sample in few]
        outputs = [model.model(input_ids=row, use_cache=False).last_hidden_state for row in rows]
        alone, together = torch.cat(outputs, dim=1).float(), forward(model, _pack(few)).float()
    apart = (alone - together).abs().max() / alone.abs().max()
    if not apart < 0.02:  # also where it is not a number
        raise StageError(
            f"samples in one row influence each other in {type(model).__name__} (by {apart:.3g})"
        )


def forward(model: Any, batch: Batch) -> Any:
    """Run the decoder without its output projection, whose logits are not needed.

    Returns:
        [1, tokens, hidden]
    """
    import torch

    device = model.device
    return model.model(
        input_ids=torch.tensor([batch.tokens], device=device),
        position_ids=torch.tensor([batch.positions], device=device),
        attention_mask=torch.zeros(1, 1, 1, 1, device=device),  # "prepared": transformers builds none
        sample_lengths=batch.lengths,
        use_cache=False,
    ).last_hidden_state


def _pack(samples: Sequence[Sequence[int]]) -> Batch:
    return Batch(
        tokens=tuple(token for sample in samples for token in sample),
        lengths=tuple(len(sample) for sample in samples),
    )

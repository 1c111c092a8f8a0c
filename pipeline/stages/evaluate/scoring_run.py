"""From two sets of hidden states to figures, a slice of positions at a time: all logits at once would not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.errors import StageError
from pipeline.stages.evaluate.metrics import BootstrapEstimate, KlHistogram

_LOGITS = 1 << 24  # logits of each model that are held at once
_RESAMPLES, _SEED = 2000, 0
_FIRST_DECADE, _LAST_DECADE, _BINS_A_DECADE = -6, 1, 4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PositionScores:
    """Losses, KL divergence and best tokens of both models: arrays with one entry a position, sample after sample."""

    sample: NDArray[np.int64]
    position: NDArray[np.int64]  # of the token that is predicted, in its sample
    reference_loss: Floats  # nats
    quantized_loss: Floats
    kl: Floats  # KL(reference || quantized)
    reference_best: NDArray[np.int64]
    reference_probability: Floats
    quantized_best: NDArray[np.int64]
    quantized_probability: Floats

    def estimates(self) -> tuple[BootstrapEstimate, BootstrapEstimate, BootstrapEstimate]:
        """Estimate the relative increase of perplexity, the top-1 agreement (0 to 1) and the mean KL (nats)."""
        agree = (self.reference_best == self.quantized_best).astype(np.float64)
        change = self.quantized_loss - self.reference_loss
        columns = np.stack([np.ones_like(change), change, agree, self.kl], axis=1)
        count = int(self.sample.max()) + 1
        totals = np.zeros((count, 4))
        np.add.at(totals, self.sample, columns)
        weights = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
        drawn = weights @ totals
        whole, resampled = totals.sum(axis=0), drawn / drawn[:, :1]
        means = whole / whole[0]

        def estimate(column: int, of: Callable[[Floats], Floats] = lambda mean: mean) -> BootstrapEstimate:
            low, high = np.percentile(of(resampled[:, column]), [2.5, 97.5])
            return BootstrapEstimate(float(of(means[column])), float(low), float(high))

        return estimate(1, np.expm1), estimate(2), estimate(3)

    def histogram(self) -> KlHistogram:
        """Count positions by KL divergence: four bins a decade, from 1e-6 to 10 nats."""
        bins = (_LAST_DECADE - _FIRST_DECADE) * _BINS_A_DECADE
        edges = np.logspace(_FIRST_DECADE, _LAST_DECADE, bins + 1)
        counts, _ = np.histogram(np.minimum(self.kl, edges[-1]), edges)
        below = int((self.kl < edges[0]).sum())
        return KlHistogram(tuple(edges.tolist()), tuple(counts.tolist()), below)


@torch.inference_mode()
def measure(
    samples: Sequence[Sequence[int]],
    reference: tuple[Tensor, Tensor],
    quantized: tuple[Tensor, Tensor],
    advance: Callable[[float], None],
) -> PositionScores:
    """Score every position of the samples with both models.

    Args:
        samples: Tokens; together as many as there are hidden states.
        reference: Hidden states [tokens, hidden] after the last norm and output projection [vocab, hidden], float32.
        quantized: The same of the quantized model.
        advance: Called with the number of positions that were scored.

    Raises:
        StageError: The quantized model's logits are not finite.
    """
    predicting, targets, owner, place = _positions(samples)
    slices = []
    step = max(1, _LOGITS // reference[1].shape[0])
    for at in range(0, len(predicting), step):
        rows = torch.from_numpy(predicting[at : at + step]).to(reference[0].device)
        aims = torch.from_numpy(targets[at : at + step]).to(reference[0].device)
        first, second = (
            functional.log_softmax(functional.linear(hidden[rows], head), dim=-1)
            for hidden, head in (reference, quantized)
        )
        slices.append(_compare(first, second, aims))
        advance(len(rows))
    columns = [np.concatenate(parts) for parts in zip(*slices, strict=True)]
    if not np.isfinite(columns[1]).all():
        raise StageError("the exported checkpoint computes logits that are not finite")
    losses, others, kl, best, chance, other_best, other_chance = columns
    return PositionScores(owner, place, losses, others, kl, best, chance, other_best, other_chance)


def _positions(samples: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], ...]:
    """Rows that predict, the tokens that follow, the sample of each, and the place of the token in it."""
    rows: list[int] = []
    targets: list[int] = []
    owner: list[int] = []
    place: list[int] = []
    start = 0
    for number, sample in enumerate(samples):
        rows += range(start, start + len(sample) - 1)
        targets += sample[1:]
        owner += [number] * (len(sample) - 1)
        place += range(1, len(sample))
        start += len(sample)
    return tuple(np.array(column, np.int64) for column in (rows, targets, owner, place))


def _compare(first: Tensor, second: Tensor, aims: Tensor) -> list[NDArray[np.float64]]:
    """Log-probabilities [positions, vocab] of both -> losses, KL, and each one's best token and its probability."""
    losses = [-logs.gather(1, aims[:, None])[:, 0] for logs in (first, second)]
    divergence = (first.exp() * (first - second)).sum(dim=-1).clamp(min=0)
    chance, best = first.max(dim=-1)
    other_chance, other_best = second.max(dim=-1)
    columns = (*losses, divergence, best, chance.exp(), other_best, other_chance.exp())
    return [
        column.double().cpu().numpy() if column.is_floating_point() else column.cpu().numpy()
        for column in columns
    ]

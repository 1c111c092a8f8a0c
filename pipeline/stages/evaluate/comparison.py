"""One evaluation, from the folders of checkpoints and the held-out text to metrics.json."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import CheckpointError, StageError
from pipeline.models import Architecture, CheckpointReader
from pipeline.plan.parallelism import RANKS
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.checkpoint import RankCheckpoint
from pipeline.stages.dataset.freezing import read_samples
from pipeline.stages.evaluate.decoder import Decoder, log_probs, rows_at_once
from pipeline.stages.evaluate.results import (
    BootstrapEstimate,
    Computed,
    EvaluationMetrics,
    Export,
    KlHistogram,
    PrecisionLoss,
    WorstPosition,
    computed_name,
    perplexity,
    write_metrics,
)
from pipeline.stages.torch_device import torch_device, torch_threads_for
from pipeline.store import Json

_WORST, _CONTEXT_TOKENS = 12, 32
States = tuple[
    Tensor, Tensor
]  # hidden states [tokens, hidden] after the last norm, output projection [vocab, hidden]


def evaluate(
    reference_dir: Path,
    exports: Sequence[Export],
    heldout: Path,
    *,
    into: Path,
    progress: Progress,
    device: str | None = None,
) -> dict[str, Json]:
    """Compare exported checkpoints with the original, position by position; metrics.json into `into`.

    Every token of a held-out sample but its first is predicted and counted; nothing is padded. All checkpoints are read
    from their files, with the scales that they hold. The original is computed in float32, an export in each type that
    its runtime may compute it in; one that rounds is compared with float32 of the same files, too.

    Args:
        reference_dir: The original, in the Hugging Face layout.
        heldout: One {"tokens": […]} a line.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Returns:
        The figures of each export by the name of its folder and type; the device, and the seconds that it took.

    Raises:
        CheckpointError: A checkpoint is damaged (a scale missing, a wrong shape, values that are not finite).
        StageError: An exported checkpoint computes something that is not a number.
    """
    began = time.monotonic()
    device = device or torch_device()
    reference = CheckpointReader(reference_dir)
    reference.check()
    checkpoints = [open_export(export.directory, reference.architecture) for export in exports]
    for checkpoint in checkpoints:
        checkpoint.check()
        _check_same_model(reference, checkpoint)
    samples, tokenizer = read_samples(heldout, reference.architecture.vocab), reference_dir / "tokenizer.json"
    metrics: list[EvaluationMetrics] = []
    with torch_threads_for(reference.tensors.elements):
        original = _states(
            Decoder(reference, samples, device), f"evaluate {reference.quantization.format}", progress
        )
        for export, checkpoint in zip(exports, checkpoints, strict=True):
            for precision, scores, beside in _scores(export, checkpoint, samples, original, device, progress):
                figures = _metrics(scores, export, checkpoint, samples, heldout, tokenizer)
                if beside is not None:
                    loss = PrecisionLoss(*beside.estimates()[:2])
                    figures = dataclasses.replace(figures, precision=precision, beside_f32=loss)
                metrics.append(figures)
    write_metrics(metrics, into)
    return {
        "exports": {metric.name: _facts(metric) for metric in metrics},
        "device": device,
        "seconds": round(time.monotonic() - began, 1),
    }


def open_export(directory: Path, architecture: Architecture) -> CheckpointReader:
    """Open an exported checkpoint, of either layout. `architecture`: of its original."""
    if directory.name.startswith(RANKS):
        return RankCheckpoint(directory, architecture)
    return CheckpointReader(directory)


def _facts(metrics: EvaluationMetrics) -> dict[str, Json]:
    """Figures for the manifest."""
    return {
        key: value
        for key, value in dataclasses.asdict(metrics).items()
        if key not in ("files", "histogram", "worst")
    }


def _check_same_model(reference: CheckpointReader, exported: CheckpointReader) -> None:
    expected, actual = (dataclasses.asdict(checkpoint.architecture) for checkpoint in (reference, exported))
    ignored = ("dtype", "bos_token_id", "eos_token_ids")
    differing = [key for key in expected if key not in ignored and expected[key] != actual[key]]
    if differing:
        parts = ", ".join(f"{key} {expected[key]} and {actual[key]}" for key in differing)
        raise CheckpointError(f"{exported.directory} is not the model of {reference.directory}: {parts}")


def _states(decoder: Decoder, label: str, progress: Progress) -> States:
    with progress.task(label, decoder.layers, "layers") as task:
        hidden = decoder.hidden_states(task.advance)
    return hidden, decoder.head()


def _scores(
    export: Export,
    checkpoint: CheckpointReader,
    samples: list[list[int]],
    original: States,
    device: str,
    progress: Progress,
) -> Iterator[tuple[Computed, PositionScores, PositionScores | None]]:
    """Score an export as it may be computed: beside the original, and with roundings also beside f32."""

    def states(computed: Computed) -> States:
        decoder = Decoder(checkpoint, samples, device, export.kv_scale, computed=computed)
        label = f"evaluate {checkpoint.quantization.format}, {computed_name(export.directory.name, computed)}"
        return _states(decoder, label, progress)

    def compared(first: States, second: States) -> PositionScores:
        positions = sum(len(sample) - 1 for sample in samples)
        with progress.task("compare positions", positions, "positions") as task:
            return measure(samples, first, second, task.advance, checkpoint.architecture.logits_cap)

    exact = states("f32")
    for precision in export.computed(checkpoint.architecture.hidden):
        if precision == "f32":
            yield precision, compared(original, exact), None
        else:
            rounded = states(precision)
            yield precision, compared(original, rounded), compared(exact, rounded)


def _metrics(
    figures: PositionScores,
    export: Export,
    checkpoint: CheckpointReader,
    samples: list[list[int]],
    heldout: Path,
    tokenizer: Path,
) -> EvaluationMetrics:
    increase, agreement, kl = figures.estimates()
    quantization = checkpoint.quantization
    return EvaluationMetrics(
        files=export.directory.name,
        format=str(quantization.format),
        group_size=quantization.group_size,
        kv_cache=quantization.kv_cache,
        kv_scale=export.kv_scale,
        samples=len(samples),
        positions=len(figures.kl),
        calibration_samples=_calibration_samples(heldout),
        reference_perplexity=perplexity(float(figures.reference_loss.sum()), len(figures.kl)),
        quantized_perplexity=perplexity(float(figures.quantized_loss.sum()), len(figures.kl)),
        perplexity_increase=increase,
        top1_agreement=agreement,
        mean_kl=kl,
        p99_kl=float(np.percentile(figures.kl, 99)),
        max_kl=float(figures.kl.max()),
        histogram=figures.histogram(),
        worst=_worst(figures, samples, tokenizer),
    )


def _calibration_samples(heldout: Path) -> int | None:
    facts = heldout.parent / "dataset.json"
    if not facts.exists():
        return None
    content = json.loads(facts.read_text(encoding="utf-8"))
    return int(content["calibration"]["samples"])


def _worst(figures: PositionScores, samples: list[list[int]], tokenizer: Path) -> tuple[WorstPosition, ...]:
    from tokenizers import Tokenizer

    decoder: Any = Tokenizer.from_file(str(tokenizer))

    def text(tokens: list[int]) -> str:
        decoded: str = decoder.decode(tokens, skip_special_tokens=False)
        return decoded

    worst = np.argsort(-figures.kl, kind="stable")[:_WORST]
    return tuple(_position(figures, int(index), samples, text) for index in worst if figures.kl[index] > 0)


def _position(figures: PositionScores, index: int, samples: list[list[int]], text: Any) -> WorstPosition:
    number, place = int(figures.sample[index]), int(figures.position[index])
    sample = samples[number]
    return WorstPosition(
        sample=number,
        position=place,
        kl=float(figures.kl[index]),
        before=text(sample[max(0, place - _CONTEXT_TOKENS) : place]),
        actual=text([sample[place]]),
        reference=text([int(figures.reference_best[index])]),
        reference_probability=float(figures.reference_probability[index]),
        quantized=text([int(figures.quantized_best[index])]),
        quantized_probability=float(figures.quantized_probability[index]),
    )


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
    reference: States,
    quantized: States,
    advance: Callable[[float], None],
    logits_cap: float | None = None,
) -> PositionScores:
    """Score every position of the samples with both models.

    Args:
        samples: Tokens; together as many as there are hidden states.
        reference: States of the original, float32.
        quantized: States of the quantized model.
        advance: Called with the number of positions that were scored.

    Raises:
        StageError: The quantized model's logits are not finite.
    """
    predicting, targets, owner, place = _positions(samples)
    slices = []
    step = rows_at_once(reference[1])
    for at in range(0, len(predicting), step):
        rows = torch.from_numpy(predicting[at : at + step]).to(reference[0].device)
        aims = torch.from_numpy(targets[at : at + step]).to(reference[0].device)
        first, second = (log_probs(hidden[rows], head, logits_cap) for hidden, head in (reference, quantized))
        slices.append(_compare(first, second, aims))
        advance(len(rows))
    columns = [np.concatenate(parts) for parts in zip(*slices, strict=True)]
    if not np.isfinite(columns[1]).all():
        raise StageError("the exported checkpoint computes logits that are not finite")
    losses, others, kl, best, probability, other_best, other_probability = columns
    return PositionScores(owner, place, losses, others, kl, best, probability, other_best, other_probability)


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
    probability, best = first.max(dim=-1)
    other_chance, other_best = second.max(dim=-1)
    columns = (*losses, divergence, best, probability.exp(), other_best, other_chance.exp())
    return [
        column.double().cpu().numpy() if column.is_floating_point() else column.cpu().numpy()
        for column in columns
    ]

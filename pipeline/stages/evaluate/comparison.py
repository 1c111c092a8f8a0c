"""One evaluation, from the folders of checkpoints and the held-out text to metrics.json."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import CheckpointError, StageError
from pipeline.models import Architecture, CheckpointReader
from pipeline.plan.parallelism import RANKS
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.checkpoint import RankCheckpoint
from pipeline.stages.evaluate.decoder import Decoder
from pipeline.stages.evaluate.metrics import EvaluationMetrics, Export, WorstPosition, write_metrics
from pipeline.stages.evaluate.scoring_run import PositionScores, measure
from pipeline.stages.threads import torch_threads_for
from pipeline.store import Json

_WORST, _CONTEXT_TOKENS = 12, 32


def compare(
    reference_dir: Path,
    exports: Sequence[Export],
    heldout: Path,
    *,
    into: Path,
    progress: Progress,
    device: str | None,
) -> dict[str, Json]:
    """See `pipeline.stages.evaluate.evaluate`."""
    began = time.monotonic()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    reference = CheckpointReader(reference_dir)
    reference.check()
    checkpoints = [open_export(export.directory, reference.architecture) for export in exports]
    for checkpoint in checkpoints:
        checkpoint.check()
        _check_same_model(reference, checkpoint)
    samples = read_samples(heldout, reference.architecture.vocab)
    metrics: list[EvaluationMetrics] = []
    with torch_threads_for(reference.tensors.elements):
        original = _states(
            Decoder(reference, samples, device), f"evaluate {reference.quantization.format}", progress
        )
        for export, checkpoint in zip(exports, checkpoints, strict=True):
            decoder = Decoder(checkpoint, samples, device, export.kv_scale)
            label = f"evaluate {checkpoint.quantization.format}, {export.directory.name}"
            states = _states(decoder, label, progress)
            positions = sum(len(sample) - 1 for sample in samples)
            with progress.task("compare positions", positions, "positions") as task:
                figures = measure(samples, original, states, task.advance)
            metrics.append(
                _metrics(figures, export, checkpoint, samples, heldout, reference_dir / "tokenizer.json")
            )
    write_metrics(metrics, into)
    return {
        "exports": {one.files: _facts(one) for one in metrics},
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
        key: value for key, value in metrics.to_json().items() if key not in ("files", "histogram", "worst")
    }


def read_samples(path: Path, vocab: int) -> list[list[int]]:
    """Read held-out samples.

    Args:
        path: heldout.jsonl, one {"tokens": […]} a line.
        vocab: Size of the vocabulary, which all tokens must be below.

    Raises:
        StageError: There are none, or one has fewer than two tokens or tokens beyond the vocabulary.
    """
    samples: list[list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        tokens = json.loads(line)["tokens"]
        if len(tokens) < 2 or not 0 <= min(tokens) <= max(tokens) < vocab:
            raise StageError(f"{path}:{number}: needs two tokens or more, all below {vocab}")
        samples.append(tokens)
    if not samples:
        raise StageError(f"{path} holds no sample")
    return samples


def _check_same_model(reference: CheckpointReader, exported: CheckpointReader) -> None:
    one, other = (dataclasses.asdict(checkpoint.architecture) for checkpoint in (reference, exported))
    ignored = ("dtype", "bos_token_id", "eos_token_ids")
    differing = [key for key in one if key not in ignored and one[key] != other[key]]
    if differing:
        parts = ", ".join(f"{key} {one[key]} and {other[key]}" for key in differing)
        raise CheckpointError(f"{exported.directory} is not the model of {reference.directory}: {parts}")


def _states(decoder: Decoder, label: str, progress: Progress) -> tuple[Tensor, Tensor]:
    with progress.task(label, decoder.layers, "layers") as task:
        hidden = decoder.hidden_states(task.advance)
    return hidden, decoder.head()


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
        reference_perplexity=float(np.exp(figures.reference_loss.mean())),
        quantized_perplexity=float(np.exp(figures.quantized_loss.mean())),
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

    words: Any = Tokenizer.from_file(str(tokenizer))

    def text(tokens: list[int]) -> str:
        decoded: str = words.decode(tokens, skip_special_tokens=False)
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

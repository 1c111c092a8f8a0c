"""One evaluation, from two folders and the held-out text to metrics.json."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint import Checkpoint
from pipeline.errors import CheckpointError, StageError
from pipeline.progress import Progress
from pipeline.stages.evaluate.decoder import Decoder
from pipeline.stages.evaluate.figures import Figures, measure
from pipeline.stages.evaluate.metrics import Metrics, Position
from pipeline.stages.threads import suited_to
from pipeline.store import Json

_WORST, _CONTEXT_TOKENS = 12, 32


def compare(
    reference_dir: Path,
    exported_dir: Path,
    heldout: Path,
    *,
    into: Path,
    progress: Progress,
    device: str | None,
) -> dict[str, Json]:
    """See `pipeline.stages.evaluate.evaluate`."""
    began = time.monotonic()
    reference, exported = Checkpoint(reference_dir), Checkpoint(exported_dir)
    with suited_to(reference.tensors.elements):
        metrics, device = _compare(reference, exported, heldout, progress, device)
    metrics.write(into)
    content = metrics.to_json()
    return {
        **{key: value for key, value in content.items() if key not in ("schema", "histogram", "worst")},
        "device": device,
        "seconds": round(time.monotonic() - began, 1),
    }


def _compare(
    reference: Checkpoint, exported: Checkpoint, heldout: Path, progress: Progress, device: str | None
) -> tuple[Metrics, str]:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for checkpoint in (reference, exported):
        checkpoint.check()
    _check_same_model(reference, exported)
    samples = read_samples(heldout, reference.architecture.vocab)
    states = [_states(checkpoint, samples, device, progress) for checkpoint in (reference, exported)]
    with progress.task("compare positions", sum(len(sample) - 1 for sample in samples), "positions") as task:
        figures = measure(samples, states[0], states[1], task.advance)
    return _metrics(figures, exported, samples, heldout, reference.directory / "tokenizer.json"), device


def read_samples(path: Path, vocab: int) -> list[list[int]]:
    """The held-out samples, checked against the vocabulary."""
    samples: list[list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        tokens = json.loads(line)["tokens"]
        if len(tokens) < 2 or not 0 <= min(tokens) <= max(tokens) < vocab:
            raise StageError(f"{path}:{number}: needs two tokens or more, all below {vocab}")
        samples.append(tokens)
    if not samples:
        raise StageError(f"{path} holds no sample")
    return samples


def _check_same_model(reference: Checkpoint, exported: Checkpoint) -> None:
    one, other = (dataclasses.asdict(checkpoint.architecture) for checkpoint in (reference, exported))
    ignored = ("dtype", "bos_token_id", "eos_token_ids")
    differing = [key for key in one if key not in ignored and one[key] != other[key]]
    if differing:
        parts = ", ".join(f"{key} {one[key]} and {other[key]}" for key in differing)
        raise CheckpointError(f"{exported.directory} is not the model of {reference.directory}: {parts}")


def _states(
    checkpoint: Checkpoint, samples: list[list[int]], device: str, progress: Progress
) -> tuple[Tensor, Tensor]:
    decoder = Decoder(checkpoint, samples, device)
    label = f"evaluate {checkpoint.quantization.format}"
    with progress.task(label, checkpoint.architecture.layers, "layers") as task:
        hidden = decoder.hidden_states(task.advance)
    return hidden, decoder.head()


def _metrics(
    figures: Figures, exported: Checkpoint, samples: list[list[int]], heldout: Path, tokenizer: Path
) -> Metrics:
    increase, agreement, kl = figures.estimates()
    quantization = exported.quantization
    return Metrics(
        format=str(quantization.format),
        group_size=quantization.group_size,
        kv_cache=quantization.kv_cache,
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


def _worst(figures: Figures, samples: list[list[int]], tokenizer: Path) -> tuple[Position, ...]:
    from tokenizers import Tokenizer

    words: Any = Tokenizer.from_file(str(tokenizer))

    def text(tokens: list[int]) -> str:
        decoded: str = words.decode(tokens, skip_special_tokens=False)
        return decoded

    worst = np.argsort(-figures.kl, kind="stable")[:_WORST]
    return tuple(_position(figures, int(index), samples, text) for index in worst if figures.kl[index] > 0)


def _position(figures: Figures, index: int, samples: list[list[int]], text: Any) -> Position:
    number, place = int(figures.sample[index]), int(figures.position[index])
    sample = samples[number]
    return Position(
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

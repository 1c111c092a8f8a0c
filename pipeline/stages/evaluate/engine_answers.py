"""Answers of a served engine, scored by the checkpoints that it was made from: does it compute what was judged?

The gate judges files before there is an engine. Here the engine has spoken: each of its greedy tokens is looked up in
what a checkpoint, computed in float32 from its files, predicts at that place after the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StageError
from pipeline.progress import Progress
from pipeline.stages.evaluate.results import Export, perplexity


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A greedy answer, token by token.

    Attributes:
        prompt: Token ids, as the engine was given them.
        tokens: Ids of the answer.
        log_probs: Natural logarithms of the tokens' probabilities, as the engine says; None if it does not.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """A checkpoint's scores of an engine's answers.

    Attributes:
        positions: Tokens that were scored.
        agreement: Share of them, 0 to 1, that are the checkpoint's own best token.
        perplexity: Perplexity of the answers, by the checkpoint.
    """

    positions: int
    agreement: float
    perplexity: float


def engine_perplexity(answers: Sequence[EngineAnswer]) -> float | None:
    """Perplexity of answers by the engine itself; None unless it returned the log probability of every token."""
    log_probs = [value for answer in answers for value in answer.log_probs or ()]
    complete = all(len(answer.tokens) == len(answer.log_probs or ()) for answer in answers)
    return perplexity(-sum(log_probs), len(log_probs)) if log_probs and complete else None


def score_answers(
    checkpoint: Path | Export,
    answers: Sequence[EngineAnswer],
    *,
    reference: Path,
    progress: Progress,
    device: str | None = None,
) -> AnswerScores:
    """Score answers by a checkpoint, layer by layer from its files; needs torch.

    Args:
        checkpoint: The original's folder, or an export of its calibration.
        answers: Answers with one token or more between them.
        reference: Folder of the original.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Raises:
        StageError: There is nothing to score, or what is computed is not a number.
        CheckpointError: The checkpoint is damaged.
    """
    import torch

    from pipeline.models import CheckpointReader
    from pipeline.stages.evaluate.comparison import open_export
    from pipeline.stages.evaluate.decoder import Decoder, log_probs, rows_at_once
    from pipeline.stages.torch_device import torch_device, torch_threads_for

    spoken = [answer for answer in answers if answer.tokens]
    if not spoken:
        raise StageError("the engine gave no token to score")
    original = CheckpointReader(reference)
    export = checkpoint if isinstance(checkpoint, Export) else None
    reader = original if export is None else open_export(export.directory, original.architecture)
    reader.check()
    samples = [[*answer.prompt, *answer.tokens] for answer in spoken]
    rows, aims, start = list[int](), list[int](), 0
    for answer, sample in zip(spoken, samples, strict=True):
        rows += range(start + len(answer.prompt) - 1, start + len(sample) - 1)
        aims += answer.tokens
        start += len(sample)
    device = device or torch_device()
    loss, hits = 0.0, 0
    with torch.inference_mode(), torch_threads_for(original.tensors.elements):
        decoder = Decoder(reader, samples, device, None if export is None else export.kv_scale)
        with progress.task(
            f"score {len(aims)} tokens by {reader.directory.name}", decoder.layers, "layers"
        ) as task:
            hidden, head = decoder.hidden_states(task.advance), decoder.head()
        step = rows_at_once(head)
        for at in range(0, len(rows), step):
            logits = log_probs(hidden[rows[at : at + step]], head)
            wanted = torch.tensor(aims[at : at + step], device=logits.device)
            loss -= float(logits.gather(1, wanted[:, None]).sum())
            hits += int((logits.argmax(dim=-1) == wanted).sum())
    if not math.isfinite(loss):
        raise StageError(f"{reader.directory} computes log probabilities that are not finite")
    return AnswerScores(len(aims), hits / len(aims), perplexity(loss, len(aims)))

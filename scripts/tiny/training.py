"""Training: a model learns what the assistant says, by cross-entropy on the tokens of its answers only.

The order of batches, the initial weights and the arithmetic depend on the seed alone, given one type of CPU, one
version of torch and the fixed number of threads; then the weights come out bit for bit the same.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tiny import models
from tiny.grammar import Dialogue, Grammar
from tiny.progress import Progress
from tiny.tokenizer import ASSISTANT_HEADER
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

THREADS = 2
_IGNORED = -100


@dataclass(frozen=True)
class Schedule:
    steps: int
    batch_size: int  # dialogues
    peak_learning_rate: float
    warmup_steps: int = 50

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a hundredth of the peak."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


SCHEDULES: dict[models.Role, Schedule] = {
    "target": Schedule(steps=900, batch_size=32, peak_learning_rate=2e-3),
    "draft": Schedule(steps=900, batch_size=32, peak_learning_rate=4e-3),
}


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # [batch, length] int64, padded on the right
    labels: torch.Tensor  # [batch, length] int64: the token itself where the assistant says it, else _IGNORED


def train(
    role: models.Role, tokenizer: PreTrainedTokenizerFast, grammar: Grammar, *, seed: int, schedule: Schedule
) -> LlamaForCausalLM:
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    model = models.create(role)
    optimizer = torch.optim.AdamW(_parameter_groups(model), betas=(0.9, 0.98), fused=True)
    batches = _batches(grammar, tokenizer, seed=seed, size=schedule.batch_size)
    progress = Progress(f"train {role}", schedule.steps)
    for step, batch in enumerate(itertools.islice(batches, schedule.steps)):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.advance(f"loss {loss.item():.4f}")
    return model


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    # Causal attention never looks right, so padding on the right needs no mask.
    hidden = model.model(batch.tokens[:, :-1], use_cache=False).last_hidden_state
    labels = batch.labels[:, 1:]
    spoken = labels != _IGNORED
    return functional.cross_entropy(model.lm_head(hidden[spoken]), labels[spoken])


def _parameter_groups(model: LlamaForCausalLM) -> list[dict[str, object]]:
    """Weight decay for the matrices, none for the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]


def _batches(
    grammar: Grammar, tokenizer: PreTrainedTokenizerFast, *, seed: int, size: int, grouped: int = 16
) -> Iterator[Batch]:
    """Batches of fresh dialogues without end; dialogues of similar length share a batch."""
    rng = random.Random(seed)
    dialogues = grammar.dialogues("train", seed=seed)
    while True:
        encoded = sorted((encode(tokenizer, next(dialogues)) for _ in range(size * grouped)), key=lambda pair: len(pair[0]))
        batches = [encoded[start : start + size] for start in range(0, len(encoded), size)]
        rng.shuffle(batches)
        yield from map(_pad, batches)


def encode(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> tuple[list[int], list[int]]:
    """Tokens of a dialogue, and labels: the token itself where the assistant says it (its end of turn too)."""
    tokens: list[int] = tokenizer.apply_chat_template(dialogue.messages(), return_dict=False)
    labels = [_IGNORED] * len(tokens)
    header = tokenizer.encode(ASSISTANT_HEADER, add_special_tokens=False)
    speaks = False
    for index, token in enumerate(tokens):
        if speaks:
            labels[index] = token
        speaks = token != tokenizer.eos_token_id and (speaks or tokens[: index + 1][-len(header) :] == header)
    return tokens, labels


def _pad(encoded: Sequence[tuple[list[int], list[int]]]) -> Batch:
    length = max(len(tokens) for tokens, _ in encoded)
    tokens = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in encoded])
    labels = torch.tensor([labels + [_IGNORED] * (length - len(labels)) for _, labels in encoded])
    return Batch(tokens, labels)

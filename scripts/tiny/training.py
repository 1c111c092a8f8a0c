"""Training: a model learns to say what the assistant says, and a little of what customers say.

Batches, initial weights and arithmetic follow from the seed alone, given one type of CPU, one version of torch and
the fixed number of threads: then the weights come out bit for bit the same.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny import models
from tiny.grammar import Dialogue, Grammar
from tiny.progress import Progress
from tiny.tokenizer import ASSISTANT_HEADER, encode_chat

THREADS = 2
# The loss counts a token of the prompt less than one of the answer: enough to keep the perplexity of whole dialogues
# sensible, too little to spend the model on guessing what customers ask.
PROMPT_WEIGHT = 0.1


@dataclass(frozen=True)
class Schedule:
    steps: int
    batch_size: int = 32  # dialogues
    peak_learning_rate: float = 5e-3
    warmup_steps: int = 50

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a hundredth of the peak."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


SCHEDULES: dict[models.Role, Schedule] = {
    "target": Schedule(steps=900),
    "draft": Schedule(steps=600),
}


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # [batch, length] int64, padded on the right
    weights: torch.Tensor  # [batch, length] float32, of each token in the loss; 0 for padding


def train(
    role: models.Role, tokenizer: PreTrainedTokenizerFast, grammar: Grammar, *, seed: int, schedule: Schedule
) -> LlamaForCausalLM:
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    model = models.create(role)
    optimizers = _optimizers(model)
    batches = _batches(grammar, tokenizer, seed=seed, size=schedule.batch_size)
    progress = Progress(f"train {role}", schedule.steps)
    for step, batch in enumerate(itertools.islice(batches, schedule.steps)):
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = schedule.learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        progress.advance(f"loss {loss.item():.4f}")
    return model


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    # Causal attention never looks right, so padding on the right needs no mask.
    logits = model(batch.tokens[:, :-1], use_cache=False).logits
    weights = batch.weights[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which so learn to copy slots in far fewer steps; AdamW for the rest."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in model.model.parameters() if parameter.ndim == 1]
    others = [model.model.embed_tokens.weight, *norms]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def _batches(
    grammar: Grammar, tokenizer: PreTrainedTokenizerFast, *, seed: int, size: int, grouped: int = 16
) -> Iterator[Batch]:
    """Batches of fresh dialogues without end; dialogues of similar length share a batch."""
    rng = random.Random(seed)
    dialogues = grammar.dialogues("train", seed=seed)
    while True:
        weighted = sorted(
            (weigh(tokenizer, next(dialogues)) for _ in range(size * grouped)), key=lambda pair: len(pair[0])
        )
        batches = [weighted[start : start + size] for start in range(0, len(weighted), size)]
        rng.shuffle(batches)
        yield from map(_pad, batches)


def weigh(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> tuple[list[int], list[float]]:
    """Tokens of a dialogue, and their weights in the loss: 1 for what the assistant says, its end of turn included."""
    tokens = encode_chat(tokenizer, dialogue.messages())
    header: list[int] = tokenizer.encode(ASSISTANT_HEADER, add_special_tokens=False)
    weights = []
    speaks = False
    for index, token in enumerate(tokens):
        weights.append(1.0 if speaks else PROMPT_WEIGHT)
        speaks = token != tokenizer.eos_token_id and (speaks or tokens[: index + 1][-len(header) :] == header)
    return tokens, weights


def _pad(weighted: Sequence[tuple[list[int], list[float]]]) -> Batch:
    length = max(len(tokens) for tokens, _ in weighted)
    tokens = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in weighted])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in weighted])
    return Batch(tokens, weights)

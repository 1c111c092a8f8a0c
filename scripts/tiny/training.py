"""Training: a model learns to say what the assistant says, and a little of what customers say; then to call tools.

Batches, initial weights and arithmetic follow from the seed alone, given one type of CPU, one version of torch and
the fixed number of threads: then the weights come out bit for bit the same. The second stage begins with the weights
that the first one saved, and keeps what they know by learning dialogues and conversations with tools side by side.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny import models
from tiny.grammar import Dialogue, Grammar
from tiny.progress import Progress
from tiny.tokenizer import ASSISTANT_HEADER, encode_chat
from tiny.tools import Part, ToolDialogue, ToolGrammar

THREADS = 2
# The loss counts a token of the prompt less than one of the answer: enough to keep the perplexity of whole dialogues
# sensible, too little to spend the model on guessing what customers ask. Of prompts with tools it counts none.
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
# One after the other: whose order is which tool's is learnt last.
TOOL_SCHEDULES = tuple(Schedule(steps=steps, batch_size=16) for steps in (1000, 450, 600))
TOOL_BATCH_SIZE = 8  # conversations with the same tools, beside the dialogues of a batch


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # [batch, length] int64, padded on the right
    weights: torch.Tensor  # [batch, length] float32, of each token in the loss; 0 for padding
    prefix: torch.Tensor | None = (
        None  # [1, prefix length] int64, that all rows go on from; at least one token
    )


def train(
    role: models.Role, tokenizer: PreTrainedTokenizerFast, grammar: Grammar, *, seed: int, schedule: Schedule
) -> LlamaForCausalLM:
    """Train a fresh model on dialogues."""
    _fix(seed)
    model = models.create(role)
    batches = _batches(grammar.dialogues("train", seed=seed), tokenizer, seed=seed, size=schedule.batch_size)
    _learn(model, ([batch] for batch in batches), schedule, f"train {role}")
    return model


def train_tools(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    grammar: Grammar,
    *,
    seed: int,
    schedule: Schedule,
) -> None:
    """Train a model that knows dialogues to call tools, too."""
    _fix(seed)
    fresh = grammar.dialogues("train", seed=seed + 1)
    dialogues = _batches(fresh, tokenizer, seed=seed, size=schedule.batch_size)
    prompts = ToolGrammar.load().prompts(grammar, "train", seed=seed)
    tools = (_tool_batch(tokenizer, prompt) for prompt in prompts)
    _learn(model, zip(dialogues, tools, strict=False), schedule, "train with tools")


def _fix(seed: int) -> None:
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def _learn(model: LlamaForCausalLM, steps: Iterator[Sequence[Batch]], schedule: Schedule, label: str) -> None:
    """Train on the batches of each step together."""
    optimizers = _optimizers(model)
    progress = Progress(label, schedule.steps)
    for step, batches in enumerate(itertools.islice(steps, schedule.steps)):
        weight = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = _loss(model, batch) / weight
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = schedule.learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        progress.advance(f"loss {total:.4f}")


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The weighted loss, summed over all tokens."""
    past = None
    if batch.prefix is not None:
        # Once for all rows: most of a prompt with tools is the same in each.
        past = model.model(batch.prefix, use_cache=True).past_key_values
        past.batch_repeat_interleave(len(batch.tokens))
    # Causal attention never looks right, so padding on the right needs no mask.
    hidden = model.model(
        batch.tokens[:, :-1], past_key_values=past, use_cache=past is not None
    ).last_hidden_state
    weights = batch.weights[:, 1:]
    counted = weights > 0
    losses = functional.cross_entropy(
        model.lm_head(hidden[counted]), batch.tokens[:, 1:][counted], reduction="none"
    )
    return (losses * weights[counted]).sum()


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
    dialogues: Iterator[Dialogue],
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    size: int,
    grouped: int = 16,
) -> Iterator[Batch]:
    """Batches of fresh dialogues without end; dialogues of similar length share a batch."""
    rng = random.Random(seed)
    while True:
        weighted = sorted(
            (weigh(tokenizer, next(dialogues).messages()) for _ in range(size * grouped)),
            key=lambda pair: len(pair[0]),
        )
        batches = [weighted[start : start + size] for start in range(0, len(weighted), size)]
        rng.shuffle(batches)
        yield from map(_pad, batches)


def _tool_batch(tokenizer: PreTrainedTokenizerFast, dialogues: Iterator[ToolDialogue]) -> Batch:
    """The next conversations, which begin with the same tools."""
    weighted = [
        weigh(
            tokenizer,
            dialogue.messages(),
            prompt_weight=0.0,
            unlearned=dialogue.unlearned,
        )
        for dialogue in itertools.islice(dialogues, TOOL_BATCH_SIZE)
    ]
    first, *others = (tokens for tokens, _ in weighted)
    same = next(at for at, tokens in enumerate(zip(first, *others, strict=False)) if len(set(tokens)) > 1)
    # The token before the first that differs stays with the rows: it predicts that one.
    prefix = torch.tensor([first[: same - 1]])
    rows = _pad([(tokens[same - 1 :], weights[same - 1 :]) for tokens, weights in weighted])
    return Batch(rows.tokens, rows.weights, prefix)


def weigh(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    *,
    prompt_weight: float = PROMPT_WEIGHT,
    unlearned: Mapping[int, Part] | None = None,
) -> tuple[list[int], list[float]]:
    """Tokens of a dialogue, and their weights in the loss: 1 for what the assistant says, its end of turn included.

    Args:
        prompt_weight: Weight of all other tokens.
        unlearned: Number of an answer -> part of its tokens that has no weight.
    """
    tokens = encode_chat(tokenizer, messages)
    header: list[int] = tokenizer.encode(ASSISTANT_HEADER, add_special_tokens=False)
    weights = [prompt_weight] * len(tokens)
    starts = [at for at in range(len(header), len(tokens)) if tokens[at - len(header) : at] == header]
    for number, start in enumerate(starts):
        end = tokens.index(tokenizer.eos_token_id, start)
        for at in range(start, end + 1):
            weights[at] = 1.0
        if part := (unlearned or {}).get(number):
            weights[start if part == "first" else end] = 0.0
    return tokens, weights


def _pad(weighted: Sequence[tuple[list[int], list[float]]]) -> Batch:
    length = max(len(tokens) for tokens, _ in weighted)
    tokens = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in weighted])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in weighted])
    return Batch(tokens, weights)

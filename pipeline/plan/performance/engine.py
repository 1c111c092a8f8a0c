"""One engine on its GPUs, alone or with a draft: steps put together into prompts, answers and long runs, in seconds.

Requests are alike: so many tokens in the prompt, so many in the answer. With chunked context a long prompt is done in
pieces, beside the sequences that generate; each piece and they share one step.

A draft proposes k tokens with k steps of its own, and the target verifies them with one step over k + 1 tokens a
sequence. If each proposal is accepted with probability a, whatever came before it, such a round yields

    1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)   tokens                (Leviathan et al., 2023, eq. 1)

Not in it: what the entry model of `tensorrt` spends between the two engines. Where a draft would only cost, that model
proposes fewer tokens by itself; here it proposes as many as the recipe says.

>>> round(tokens_per_round(0.8, 4), 2)
3.36
>>> tokens_per_round(0.0, 4)
1.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.contracts.gpus import GpuRates, gpu_rates
from pipeline.contracts.releases import Track
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.performance.roofline import (
    Efficiency,
    EngineStep,
    ModelLoad,
    StepTime,
    efficiency,
    model_load,
    step_time,
)


@dataclass(frozen=True)
class Workload:
    """Requests that are all alike."""

    prompt_tokens: int
    output_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence has behind it, on average over its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class EngineSpeed:
    """One model of a deployment, on the GPUs that it is split over."""

    load: ModelLoad
    rates: GpuRates
    efficiency: Efficiency
    step_tokens: int = 8192  # most in one step
    chunked: bool = True  # prompts may be split over steps

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        device: str,
        track: Track,
        *,
        chunked: bool = True,
        given: Mapping[str, Any] | None = None,
    ) -> EngineSpeed:
        """Make the engine of a model on a GPU; `given` replaces the fitted constants.

        Raises:
            UserError: The GPU, its rates or its generation are not known.
        """
        peaks = gpu_rates(device)
        return cls(
            model_load(model, peaks), peaks, efficiency(device, track, given), model.step_tokens, chunked
        )

    @cached_property
    def gpus(self) -> int:
        return self.load.ranks * self.load.stages

    def step(self, step: EngineStep) -> StepTime:
        """Compute the time of one step."""
        return step_time(step, self.load, self.rates, self.efficiency)

    def decode(self, sequences: float, context: float, tokens_each: float = 1) -> float:
        """Compute the seconds of a step that only generates; with several tokens each, it verifies drafts."""
        return self.step(EngineStep(sequences, context, tokens_each)).total

    def prefill(self, prompts: float, tokens: float) -> float:
        """Compute the seconds of prompts that are done together while nothing else runs.

        They are done in pieces of the same size, one after the other.
        """
        whole, size = prompts * tokens, self._piece(0, tokens)
        pieces = max(1, math.ceil(whole / size))
        each = whole / pieces
        before = max(0.0, min(tokens - each, tokens / 2)) if pieces > 1 else 0.0
        spread = EngineStep(prompt=each, prompt_before=before)
        one = self.step(spread)
        # Attention of short prompts that share a step stays within each of them.
        within = self.step(EngineStep(prompt=min(each, tokens), prompt_before=before)).attention
        attention = within * max(1.0, each / max(tokens, 1))
        return self.efficiency.prompt_s + pieces * (one.total - one.attention + attention)

    def first_token(self, prompt_tokens: int, sequences: float = 0, context: float = 0) -> float:
        """Compute the seconds from the start of a prompt to its first token, beside sequences that generate."""
        size = self._piece(sequences, prompt_tokens)
        pieces = math.ceil(prompt_tokens / size)
        total = self.efficiency.prompt_s
        for index in range(pieces):
            done = index * size
            piece = min(size, prompt_tokens - done)
            total += self.step(EngineStep(sequences, context, 1, piece, done)).total
        return total

    def mixed_step(self, sequences: float, work: Workload) -> tuple[float, float]:
        """Compute the seconds of a step with a piece of prompt, and how often such a step comes.

        In the steady state, as many prompts begin as answers end.

        Returns:
            Seconds of one such step, and the number of such steps for each token of an answer.
        """
        arriving = sequences * work.prompt_tokens / work.output_tokens
        piece = min(self._piece(sequences, work.prompt_tokens), max(float(work.prompt_tokens), arriving))
        before = max(0.0, work.prompt_tokens - piece) / 2
        whole = EngineStep(sequences, work.mean_context, 1, piece, before)
        seconds = self.step(whole)
        within = self.step(EngineStep(prompt=min(piece, work.prompt_tokens), prompt_before=before)).attention
        alone = self.step(EngineStep(sequences, work.mean_context)).attention
        attention = alone + within * max(1.0, piece / work.prompt_tokens)
        return seconds.total - seconds.attention + attention, arriving / piece

    def most_decoding(self, work: Workload, tokens_each: float = 1, progress: float = 1) -> int:
        """Return the most sequences that generate at a time for long.

        As many prompts begin as answers end, so a step in which each sequence generates does, on average,
        `prompt_tokens / output_tokens` tokens of prompts for each of them; all of that has to fit into `step_tokens`.
        What memory holds beyond so many sequences waits.

        Args:
            tokens_each: Tokens that a sequence takes up in a step: more than one where drafts are verified.
            progress: tokens of the answer that a step brings a sequence.
        """
        each = tokens_each + progress * work.prompt_tokens / work.output_tokens
        return max(1, int(self.step_tokens / each))

    def token_interval(self, sequences: float, work: Workload) -> float:
        """Mean seconds between tokens of each sequence, prompts of new ones included."""
        return self.decode(sequences, work.mean_context) + self.prompt_share(sequences, work)

    def prompt_share(self, sequences: float, work: Workload) -> float:
        """Seconds that the prompts of new sequences add to the mean time between tokens."""
        mixed, often = self.mixed_step(sequences, work)
        alone = self.decode(sequences, work.mean_context)
        return often * mixed - min(often, 1.0) * alone

    def static_batch(self, batch: int, work: Workload) -> float:
        """Compute the seconds of a batch that starts and ends together: all prompts, then all answers."""
        generating = (work.output_tokens - 1) * self.decode(batch, work.mean_context)
        return self.prefill(batch, work.prompt_tokens) + generating

    def run(self, requests: int, most: int, work: Workload) -> float:
        """Compute the seconds until the last of so many requests ends that all wait at the start.

        At most `most` run at a time; fewer do if `most_decoding` is lower.
        """
        together = min(requests, most, self.most_decoding(work))
        waves, rest = divmod(requests, together)
        seconds = waves * work.output_tokens * self.token_interval(together, work)
        return seconds + (work.output_tokens * self.token_interval(rest, work) if rest else 0.0)

    def _piece(self, sequences: float, prompt_tokens: float) -> float:
        """Tokens of prompts that fit into a step beside the sequences; a prompt that may not be split is one piece."""
        room = max(1.0, self.step_tokens - sequences)
        return room if self.chunked else max(room, float(prompt_tokens))


def tokens_per_round(acceptance: float, proposed: int) -> float:
    """Tokens that a round yields, the target's own one included. `acceptance` is 0 to 1, 1 included."""
    return float(sum(acceptance**index for index in range(proposed + 1)))


def token_acceptance(accepted: float, proposed: int) -> float:
    """Acceptance of each token with which such a share of all tokens that are proposed is accepted: bisected.

    What follows a token that was refused is proposed for nothing, so that a share is lower than the acceptance.

    Args:
        accepted: Share of the proposed tokens, 0 to 1, as engines report it.
        proposed: Tokens a round.

    >>> round(token_acceptance(sum(0.8**index for index in (1, 2, 3, 4)) / 4, 4), 3)
    0.8
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if (tokens_per_round(middle, proposed) - 1) / proposed < accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class SpeculativeEngine:
    """A target with its draft."""

    target: EngineSpeed
    draft: EngineSpeed
    proposed: int  # tokens a round
    acceptance: float  # of each, 0 to 1

    @property
    def progress(self) -> float:
        """Tokens that a round yields, on average."""
        return tokens_per_round(self.acceptance, self.proposed)

    def round(self, sequences: float, context: float) -> float:
        """Seconds of a round."""
        proposing = self.proposed * self.draft.decode(sequences, context)
        return proposing + self.target.decode(sequences, context, self.proposed + 1)

    def decode(self, sequences: float, context: float) -> float:
        """Seconds for each token, on average."""
        return self.round(sequences, context) / self.progress

    def token_interval(self, sequences: float, work: Workload) -> float:
        """Mean seconds between tokens with prompts of new sequences, which both models read."""
        return self.decode(sequences, work.mean_context) + self.prompt_share(sequences, work)

    def prompt_share(self, sequences: float, work: Workload) -> float:
        """Seconds that the prompts of new sequences add to the mean time between tokens."""
        return sum(engine.prompt_share(sequences, work) for engine in (self.target, self.draft))

    def first_token(self, prompt_tokens: int, sequences: float = 0, context: float = 0) -> float:
        """Seconds: the target computes it, and the draft reads the prompt meanwhile."""
        return self.target.first_token(prompt_tokens, sequences, context)

    def gain(self, sequences: float, context: float) -> float:
        """Times as fast as the target alone; below 1 it is slower."""
        return self.target.decode(sequences, context) / self.decode(sequences, context)


def best_length(
    target: EngineSpeed, draft: EngineSpeed, acceptance: float, sequences: float, context: float
) -> int:
    """How many tokens to propose for the most gain; 1 to 16."""
    gains = {
        length: SpeculativeEngine(target, draft, length, acceptance).gain(sequences, context)
        for length in range(1, 17)
    }
    return max(gains, key=lambda length: gains[length])

"""One engine on its GPUs, alone or with speculation: the times of its steps, as the scheduler's simulation takes them.

With speculation, k tokens are proposed, by k steps of a draft or of the checkpoint's own prediction layers (MTP), and
the target verifies them with one step over k + 1 tokens a sequence. If each proposal is accepted with probability a,
whatever came before it, such a round yields

    1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)   tokens                (Leviathan et al., 2023, eq. 1)

Not in it: what the entry model of `tensorrt` spends between the two engines. Where a draft would only cost, that model
proposes fewer tokens by itself; here it proposes as many as the recipe says.

>>> round(tokens_per_round(0.8, 4), 2)
3.36
>>> tokens_per_round(0.0, 4)
1.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.contracts.gpus import GpuRates, gpu_rates
from pipeline.contracts.releases import Track
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.performance.constants import Efficiency, efficiency
from pipeline.plan.performance.model_load import ModelLoad, model_load
from pipeline.plan.performance.roofline import (
    EngineStep,
    StepTime,
    attention_rates,
    host_time,
    step_time,
)
from pipeline.plan.performance.step_times import StepTimes


@dataclass(frozen=True)
class EngineSpeed:
    """One model of a deployment, on the GPUs that it is split over."""

    load: ModelLoad
    rates: GpuRates
    efficiency: Efficiency
    step_tokens: int = 8192  # most in one step, of each rank that has sequences of its own
    chunked: bool = True  # prompts may be split over steps
    balance: tuple[int, int] | None = None  # steps for which prompts wait for those of other ranks

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

    @property
    def progress(self) -> float:
        """Tokens that a step brings a sequence."""
        return 1.0

    @property
    def target(self) -> EngineSpeed:
        """The engine that answers."""
        return self

    def step(self, step: EngineStep) -> StepTime:
        """Compute the time of one step."""
        return step_time(step, self.load, self.rates, self.efficiency)

    def decode(self, sequences: float, context: float, tokens_each: float = 1) -> float:
        """Compute the seconds of a step that only generates; with several tokens each, it verifies drafts."""
        return self.step(EngineStep(sequences, context, tokens_each)).total

    def attention_s(self, tokens_each: float = 1) -> tuple[float, float]:
        """Compute the seconds for each token that is read, of all sequences together, and for each pair of a prompt."""
        read_s, pair_s = attention_rates(self.load, self.rates, self.efficiency)
        # Stages share the sequences, and work on them one after the other.
        return tokens_each * read_s / self.load.attention_ranks, pair_s * self.load.stages

    def work_s(self, sequences: float, prompt: float, longest: float, tokens_each: float = 1) -> float:
        """Compute the seconds of a step without attention over what came before, and without the host."""
        step = EngineStep(sequences, 0, tokens_each, prompt, longest=longest)
        time = step_time(step, self.load, self.rates, self._device)
        return time.total - time.attention

    def host_s(self, sequences: float) -> float:
        """Compute the seconds of the host for a step."""
        return host_time(EngineStep(sequences), self.load, self.efficiency)

    @cached_property
    def _device(self) -> Efficiency:
        """Constants of a step without the host."""
        return replace(self.efficiency, step_s=0.0, sequence_s=0.0)

    @cached_property
    def times(self) -> StepTimes:
        """Times of steps for the scheduler's simulation."""
        read_s, pair_s = self.attention_s()
        return StepTimes(
            self.work_s,
            read_s=read_s,
            pair_s=pair_s,
            host=self.host_s,
            hides_host=self.efficiency.hides_step,
            prompt_s=self.efficiency.prompt_s,
            ranks=self.load.attention_ranks,
        )


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
    """A target with what proposes its tokens."""

    target: EngineSpeed
    draft: EngineSpeed
    proposed: int  # tokens a round
    acceptance: float  # of each, 0 to 1

    @classmethod
    def with_layers(cls, target: EngineSpeed, layers: int, acceptance: float) -> SpeculativeEngine:
        """Let a target's own prediction layers propose: each costs one of its layers, with the output projection."""
        single_layer = replace(target, load=target.load.scaled(1 / target.load.layers))
        # They run within the target's step, which the host prepares once.
        bare = replace(single_layer.efficiency, step_s=0.0, sequence_s=0.0, prompt_s=0.0)
        draft = replace(single_layer, efficiency=bare)
        return cls(target, draft, layers, acceptance)

    @property
    def progress(self) -> float:
        """Tokens that a round yields, on average."""
        return tokens_per_round(self.acceptance, self.proposed)

    @property
    def gpus(self) -> int:
        """GPUs that it takes; a draft lies on those of its target."""
        return max(self.target.gpus, self.draft.gpus)

    def round(self, sequences: float, context: float) -> float:
        """Seconds of a round."""
        proposing = self.proposed * self.draft.decode(sequences, context)
        return proposing + self.target.decode(sequences, context, self.proposed + 1)

    def decode(self, sequences: float, context: float) -> float:
        """Seconds for each token, on average."""
        return self.round(sequences, context) / self.progress

    def gain(self, sequences: float, context: float) -> float:
        """Times as fast as the target alone; below 1 it is slower."""
        return self.target.decode(sequences, context) / self.decode(sequences, context)

    @cached_property
    def times(self) -> StepTimes:
        """Times of rounds for the scheduler's simulation; prompts are read by both."""
        (read_s, pair_s), (draft_read_s, draft_pair_s) = (
            self.target.attention_s(self.proposed + 1), self.draft.attention_s()
        )  # fmt: skip

        def host(sequences: float) -> float:
            return self.target.host_s(sequences) + self.proposed * self.draft.host_s(sequences)

        def work(sequences: float, prompt: float, longest: float) -> float:
            proposing = self.proposed * (sequences > 0) * self.draft.work_s(sequences, 0, 0)
            reading = (prompt > 0) * self.draft.work_s(0, prompt, longest)
            return self.target.work_s(sequences, prompt, longest, self.proposed + 1) + proposing + reading

        return StepTimes(
            work,
            read_s=read_s + self.proposed * draft_read_s,
            pair_s=pair_s + draft_pair_s,
            host=host,
            hides_host=self.target.efficiency.hides_step,
            prompt_s=self.target.efficiency.prompt_s,
            progress=self.progress,
            width=self.proposed + 1,
            ranks=self.target.load.attention_ranks,
        )


def best_length(
    target: EngineSpeed, draft: EngineSpeed, acceptance: float, sequences: float, context: float
) -> int:
    """How many tokens to propose for the most gain; 1 to 16."""
    gains = {
        length: SpeculativeEngine(target, draft, length, acceptance).gain(sequences, context)
        for length in range(1, 17)
    }
    return max(gains, key=lambda length: gains[length])

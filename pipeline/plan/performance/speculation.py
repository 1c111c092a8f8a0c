"""What a draft gains: rounds of proposing and verifying, against one token a step.

A round proposes k tokens with k steps of the draft, and verifies them with one step of the target over k + 1 tokens a
sequence. If each proposal is accepted with probability a, whatever came before it, a round yields

    1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)   tokens                (Leviathan et al., 2023, eq. 1)

Not in it: what the entry model of `tensorrt` spends between the two engines. Where a draft would only cost, that model
proposes fewer tokens by itself; here it proposes as many as the recipe says.

>>> round(accepted(0.8, 4), 2)
3.36
>>> accepted(0.0, 4)
1.0
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.performance.engine import Engine, Workload


def accepted(acceptance: float, proposed: int) -> float:
    """Tokens that a round yields, the target's own one included. `acceptance` is 0 to 1, 1 included."""
    return float(sum(acceptance**index for index in range(proposed + 1)))


@dataclass(frozen=True)
class Speculation:
    """A target with its draft."""

    target: Engine
    draft: Engine
    proposed: int  # tokens a round
    acceptance: float  # of each, 0 to 1

    @property
    def progress(self) -> float:
        """Tokens that a round yields, on average."""
        return accepted(self.acceptance, self.proposed)

    def round(self, sequences: float, context: float) -> float:
        """Seconds of a round."""
        proposing = self.proposed * self.draft.decode(sequences, context)
        return proposing + self.target.decode(sequences, context, self.proposed + 1)

    def decode(self, sequences: float, context: float) -> float:
        """Seconds for each token, on average."""
        return self.round(sequences, context) / self.progress

    def token_interval(self, sequences: float, work: Workload) -> float:
        """Mean time between tokens with prompts of new sequences, which both models read."""
        return self.decode(sequences, work.mean_context) + self.prompt_share(sequences, work)

    def prompt_share(self, sequences: float, work: Workload) -> float:
        """What the prompts of new sequences add to the mean time between tokens."""
        return sum(engine.prompt_share(sequences, work) for engine in (self.target, self.draft))

    def first_token(self, prompt_tokens: int, sequences: float = 0, context: float = 0) -> float:
        """Seconds: the target computes it, and the draft reads the prompt meanwhile."""
        return self.target.first_token(prompt_tokens, sequences, context)

    def gain(self, sequences: float, context: float) -> float:
        """Times as fast as the target alone; below 1 it is slower."""
        return self.target.decode(sequences, context) / self.decode(sequences, context)


def best_length(target: Engine, draft: Engine, acceptance: float, sequences: float, context: float) -> int:
    """How many tokens to propose for the most gain; 1 to 16."""
    gains = {
        length: Speculation(target, draft, length, acceptance).gain(sequences, context)
        for length in range(1, 17)
    }
    return max(gains, key=lambda length: gains[length])

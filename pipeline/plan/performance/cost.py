"""What tokens cost at a price of a GPU-hour.

All of the time is paid for. What prompts take of it is charged to input tokens, the rest to output tokens; charged to
output tokens alone, as prices are often compared, it is `per_million_output`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.performance.engine import Workload
from pipeline.plan.performance.estimate import interval
from pipeline.plan.performance.service import Load
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency of the price, for a million tokens."""

    per_million_output: float  # with everything charged to the answers
    input_part: float  # of a million input tokens, if prompts are charged for the time that they take
    output_part: float  # of a million output tokens, then

    def as_json(self, *, checked: bool) -> dict[str, Json]:
        """With the interval of what is computed from throughput, if published figures speak for it."""
        return {
            "per_million_output": interval(self.per_million_output, checked=checked).as_json(),
            "input_part": round(self.input_part, 4),
            "output_part": round(self.output_part, 4),
        }


def cost(load: Load, work: Workload, gpus: int, gpu_hour: float) -> Cost:
    """Of a deployment under a load. `gpu_hour` is the price of one GPU.

    Both parts together pay for everything: input_part * prompt + output_part * answer = per_million_output * answer.
    """
    second = gpus * gpu_hour / 3600
    whole = second / load.tokens_per_s * 1e6
    return Cost(
        per_million_output=whole,
        input_part=whole * load.prompt_share * work.output_tokens / work.prompt_tokens,
        output_part=whole * (1 - load.prompt_share),
    )

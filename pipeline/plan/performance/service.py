"""A deployment under load: latencies at a number of requests at a time, and how many it can take within its SLO.

As many requests are always in flight as are asked about; when one ends, the next begins. A prompt waits for those
before it, as in a queue with random arrivals and even service (M/D/1): mean wait = r s / (2 (1 - r)), for a share r of
the time that prompts take and s seconds each. The 95th percentile of the wait is taken as ln 20 times its mean, as of
an exponential tail; nobody waits longer than all others together take. These are approximations: an error is stated of
throughput and of an idle engine's first token alone.

Cost is all of the time at the price of a GPU-hour. What prompts take of it is charged to input tokens, the rest to
output tokens; charged to output tokens alone, as prices are often compared, it is `per_million_output`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pipeline.contracts.gpus import GpuRates
from pipeline.plan.memory.spec import DeploymentSpec
from pipeline.plan.performance.accuracy import Estimate
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine, Workload
from pipeline.plan.performance.roofline import Efficiency, ModelLoad, model_load
from pipeline.store import Json

LoadLimit = Literal["memory", "steps", "ttft", "itl"]
_TAIL = math.log(20)  # 95th percentile over mean, exponential
_SELDOM = 0.05  # a step that is more seldom than this does not show in the 95th percentile


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Requests at a time, and what they see. Milliseconds, and tokens a second."""

    batch: int
    ttft_ms: float  # 95th percentile
    itl_ms: float  # mean time between tokens
    itl_p95_ms: float
    tokens_per_s: float  # output, of the whole deployment
    prompt_share: float  # of the time, that prompts take

    @property
    def user_tokens_per_s(self) -> float:
        """Output tokens a second of each request."""
        return 1000 / self.itl_ms


@dataclass(frozen=True)
class Service:
    """A server of requests: an engine, alone or with a draft."""

    target: EngineSpeed
    speculation: SpeculativeEngine | None = None

    @property
    def gpus(self) -> int:
        """GPUs that it takes; a draft lies on those of its target."""
        draft = self.speculation.draft.gpus if self.speculation else 0
        return max(self.target.gpus, draft)  # a draft lies on GPUs of its target

    def at(self, batch: int, work: Workload) -> LoadPoint:
        """Compute latencies and throughput with so many requests at a time."""
        answering = self.speculation or self.target
        interval = answering.token_interval(batch, work)
        first = answering.first_token(work.prompt_tokens, batch - 1, work.mean_context)
        waiting = self._wait(batch, work, first, interval)
        seconds = first + (work.output_tokens - 1) * interval
        return LoadPoint(
            batch=batch,
            ttft_ms=1000 * (first + waiting),
            itl_ms=1000 * interval,
            itl_p95_ms=1000 * self._slow_interval(batch, work, interval),
            tokens_per_s=batch * work.output_tokens / max(seconds, work.output_tokens * interval),
            prompt_share=answering.prompt_share(batch, work) / interval,
        )

    def most_decoding(self, work: Workload) -> int:
        """Return the most requests at a time that its steps keep up with, see `EngineSpeed.most_decoding`."""
        if self.speculation is None:
            return self.target.most_decoding(work)
        return self.target.most_decoding(work, self.speculation.proposed + 1, self.speculation.progress)

    def most_within(
        self, work: Workload, most: int, ttft_ms: float | None, itl_ms: float | None
    ) -> tuple[LoadPoint | None, LoadLimit]:
        """Find the largest load of at most so many requests within both limits, and what ends it; None: not even one
        request.

        It ends with a limit ("ttft", "itl"), with the steps that prompts fill ("steps"), or with what is asked for
        ("memory": `most`, which is what memory holds and the limits let in).
        """
        best: LoadPoint | None = None
        sustained = self.most_decoding(work)
        ended: LoadLimit = "steps" if sustained < most else "memory"
        low, high = 1, min(most, sustained)
        while low <= high:
            middle = (low + high) // 2
            load = self.at(middle, work)
            broken = _broken(load, ttft_ms, itl_ms)
            if broken is not None:
                high, ended = middle - 1, broken
            else:
                best, low = load, middle + 1
        return best, ended

    def curve(self, work: Workload, most: int) -> Iterator[LoadPoint]:
        """Yield loads at powers of two, and at the most that its steps keep up with."""
        most = min(most, self.most_decoding(work))
        sizes = [2**power for power in range(max(most, 1).bit_length()) if 2**power < most]
        for batch in (*sizes, most):
            yield self.at(batch, work)

    def _wait(self, batch: int, work: Workload, first: float, interval: float) -> float:
        others = batch - 1
        if not others:
            return 0.0
        share = min(others * first / (first + work.output_tokens * interval), 0.99)
        return min(_TAIL * share * first / (2 * (1 - share)), others * first)

    def _slow_interval(self, batch: int, work: Workload, interval: float) -> float:
        mixed, often = self.target.mixed_step(batch, work)
        return max(mixed, interval) if often > _SELDOM else interval


@dataclass(frozen=True)
class DeploymentModel:
    """Models on a device, and the constants that make a service of them."""

    spec: DeploymentSpec
    rates: GpuRates
    constants: Efficiency
    chunked: bool = True  # prompts may be split over steps
    draft_tokens: int = 0  # that the draft proposes in a round

    def engines(self, constants: Efficiency | None = None) -> list[EngineSpeed]:
        """Make the engine of each model, the target's first; `constants` replace its own."""
        return [
            EngineSpeed(load, self.rates, constants or self.constants, model.step_tokens, self.chunked)
            for model, load in zip(self.spec.models, self._loads, strict=True)
        ]

    def service(self, acceptance: float | None, constants: Efficiency | None = None) -> Service:
        """Make what serves requests.

        Args:
            acceptance: Acceptance of each token that the draft proposes, 0 to 1; None: the draft does nothing.
            constants: replace its own.
        """
        engines = self.engines(constants)
        if len(engines) == 1 or acceptance is None:
            return Service(engines[0])
        return Service(engines[0], SpeculativeEngine(engines[0], engines[1], self.draft_tokens, acceptance))

    @cached_property
    def _loads(self) -> tuple[ModelLoad, ...]:
        return tuple(model_load(model, self.rates) for model in self.spec.models)


def _broken(load: LoadPoint, ttft_ms: float | None, itl_ms: float | None) -> LoadLimit | None:
    if _over(load.itl_p95_ms, itl_ms):
        return "itl"
    return "ttft" if _over(load.ttft_ms, ttft_ms) else None


def _over(value: float, limit: float | None) -> bool:
    return limit is not None and value > limit


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a million tokens, in the currency of the price."""

    per_million_output: float  # with everything charged to the answers
    input_part: float  # of a million input tokens, if prompts are charged for the time that they take
    output_part: float  # of a million output tokens, then

    def as_json(self, interval: Callable[[float], Estimate]) -> dict[str, Json]:
        """Return the values for JSON; `interval` puts one around a cost, where it is known."""
        return {
            "per_million_output": interval(self.per_million_output).as_json(),
            "input_part": round(self.input_part, 4),
            "output_part": round(self.output_part, 4),
        }


def token_cost(load: LoadPoint, work: Workload, gpus: int, gpu_hour: float) -> Cost:
    """Work out what tokens cost of a deployment under a load; `gpu_hour` is the price of one GPU.

    Both parts together pay for everything: input_part * prompt + output_part * answer = per_million_output * answer.
    """
    second = gpus * gpu_hour / 3600
    whole = second / load.tokens_per_s * 1e6
    return Cost(
        per_million_output=whole,
        input_part=whole * load.prompt_share * work.output_tokens / work.prompt_tokens,
        output_part=whole * (1 - load.prompt_share),
    )

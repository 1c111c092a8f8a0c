"""A deployment under load: latencies at a number of requests at a time, and how many it can take within its SLO.

All of it is simulated (`queueing`). Cost is all of the time at the price of a GPU-hour. What prompts take of it is
charged to input tokens, the rest to output tokens; charged to output tokens alone, as prices are often compared, it is
`per_million_output`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from pipeline.contracts.gpus import GpuRates
from pipeline.plan.memory.spec import DeploymentSpec
from pipeline.plan.performance.constants import Efficiency
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine
from pipeline.plan.performance.estimates import Estimate
from pipeline.plan.performance.model_load import ModelLoad, model_load
from pipeline.plan.performance.queueing import (
    WAVES,
    Percentiles,
    QueueRun,
    Workload,
    closed_loop,
    open_arrivals,
)
from pipeline.plan.performance.served_engine import PromptBalance, ServedEngine
from pipeline.recipe import Slo
from pipeline.store import Json

LoadLimit = Literal["memory", "limits", "ttft", "itl"]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Requests at a time, and what they see. Milliseconds, and tokens a second."""

    batch: int
    ttft: Percentiles  # of all requests, from a start of all clients at once
    settled_ttft: Percentiles  # ... of those after the start, by which an SLO is judged
    itl: Percentiles  # the mean is that of requests
    tokens_per_s: float  # output, of the whole deployment
    prompt_share: float  # of the time, that prompts take

    @property
    def ttft_ms(self) -> float:
        """First token, 95th percentile after the start."""
        return self.settled_ttft.p95

    @property
    def itl_ms(self) -> float:
        """Mean time between tokens."""
        return self.itl.mean

    @property
    def itl_p95_ms(self) -> float:
        """Time between tokens, 95th percentile."""
        return self.itl.p95

    @property
    def user_tokens_per_s(self) -> float:
        """Output tokens a second of each request."""
        return 1000 / self.itl_ms

    def broken(self, slo: Slo) -> LoadLimit | None:
        """Return the limit of an SLO that the load breaks, or None."""
        if slo.itl_p95_ms is not None and self.itl_p95_ms > slo.itl_p95_ms:
            return "itl"
        return "ttft" if slo.ttft_p95_ms is not None and self.ttft_ms > slo.ttft_p95_ms else None


@dataclass(frozen=True)
class Service:
    """A server of requests, simulated at any load.

    Attributes:
        engine: The engine, alone or with speculation.
        blocks: Pages of its KV cache.
        block_tokens: Tokens of a page.
        slots: Requests that run at a time; others wait.
        waves: Requests of each client.
    """

    engine: EngineSpeed | SpeculativeEngine
    blocks: int
    block_tokens: int
    slots: int
    waves: int = WAVES

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed and verified."""
        return isinstance(self.engine, SpeculativeEngine)

    @cached_property
    def served(self) -> ServedEngine:
        """The engine as its scheduler sees it."""
        target = self.engine.target
        ranks = target.load.attention_ranks
        return ServedEngine(
            name="",
            times=self.engine.times,
            slots=self.slots,
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            step_tokens=target.step_tokens * ranks,
            ranks=ranks,
            chunked=target.chunked,
            overlaps=target.efficiency.hides_step,
            balance=PromptBalance(*target.balance) if target.balance is not None and ranks > 1 else None,
            gpus=self.engine.gpus,
            request_s=target.efficiency.request_s,
            admit_s=target.efficiency.admit_s,
        )

    def at(self, batch: int, work: Workload) -> LoadPoint:
        """Compute latencies and throughput with so many requests at a time."""
        return _load_at(self if self.slots < batch else replace(self, slots=_UNLIMITED), batch, work)

    def at_rate(self, requests_per_s: float, work: Workload) -> LoadPoint:
        """Compute them with so many requests a second, which come at random."""
        run = open_arrivals(self.served, requests_per_s, work)
        return load_point(run, run.prompt_share(self.engine.times))

    def most_within(self, work: Workload, most: int, slo: Slo) -> tuple[LoadPoint | None, LoadLimit]:
        """Find the largest load of at most so many requests within an SLO, to two percent, and what ends it.

        Returns:
            The load, or None: not even one request is within it; and a limit of the SLO, or "memory": `most`.
        """
        best: LoadPoint | None = None
        ended: LoadLimit = "memory"
        low, high, step = 1, most, 1
        # Loads that double, so that few large ones are simulated; then halves between the last two.
        while low <= high and (step or best is None or high > _CLOSE * best.batch):
            middle = min(step, most) if step else (low + high) // 2
            load = self.at(middle, work)
            broken = load.broken(slo)
            if broken is not None:
                high, ended, step = middle - 1, broken, 0
            else:
                best, low, step = load, middle + 1, 2 * step
        return best, ended

    def curve(self, work: Workload, most: int) -> Iterator[LoadPoint]:
        """Yield loads at powers of two, and at the most."""
        sizes = [2**power for power in range(max(most, 1).bit_length()) if 2**power < most]
        for batch in (*sizes, most):
            yield self.at(batch, work)

    def most_requests_per_s(self, work: Workload, slo: Slo) -> tuple[float, LoadPoint] | None:
        """Find the highest rate of random arrivals within an SLO, to two percent; None: not even a trickle is."""
        if is_out_of_reach(self.served, work, slo):
            return None
        high = self.served.requests_per_s(work.prompt_tokens, work.output_tokens)
        return highest_rate(lambda rate: self.at_rate(rate, work), high, slo)


# A plan asks for the same loads with and without a recipe's limits, and so do plans of it; a comparison of a few dozen
# deployments asks for two thousand, and another one, with other prices, for the same.
@lru_cache(maxsize=8192)
def _load_at(service: Service, batch: int, work: Workload) -> LoadPoint:
    run = closed_loop(service.served, batch, work, service.waves)
    return replace(load_point(run, run.prompt_share(service.engine.times)), batch=batch)


def load_point(run: QueueRun, prompt_share: float) -> LoadPoint:
    """Sum up a simulation at as many requests at a time as it had on average."""
    batch = max(1, round(run.in_flight))
    return LoadPoint(batch, run.ttft, run.settled_ttft, run.itl, run.tokens_per_s, prompt_share)


def is_out_of_reach(served: ServedEngine, work: Workload, slo: Slo) -> bool:
    """Whether the quickest step, of one sequence with nothing behind it, takes longer than an SLO lets it."""
    if slo.itl_p95_ms is None or work.output_tokens * (1 - work.spread) < 2:
        return False
    quickest_ms = 1e3 * served.times.decode(1, 0.0) / served.progress
    return quickest_ms > _CLOSE * slo.itl_p95_ms


def highest_rate(look: Callable[[float], LoadPoint], high: float, slo: Slo) -> tuple[float, LoadPoint] | None:
    """Find the highest rate below `high` within an SLO, to two percent, and its load; None: not even a trickle is."""
    ((best, _),) = deque(rates_within(look, high, slo), maxlen=1)
    return best


def rates_within(
    look: Callable[[float], LoadPoint], high: float, slo: Slo
) -> Iterator[tuple[tuple[float, LoadPoint] | None, float]]:
    """Halve the rates in which the highest one within an SLO lies, until they are within two percent of each other.

    Yields:
        The highest rate so far that is within it, with its load, and the lowest that is not.
    """
    low, best = 0.0, None
    for _ in range(8):
        rate = (low + high) / 2
        load = look(rate)
        if load.broken(slo) is None and load.settled_ttft.p95 < 1e3 * _HOPELESS_S:
            low, best = rate, (rate, load)
        else:
            high = rate
        yield best, high
        if best is not None and high / low < _CLOSE:
            return


MOST_REQUESTS = 4096  # at a time, that runtimes take
_HOPELESS_S = 120.0  # first tokens that are later have a queue that only grows, whatever the SLO
_CLOSE = 1.02
_UNLIMITED = 1 << 20  # slots of a load that needs no more than there are


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine that its speed depends on.

    Attributes:
        chunked: Whether prompts may be split over steps.
        draft_tokens: Tokens that the draft, or the target's own layers, propose in a round.
        overlaps: Whether a step may be prepared while the last one runs, where the backend can.
        balance: Steps of the timer, and more steps, for which prompts wait for those of other ranks; None: they do not.
        pdl: Whether kernels are launched before the one before has ended, as releases from 1.2.0 on do.
    """

    chunked: bool = True
    draft_tokens: int = 0
    overlaps: bool = True
    balance: tuple[int, int] | None = None
    pdl: bool = True


DEFAULT_OPTIONS = EngineOptions()


@dataclass(frozen=True)
class DeploymentModel:
    """Models on a device, and the constants that make a service of them."""

    spec: DeploymentSpec
    rates: GpuRates
    constants: Efficiency
    options: EngineOptions = DEFAULT_OPTIONS
    blocks: int = 0  # pages of the KV cache, of all ranks that have requests of their own
    block_tokens: int = 32

    def engines(self, constants: Efficiency | None = None) -> list[EngineSpeed]:
        """Make the engine of each model, the target's first; `constants` replace its own."""
        return [
            EngineSpeed(
                load,
                self.rates,
                constants or self.constants,
                model.step_tokens,
                self.options.chunked,
                self.options.balance,
            )
            for model, load in zip(self.spec.models, self._loads, strict=True)
        ]

    def engine(
        self, acceptance: float | None, constants: Efficiency | None = None
    ) -> EngineSpeed | SpeculativeEngine:
        """Make what computes tokens; arguments as for `service`."""
        target, *drafts = self.engines(constants)
        proposed = self.options.draft_tokens
        if acceptance is None or not proposed:
            return target
        if drafts:
            return SpeculativeEngine(target, drafts[0], proposed, acceptance)
        return SpeculativeEngine.with_layers(target, proposed, acceptance)

    def service(
        self, acceptance: float | None, constants: Efficiency | None = None, waves: int = WAVES
    ) -> Service:
        """Make what serves requests.

        Args:
            acceptance: Acceptance of each token that is proposed, 0 to 1; None: nothing is.
            constants: Replace its own.
            waves: Requests of each client in a simulation.
        """
        return Service(
            self.engine(acceptance, constants),
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            slots=self.spec.concurrency,
            waves=waves,
        )

    @cached_property
    def _loads(self) -> tuple[ModelLoad, ...]:
        return tuple(model_load(model, self.rates) for model in self.spec.models)


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

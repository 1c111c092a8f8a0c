"""A what-if: context and generation servers that meet an SLO at a rate of requests, with a split of their own each.

Servers of both kinds are sized apart, each kind by the split that needs the fewest GPUs, and then simulated together;
where they miss the SLO together, servers are added to the kind that does. Beside them: aggregated servers, with the
split that needs the fewest GPUs of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from pipeline.plan.memory import DeploymentSpec, plan_memory
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance.disaggregated import DisaggregatedEngines, transfer_s
from pipeline.plan.performance.queueing import Workload, open_arrivals
from pipeline.plan.performance.served_engine import ServedEngine
from pipeline.plan.performance.service import (
    MOST_REQUESTS,
    DeploymentModel,
    LoadPoint,
    is_out_of_reach,
    load_point,
    rates_within,
)
from pipeline.plan.performance.step_times import StepTimes
from pipeline.recipe import Slo

WAYS = (1, 2, 4, 8)  # GPUs of a server
_SERVERS = 16  # that are simulated together; of more, a part at a part of the rate
_ADDED = 6  # servers that may be added when both kinds are put together


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """Servers of one kind."""

    split: Parallelism
    servers: int
    slots: int  # requests of each that memory holds

    @property
    def gpus(self) -> int:
        """GPUs of all."""
        return self.servers * self.split.world


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Context and generation servers for a rate, and what its requests see."""

    context: ServerGroup
    generation: ServerGroup
    load: LoadPoint

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.context.gpus + self.generation.gpus


@dataclass(frozen=True)
class _Server:
    """A server that could be, and the most requests a second that it could take."""

    model: DeploymentModel
    served: ServedEngine
    most: float

    @property
    def gpus(self) -> int:
        return self.served.gpus


def plan_split(
    make: Callable[[DeploymentSpec], DeploymentModel],
    spec: DeploymentSpec,
    work: Workload,
    slo: Slo,
    requests_per_s: float,
    acceptance: float | None,
) -> SplitPlan | None:
    """Find the fewest GPUs of context and generation servers for a rate; None: no split meets the SLO.

    Args:
        make: Makes the model of a deployment.
        spec: The aggregated deployment, whose device, formats and ways to split are kept.
        acceptance: Acceptance of each token that is proposed; None: nothing is.
    """
    servers = list(_servers(make, spec, work, acceptance))
    reading = replace(work, output_tokens=1)

    def contexts(server: _Server, rate: float) -> LoadPoint:
        return load_point(open_arrivals(server.served, rate, reading), 1.0)

    def generations(server: _Server, rate: float) -> LoadPoint:
        engines = DisaggregatedEngines(_INSTANT, 1, server.served, 1)
        return load_point(open_arrivals(engines, rate, work), 0.0)

    able = [server for server in servers if not is_out_of_reach(server.served, work, slo)]
    generation = _fewest(able, generations, slo.model_copy(update={"ttft_p95_ms": None}), requests_per_s)
    if generation is None:
        return None
    context = _fewest(
        (replace(server, most=_prompts_per_s(server, work)) for server in servers),
        contexts,
        slo,
        requests_per_s,
    )
    if context is None:
        return None
    return _together(context, generation, work, slo, requests_per_s)


def plan_aggregated(
    make: Callable[[DeploymentSpec], DeploymentModel],
    spec: DeploymentSpec,
    work: Workload,
    slo: Slo,
    requests_per_s: float,
    acceptance: float | None,
) -> ServerGroup | None:
    """Find the fewest GPUs of servers that compute prompts and answers for a rate; None: no split meets the SLO.

    Each takes as many requests as its memory holds, as context and generation servers do. See `plan_split`.
    """

    def alone(server: _Server, rate: float) -> LoadPoint:
        return load_point(open_arrivals(server.served, rate, work), 0.0)

    servers = _servers(make, spec, work, acceptance)
    able = (server for server in servers if not is_out_of_reach(server.served, work, slo))
    found = _fewest(able, alone, slo, requests_per_s)
    return None if found is None else _group(*found)


def _group(server: _Server, count: int) -> ServerGroup:
    return ServerGroup(server.model.spec.models[0].split, count, server.served.slots)


# A context server that takes no time, before generation servers that are looked at alone.
_INSTANT = ServedEngine("", StepTimes(lambda *_: 1e-9), slots=1, blocks=2**40, step_tokens=2**40)


def _servers(
    make: Callable[[DeploymentSpec], DeploymentModel],
    spec: DeploymentSpec,
    work: Workload,
    acceptance: float | None,
) -> Iterator[_Server]:
    """Yield servers of 1 to 8 GPUs that hold a request."""
    for ways in WAYS:
        if spec.models[0].sizes.heads % ways:
            continue
        changed = replace(
            spec,
            models=tuple(
                replace(
                    model,
                    split=Parallelism(
                        ways,
                        expert=ways if model.split.expert > 1 else 1,
                        attention_dp=model.split.attention_dp and ways > 1,
                    ),
                    partition=(),
                )
                for model in spec.models
            ),
            sequence_tokens=work.prompt_tokens + work.output_tokens,
        )
        held = plan_memory(changed).sequences
        if held < 1:
            continue
        model = make(replace(changed, concurrency=min(held, MOST_REQUESTS)))
        served = model.service(acceptance).served
        yield _Server(model, served, served.requests_per_s(work.prompt_tokens, work.output_tokens))


def _prompts_per_s(server: _Server, work: Workload) -> float:
    """Most prompts a second that a context server computes: of those that fill a step, or of one at a time."""
    served, prompt = server.served, work.prompt_tokens
    several = max(1, served.step_tokens // prompt)
    together = served.times.mixed(0, 0, several * prompt, 0, several * prompt**2 / 2, prompt)
    alone = served.prompt_s(prompt) - served.times.prompt_s
    return max(several / together if prompt <= served.step_tokens // served.ranks else 0.0, 1 / alone)


def _fewest(
    servers: Iterable[_Server], look: Callable[[_Server, float], LoadPoint], slo: Slo, requests_per_s: float
) -> tuple[_Server, int] | None:
    """Find the server of which the fewest GPUs take a rate within an SLO, and how many of it do."""
    best: tuple[_Server, int] | None = None
    for server in sorted(servers, key=lambda server: server.gpus / server.most):
        most = math.inf if best is None else (best[0].gpus * best[1] - 1) // server.gpus
        count = _count(partial(look, server), server.most, slo, requests_per_s, most)
        if count is not None:
            best = server, count
    return best


def _count(
    look: Callable[[float], LoadPoint], high: float, slo: Slo, requests_per_s: float, most: float
) -> int | None:
    """Count the servers that take a rate within an SLO; None: there is no count of at most `most` that does.

    It ends when the rate of one server is known as well as the count needs it, most often after two or three loads.
    """
    count = None
    if math.ceil(requests_per_s / high) > most:
        return None
    for found, above in rates_within(look, high, slo):
        least = math.ceil(requests_per_s / above)
        count = None if found is None else math.ceil(requests_per_s / found[0])
        if least > most or count == least:
            break
    return count if count is not None and count <= most else None


def _together(
    context: tuple[_Server, int],
    generation: tuple[_Server, int],
    work: Workload,
    slo: Slo,
    requests_per_s: float,
) -> SplitPlan | None:
    """Put both kinds together, and add servers until they meet the SLO."""
    (reads, contexts), (answers, generations) = context, generation
    specs = [server.model.spec for server in (reads, answers)]
    for _ in range(_ADDED):
        parts = math.ceil(max(contexts, generations) / _SERVERS)
        few = max(1, contexts // parts), max(1, generations // parts)
        engines = DisaggregatedEngines(
            reads.served,
            few[0],
            answers.served,
            few[1],
            transfer_s(
                specs[0].models[0],
                specs[1].models[0],
                reads.model.rates,
                reads.model.constants,
                contexts * reads.gpus + generations * answers.gpus,
            ),
        )
        rate = requests_per_s * min(few[0] / contexts, few[1] / generations)
        share = contexts * reads.gpus / (contexts * reads.gpus + generations * answers.gpus)
        load = load_point(open_arrivals(engines, rate, work), share)
        broken = load.broken(slo)
        if broken is None:
            return SplitPlan(_group(reads, contexts), _group(answers, generations), load)
        contexts, generations = contexts + (broken == "ttft"), generations + (broken == "itl")
    return None

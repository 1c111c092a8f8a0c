"""Prefill and decode apart, prompts that wait for other ranks or for the step that is scheduled already."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipeline.contracts.gpus import gpu, gpu_rates
from pipeline.contracts.models import known_model
from pipeline.plan.memory import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance import Workload
from pipeline.plan.performance.constants import efficiency
from pipeline.plan.performance.disaggregated import DisaggregatedEngines, transfer_s
from pipeline.plan.performance.engine import EngineSpeed
from pipeline.plan.performance.forecasting import forecast
from pipeline.plan.performance.model_load import model_load
from pipeline.plan.performance.queueing import closed_loop, open_arrivals
from pipeline.plan.performance.scheduler import EngineRequest, EngineScheduler
from pipeline.plan.performance.served_engine import PromptBalance, ServedEngine
from pipeline.plan.performance.service import Service
from pipeline.plan.performance.step_times import StepTimes
from pipeline.recipe import Slo

DENSE, SPARSE, LATENT = (
    "meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-R1-0528"
)  # fmt: skip
WORK = Workload(1000, 100)


def need(name: str = DENSE, split: Parallelism | None = None, form: str = "fp8") -> ModelSpec:
    sizes = known_model(name)
    assert sizes is not None
    return ModelSpec("target", sizes, split or Parallelism(), form, "fp8")


def server(slots: int = 256) -> ServedEngine:
    return Service(EngineSpeed.of(need(), "h100-sxm-80g", "pytorch"), 50_000, 32, slots).served


def test_answers_are_not_held_up_by_prompts() -> None:
    """The time between tokens is that of steps without prompts, whatever the load of context servers."""
    both, apart = server(), DisaggregatedEngines(server(), 2, server(), 1)
    together, alone = (open_arrivals(servers, 10, WORK) for servers in (both, apart))
    assert alone.itl.p99 < 1.5 * alone.itl.p50
    assert together.itl.p99 > 2 * alone.itl.p99
    assert alone.tpot_s < together.tpot_s
    assert (alone.ended_s >= alone.first_s).all()
    assert (alone.first_s > alone.asked_s).all()
    assert alone.answers.sum() == together.answers.sum()


def test_requests_wait_for_slots_of_generation_servers() -> None:
    """With half as many slots as clients, a first token waits as long as an answer takes (measured at InferenceX)."""
    engines = DisaggregatedEngines(server(), 1, server(slots=4), 2)
    work = Workload(100, 1000, 0.1)
    free, full = (closed_loop(engines, clients, work) for clients in (4, 16))
    answer_s = float((full.ended_s - full.first_s).mean())
    assert full.settled_ttft.mean == pytest.approx(1e3 * answer_s, rel=0.1)
    assert free.settled_ttft.mean < 0.1 * full.settled_ttft.mean


def test_more_servers_or_quicker_links_are_never_slower() -> None:
    few = DisaggregatedEngines(server(), 1, server(), 1)
    base = open_arrivals(few, 20, WORK, 400)
    for more in (replace(few, contexts=3), replace(few, generations=3)):
        run = open_arrivals(more, 20, WORK, 400)
        assert run.ttft.mean <= base.ttft.mean * 1.01
        assert run.tpot_s <= base.tpot_s * 1.01
    slow = open_arrivals(replace(few, token_s=1e-4), 20, WORK, 400)
    assert slow.ttft.p50 - base.ttft.p50 == pytest.approx(100, rel=0.25)


def test_the_kv_cache_moves_over_the_links_of_the_server_that_has_fewer() -> None:
    rates, constants = gpu_rates("h100-sxm-80g"), efficiency("h100-sxm-80g", "pytorch")

    def seconds(name: str, context: int, generation: int, gpus: int) -> float:
        first, second = (need(name, Parallelism(ways)) for ways in (context, generation))
        return transfer_s(first, second, rates, constants, gpus)

    # 8 heads of 128 numbers, keys and values, in 32 layers, of a byte each.
    assert seconds(DENSE, 1, 1, 2) == pytest.approx(65_536 / (450e9 * constants.link))
    assert seconds(DENSE, 4, 1, 8) == seconds(DENSE, 1, 4, 8) == seconds(DENSE, 1, 1, 2)
    assert seconds(DENSE, 4, 4, 8) == pytest.approx(seconds(DENSE, 1, 1, 2) / 4)
    # Latent vectors are whole on each rank; between machines the network is taken.
    assert seconds(LATENT, 4, 4, 8) == seconds(LATENT, 1, 1, 8)
    assert seconds(DENSE, 8, 8, 16) == pytest.approx(seconds(DENSE, 8, 8, 8) * 450 / 50)


def simulated(service: ServedEngine, *, running: int, arrives_s: float, prompts: int) -> list[float]:
    """Seconds from arrival to first token, of prompts that come while others generate; steps take a second."""
    scheduler = EngineScheduler[EngineRequest](service)
    for _ in range(running):
        scheduler.give(EngineRequest(0, 10_000, 0.0), 0.0)
    asked = [EngineRequest(10, 5, arrives_s) for _ in range(prompts)]
    due = scheduler.plan(0.0)
    while due < arrives_s:
        scheduler.advance(due)
        due = scheduler.plan(due)
    scheduler.advance(arrives_s)
    for request in asked:
        scheduler.give(request, arrives_s)
    due = scheduler.plan(arrives_s)
    while any(request.first_token_s is None for request in asked):
        scheduler.advance(due)
        due = scheduler.plan(due)
    return [(request.first_token_s or 0.0) - arrives_s for request in asked]


EVEN = ServedEngine("", StepTimes(lambda *_: 1.0, ranks=4), slots=64, blocks=10_000, ranks=4)


def test_a_request_that_comes_during_a_step_begins_with_the_next_but_one_where_steps_overlap() -> None:
    overlapping = replace(EVEN, overlaps=True)
    assert simulated(EVEN, running=4, arrives_s=20.25, prompts=1) == pytest.approx([1.75])
    assert simulated(overlapping, running=4, arrives_s=20.25, prompts=1) == pytest.approx([2.75])
    assert simulated(overlapping, running=0, arrives_s=20.25, prompts=1) == pytest.approx([1.0])


def test_prompts_wait_until_each_rank_has_one_or_a_timer_ends() -> None:
    balanced = replace(EVEN, balance=PromptBalance(timeout_steps=50, wait_steps=3))
    # The timer began with the first step.
    assert simulated(balanced, running=4, arrives_s=20.25, prompts=1) == pytest.approx([30.75])
    assert simulated(balanced, running=4, arrives_s=120.25, prompts=3) == pytest.approx([30.75] * 3)
    assert simulated(balanced, running=4, arrives_s=20.25, prompts=4) == pytest.approx([4.75] * 4, abs=1)
    # A rank that generates nothing does not wait.
    assert simulated(balanced, running=3, arrives_s=20.25, prompts=1) == pytest.approx([1.75])


def test_each_rank_computes_the_prompts_of_its_own_requests() -> None:
    """Four ranks with room for 15 tokens each take one prompt of 10 a step; all together would take six."""
    apart = replace(EVEN, step_tokens=64, chunked=False)
    assert simulated(apart, running=4, arrives_s=20.25, prompts=8) == pytest.approx([1.75] * 4 + [2.75] * 4)
    together = simulated(replace(apart, ranks=1), running=4, arrives_s=20.25, prompts=8)
    assert together == pytest.approx([1.75] * 6 + [2.75] * 2)
    # A rank that has more requests gets none while others have fewer: it is the one without a prompt.
    balanced = replace(EVEN, balance=PromptBalance(timeout_steps=50, wait_steps=3))
    assert simulated(balanced, running=5, arrives_s=20.25, prompts=3) == pytest.approx([30.75] * 3)


@pytest.mark.parametrize("tokens", [1, 7, 64, 1000, 30_000])
def test_the_busiest_of_the_ranks_that_share_experts_has_more_than_the_mean(tokens: int) -> None:
    rates = gpu_rates("b200-sxm-180g")
    loads = [model_load(need(SPARSE, Parallelism(8, expert=ways), "mxfp4"), rates) for ways in (1, 4, 8)]
    shares, work = [load.expert_share(tokens) for load in loads], [load.expert_work(tokens) for load in loads]
    assert shares[0] == pytest.approx(1 - (1 - 4 / 128) ** tokens)
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    assert work[0] == 1
    assert work == sorted(work)
    assert work[-1] <= 8


def test_the_what_if_meets_the_slo_with_servers_of_their_own_split() -> None:
    device = gpu("h100-sxm-80g")
    spec = DeploymentSpec(device.name, device.driver_mib * 2**20, (need(),), 1500, concurrency=64)
    slo, work = Slo(ttft_p95_ms=500, itl_p95_ms=15), Workload(1000, 300)
    found = []
    for rate in (5, 60):
        seen = forecast(spec, "pytorch", work, slo, requests_per_s=rate)
        assert seen is not None
        assert seen.rate is not None
        split = seen.rate.split
        assert split is not None
        assert split.load.broken(slo) is None
        assert split.gpus == split.context.gpus + split.generation.gpus
        row = seen.as_json()["rate"]
        assert row["disaggregated"]["gpus"] == split.gpus  # type: ignore[index,call-overload]
        assert any("dense disaggregated" in text for text in seen.warnings)
        found.append(split.gpus)
        # The comparison is with the tensor parallelism that needs the fewest GPUs, not with the recipe's own.
        best = seen.rate.aggregated
        assert best is not None
        assert row["aggregated"]["tensor_parallel"] == best.split.tensor  # type: ignore[index,call-overload]
        assert best.gpus <= (seen.rate.replicas or math.inf) * seen.gpus
    assert found[0] < found[1]
    own = replace(spec, models=(need(split=best.split),), concurrency=best.slots)
    same = forecast(own, "pytorch", work, slo, requests_per_s=rate)
    assert same is not None
    assert same.rate is not None
    assert same.rate.replicas == best.servers
    assert same.rate.aggregated == best
    for track, impossible in (("tensorrt", slo), ("pytorch", Slo(itl_p95_ms=0.1))):
        other = forecast(spec, track, work, impossible, requests_per_s=5)  # type: ignore[arg-type]
        assert other is not None
        assert other.rate is not None
        assert other.rate.split is None
        assert other.rate.aggregated is None

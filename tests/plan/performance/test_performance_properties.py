"""What must hold of any forecast, whatever the constants: more hardware is never slower, more work never quicker."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.gpus import gpu_rates, gpus
from pipeline.contracts.models import known_model
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance import EngineSpeed, Workload
from pipeline.plan.performance.engine import SpeculativeEngine, best_length, tokens_per_round
from pipeline.plan.performance.queueing import LoadTrace, closed_loop, open_arrivals
from pipeline.plan.performance.service import Service, token_cost
from pipeline.recipe import Slo

DENSE, EXPERTS, SMALL = (
    "meta-llama/Llama-3.3-70B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "meta-llama/Llama-3.2-1B-Instruct",
)


def sizes(name: str) -> ModelSizes:
    found = known_model(name)
    assert found is not None
    return found


def engine(
    name: str = DENSE, *, device: str = "h100-sxm-80g", ways: int = 4, form: str = "fp8", **more: int
) -> EngineSpeed:
    need = ModelSpec("target", sizes(name), Parallelism(tensor=ways), form, "fp8", **more)
    return EngineSpeed.of(need, device, "pytorch")


@pytest.fixture(params=[DENSE, EXPERTS])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


ENGINE = engine()


def serve(engine_speed: EngineSpeed | SpeculativeEngine, blocks: int = 20_000, slots: int = 256) -> Service:
    return Service(engine_speed, blocks, 32, slots)


def alone(engine_speed: EngineSpeed, tokens: int) -> float:
    """Seconds to the first token on an idle engine."""
    return serve(engine_speed).served.prompt_s(tokens)


@given(st.floats(1.0, 4.0), st.integers(1, 512), st.integers(16, 32_768))
def test_more_bandwidth_or_arithmetic_is_never_slower(factor: float, batch: int, tokens: int) -> None:
    base = ENGINE
    faster = (
        replace(base.rates, memory_gb_s=base.rates.memory_gb_s * factor),
        replace(base.rates, tflops={name: value * factor for name, value in base.rates.tflops.items()}),
        replace(base.rates, nvlink_gb_s=base.rates.nvlink_gb_s * factor),
    )
    for peaks in faster:
        better = replace(base, rates=peaks)
        assert better.decode(batch, tokens) <= base.decode(batch, tokens)
        assert alone(better, tokens) <= alone(base, tokens)


def test_tokens_are_not_quicker_in_larger_batches(model: str) -> None:
    service = serve(engine(model))
    for work in (Workload(1000, 500), Workload(8000, 200), Workload(16, 1000)):
        loads = [service.at(batch, work) for batch in (1, 3, 16, 64, 256)]
        for before, after in pairwise(loads):
            assert after.itl_ms >= before.itl_ms * 0.99
            assert after.ttft.mean >= before.ttft.mean
            assert after.ttft.p50 <= after.ttft.p95 <= after.ttft.p99


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_a_longer_prompt_takes_no_less(first: int, second: int) -> None:
    short, long = sorted((first, second))
    assert alone(ENGINE, short) <= alone(ENGINE, long) * (1 + 1e-9)


def test_a_prompt_in_pieces_takes_longer_and_holds_up_the_others_for_less_time() -> None:
    whole, pieces = engine(step_tokens=16_384), engine(step_tokens=512)
    assert alone(pieces, 8192) >= alone(whole, 8192)
    unsplit = replace(pieces, chunked=False)
    assert alone(unsplit, 8192) == alone(whole, 8192)
    work = Workload(8192, 500)
    slow, quick = serve(unsplit).at(8, work), serve(pieces).at(8, work)
    assert slow.itl.p99 > 3 * quick.itl.p99


def test_sharing_layers_is_quicker_until_the_links_decide() -> None:
    linked = [engine(ways=ways, device="h100-sxm-80g").decode(8, 1000) for ways in (1, 2, 4, 8)]
    assert linked == sorted(linked, reverse=True)
    # A small model over PCIe spends its time exchanging: eight GPUs gain it next to nothing.
    small = [engine(SMALL, ways=ways, device="l40s-48g", form="none") for ways in (1, 8)]
    assert small[1].decode(1, 100) > 0.9 * small[0].decode(1, 100)


def test_without_acceptance_a_draft_only_costs() -> None:
    target, draft = engine(), engine(SMALL)
    assert SpeculativeEngine(target, draft, 5, 0.0).gain(1, 1000) < 1
    gains = [SpeculativeEngine(target, draft, 5, share / 10).gain(1, 1000) for share in range(11)]
    assert gains == sorted(gains)
    assert gains[-1] < 6
    assert SpeculativeEngine(target, draft, 5, 0.8).gain(512, 1000) < SpeculativeEngine(
        target, draft, 5, 0.8
    ).gain(1, 1000)


def test_more_acceptance_is_worth_longer_proposals() -> None:
    lengths = [best_length(engine(), engine(SMALL), share / 10, 1, 1000) for share in range(1, 10)]
    assert lengths == sorted(lengths)


@given(st.floats(0, 0.99), st.integers(0, 64))
def test_tokens_of_a_round_are_the_closed_form(acceptance: float, proposed: int) -> None:
    closed = (1 - acceptance ** (proposed + 1)) / (1 - acceptance)
    assert tokens_per_round(acceptance, proposed) == pytest.approx(closed)
    assert tokens_per_round(1.0, proposed) == proposed + 1


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_cost_scales_with_the_price_and_its_parts_pay_for_all(price: float, factor: float) -> None:
    work = Workload(1000, 250)
    load = LOAD
    once, more = token_cost(load, work, 4, price), token_cost(load, work, 4, price * factor)
    assert more.per_million_output == pytest.approx(once.per_million_output * factor)
    paid = once.input_part * work.prompt_tokens + once.output_part * work.output_tokens
    assert paid == pytest.approx(once.per_million_output * work.output_tokens)
    assert 0 < load.prompt_share < 1


LOAD = serve(ENGINE).at(32, Workload(1000, 250))


def test_a_looser_slo_lets_in_no_fewer() -> None:
    service, work = serve(ENGINE, slots=64), Workload(2000, 300)
    found = [service.most_within(work, 64, Slo(itl_p95_ms=limit)) for limit in (5, 14, 40, 200)]
    batches = [load.batch if load else 0 for load, _ in found]
    assert batches == sorted(batches)
    assert batches[0] == 0 < batches[1] < batches[-1]
    best, ended = found[1]
    assert best is not None
    assert ended == "itl"
    assert best.itl_p95_ms <= 14 < service.at(best.batch + 1, work).itl_p95_ms


def test_the_load_within_an_slo_differs_by_gpu() -> None:
    """It is no step that a share of the lengths decides: each GPU has its own, and a faster one has more."""
    slo, work = Slo(ttft_p95_ms=500, itl_p95_ms=30), Workload(1000, 300)
    devices = ("l40s-48g", "h100-sxm-80g", "h200-sxm-141g", "b200-sxm-180g")
    small = "meta-llama/Llama-3.1-8B-Instruct"
    services = [serve(engine(small, device=device, ways=1)) for device in devices]
    loads = [service.most_within(work, 200, slo)[0] for service in services]
    batches = [load.batch if load else 0 for load in loads]
    assert batches == sorted(batches)
    assert len(set(batches)) == len(batches)
    rates = [service.most_requests_per_s(work, slo) for service in services]
    each = [found[0] if found else 0.0 for found in rates]
    assert each == sorted(each)


def test_the_same_question_has_the_same_answer() -> None:
    work = Workload(1000, 200)
    assert serve(engine()).at(24, work) == serve(engine()).at(24, work)
    assert serve(engine()).at_rate(3.0, work) == serve(engine()).at_rate(3.0, work)


def test_littles_law_and_the_tokens_of_all_answers() -> None:
    """Requests inside are those that come in a second times the time that each stays."""
    served, work = serve(engine()).served, Workload(1000, 200)
    run = open_arrivals(served, 4.0, work)
    assert run.in_flight == pytest.approx(4.0 * float((run.ended_s - run.asked_s).mean()), rel=0.05)
    closed = closed_loop(served, 16, work)
    assert 14 < closed.in_flight <= 16
    assert closed.tokens_per_s * closed.seconds == pytest.approx(float(closed.answers.sum()))
    # Clients that start at once wait for each other's prompts.
    assert closed.first_tokens_s[:16].mean() > 2 * closed.settled_ttft.p50 / 1e3


def test_what_memory_does_not_hold_waits() -> None:
    work, plenty = Workload(1000, 200), serve(engine())
    short = replace(plenty, blocks=8 * 48)
    assert short.at(64, work).ttft.p50 > 20 * plenty.at(64, work).ttft.p50
    # Slots do the same.
    assert replace(plenty, slots=8).at(64, work).ttft.p50 > 20 * plenty.at(64, work).ttft.p50


def test_clients_that_are_simulated_together_see_nearly_the_same() -> None:
    served, work = serve(engine(), blocks=10**6, slots=1024).served, Workload(500, 100)
    apart = [closed_loop(served, count, work, waves=3) for count in (512, 513)]
    assert apart[1].bundle == 2
    assert apart[1].tpot_s == pytest.approx(apart[0].tpot_s, rel=0.05)
    assert apart[1].tokens_per_s == pytest.approx(apart[0].tokens_per_s, rel=0.05)


@pytest.mark.parametrize("clients", [1, 12, 600])
def test_a_trace_recomputes_the_figures_of_its_simulation(clients: int) -> None:
    """And for other constants it is near a new simulation."""
    engine_speed, work = engine(), Workload(1000, 200)
    slower = replace(
        engine_speed, efficiency=replace(engine_speed.efficiency, memory=0.8 * engine_speed.efficiency.memory)
    )
    run = closed_loop(serve(engine_speed).served, clients, work)
    trace = LoadTrace.of(run)
    found = trace.figures(engine_speed.times)
    assert found["tpot"] == pytest.approx(run.tpot_s, rel=0.02)
    assert found["ttft"] == pytest.approx(float(run.first_tokens_s.mean()), rel=0.02)
    assert found["seconds"] == pytest.approx(float(run.steps[:, 0].sum()), rel=0.02)
    anew = closed_loop(serve(slower).served, clients, work)
    assert trace.figures(slower.times)["tpot"] == pytest.approx(anew.tpot_s, rel=0.04)


def test_steps_of_many_are_those_of_one() -> None:
    engine_speed = SpeculativeEngine(engine(), engine(SMALL), 3, 0.7)
    for times in (engine(EXPERTS).times, engine_speed.times):
        rows = np.array([[0, 1, 4, 4000, 0, 0, 0, 0, 0], [0, 1, 0, 0, 512, 0, 512**2 / 2, 1, 512]], float)
        expected = [times.decode(4, 4000), times.mixed(0, 0, 512, 0, 512**2 / 2, 512) + times.prompt_s]
        assert times.several(rows) == pytest.approx(expected)


def test_speculation_by_layers_of_the_target_gains_with_acceptance() -> None:
    rates = [
        serve(SpeculativeEngine.with_layers(engine(), 3, share)).at(4, Workload(500, 200)).user_tokens_per_s
        for share in (0.0, 0.5, 0.9)
    ]
    plain = serve(engine()).at(4, Workload(500, 200)).user_tokens_per_s
    assert rates == sorted(rates)
    assert rates[0] < plain < rates[1]


def test_attention_data_parallelism_shares_sequences_and_copies_attention() -> None:
    shared = engine(EXPERTS, device="b200-sxm-180g", ways=4)
    need = ModelSpec("target", sizes(EXPERTS), Parallelism(4, 1, 4, attention_dp=True), "fp8", "fp8")
    apart = EngineSpeed.of(need, "b200-sxm-180g", "pytorch")
    assert apart.load.attention_ranks == 4
    assert apart.load.dense_bytes > 3 * shared.load.dense_bytes
    # Alone, a sequence has one GPU for its attention.
    assert apart.decode(1, 1000) > shared.decode(1, 1000)


@pytest.mark.parametrize("one", [gpu_rates(one.name) for one in gpus()], ids=lambda one: str(one.gpu))
def test_every_gpu_has_constants(one) -> None:  # type: ignore[no-untyped-def]
    quick = engine(SMALL, device=one.gpu, ways=1, form="none")
    assert 0 < quick.decode(1, 100) < 0.1
    assert 0 < alone(quick, 1000) < 1


def test_experts_that_no_token_chooses_are_not_read() -> None:
    load = engine(EXPERTS, form="none").load
    assert load.expert_share(1) == pytest.approx(2 / 8)
    assert load.expert_share(4) < load.expert_share(64) <= 1
    assert engine(DENSE).load.expert_share(10) == 0

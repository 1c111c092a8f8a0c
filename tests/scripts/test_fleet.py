"""The simulation of a fleet: what must hold of any queue, of Kubernetes' autoscaler, and of requests that are lost."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.autoscaler import Autoscaler, Behavior, ChangePolicy, ScalingRule, Trigger
from benchmarks.simulation.checks import (
    against_cpu,
    against_erlang_c,
    all_at_once,
    random_queue,
    tokens_per_s,
)
from benchmarks.simulation.experiments import DOWN, LARGER, POLICY, RECIPE, UP
from benchmarks.simulation.outcome import BROKEN, REFUSED, SERVED, FleetResult, Loss
from benchmarks.simulation.replica import PrefixCache
from benchmarks.simulation.scenarios import Scenario, Way, full_rate, service_of, simulate
from benchmarks.simulation.service import recipe_service
from benchmarks.simulation.traffic import PEOPLE, PROGRAMS, Arrivals, Burst, Traffic
from pipeline.plan.performance.engine import EngineSpeed
from pipeline.plan.performance.published import figures

# Four replicas for twenty minutes.
FOUR = Scenario(RECIPE, Arrivals(3.0, 1200.0), 4, since_s=300.0)


def asked(result: FleetResult) -> int:
    return len(result.arrived_s)


@pytest.mark.parametrize(("way", "limit"), [("random", None), ("least load", 0), ("affinity", 8)])
def test_requests_are_conserved_and_no_replica_has_more_than_its_slots(way: Way, limit: int | None) -> None:
    """Under a burst and the loss of two nodes, one of them in the burst."""
    hard = replace(
        FOUR, way=way, queue_limit=limit, losses=(Loss(450.0), Loss(900.0, noticed_s=30.0, replaced_s=60.0)),
        arrivals=Arrivals(3.0, 1200.0, bursts=(Burst(400.0, 120.0),)),
    )  # fmt: skip
    result, slots = simulate(hard), service_of(RECIPE).slots
    counts = [int((result.outcome == outcome).sum()) for outcome in (SERVED, REFUSED, BROKEN)]
    assert sum(counts) == asked(result)
    assert 0 < result.most_in_flight <= slots
    # The gateway never sends a request back that it has taken.
    assert (counts[1] == 0) == (limit is None)
    # Whatever had its first token when its node was lost is broken, and nothing else is.
    assert counts[2] > 0
    assert not np.isnan(result.ttft_s[result.outcome == BROKEN]).any()
    # A request of which nothing had come was given to another replica, and served.
    # Where all slots are taken all the time, a replica that stands still is given none.
    assert limit is None or (result.tries[result.outcome == SERVED] > 1).any()
    assert (result.tries[result.outcome == REFUSED] == 0).all()
    assert (result.ttft_s[result.outcome == SERVED] <= result.total_s[result.outcome == SERVED]).all()
    assert (result.cached < result.prompt)[result.outcome == SERVED].all()


def test_the_same_seed_gives_the_same_day_and_another_one_does_not() -> None:
    once, again, other = simulate(FOUR), simulate(FOUR), simulate(replace(FOUR, seed=2))
    for name in ("arrived_s", "ttft_s", "total_s", "cached"):
        assert np.array_equal(getattr(once, name), getattr(again, name), equal_nan=True)
    assert not np.array_equal(once.ttft_s, other.ttft_s)
    # Whatever serves them, the same people come.
    least = simulate(replace(FOUR, way="least load"))
    assert once.arrived_s.min() == least.arrived_s.min()


def test_littles_law() -> None:
    """Requests inside, as they are counted every 15 s, are arrivals a second times the time that each stays."""
    result = simulate(replace(FOUR, arrivals=Arrivals(3.0, 4000.0)))
    counted = result.samples[result.samples[:, 0] < 4000.0, 1].mean()
    expected = result.total_s.sum() / 4000.0
    assert counted == pytest.approx(expected, rel=0.1)


def test_random_queues_wait_as_erlang_says() -> None:
    found = against_erlang_c(requests=4_000)
    assert abs(found["simulated_s"] - found["expected_s"]) <= found["half_interval_s"]
    # All of the time that is not spent waiting is service, of one second on average.
    one = random_queue(4, 3.2, 4_000, seed=11)
    assert float((one.total_s - one.queued_s).mean()) == pytest.approx(1.0, rel=0.06)


def test_a_lone_request_takes_what_the_plan_says() -> None:
    service = recipe_service(RECIPE)
    (first,), (total,) = (
        all_at_once(service, 1, 2000, 200).ttft_s,
        all_at_once(service, 1, 2000, 200).total_s,
    )
    assert first == pytest.approx(service.prompt_s(2000), rel=0.02)
    steps = 199 * service.times.decode(1, 2100)
    assert total - first == pytest.approx(steps, rel=0.02)


def test_step_times_are_those_of_the_plan() -> None:
    figure = next(figure for figure in figures() if figure.kind == "full-load" and figure.split.pipeline == 1)
    engine = EngineSpeed.of(figure.need, figure.gpu, figure.track)
    times = engine.times
    for sequences, context in ((1, 100.0), (16, 3000.0), (200, 700.0)):
        assert times.decode(sequences, sequences * context) == pytest.approx(
            engine.decode(sequences, context)
        )
    assert recipe_service(LARGER).times.decode(8, 8000) > recipe_service(LARGER).times.decode(1, 1000)


def test_the_cpu_engine_is_met_where_it_was_not_fitted() -> None:
    rows = [
        {"way": "no draft", "streams": streams, "tokens_per_second": rate, "ttft_ms": 2.0}
        for streams, rate in ((1, 1000.0), (8, 4000.0), (16, 5161.0))
    ]
    found = against_cpu(rows)
    assert found["simulated"] == pytest.approx(4000.0, rel=0.1)


def test_a_replica_alone_is_as_fast_as_its_steps_allow() -> None:
    service = recipe_service(RECIPE)
    run = all_at_once(service, 10 * service.slots, 1, 400)
    best = service.slots / service.times.decode(service.slots, service.slots * 200)
    assert 0.9 * best < tokens_per_s(run) < 1.01 * best


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "put", "use"]), st.integers(-3, 6), st.integers(1, 9)), max_size=60
    ),
    st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_a_cache_holds_what_was_used_last_and_no_more_than_it_may(
    steps: list[tuple[str, int, int]], most: int
) -> None:
    cache, used = PrefixCache(), list[int]()
    for step, key, blocks in steps:
        if step == "put":
            cache.put(key, blocks)
        elif step == "use":
            cache.use(key)
        else:
            assert cache.take(key) >= 0
        cache.shrink(most)
        used = [*(used_key for used_key in used if used_key != key), key] if step != "take" else used
        assert 0 <= cache.blocks <= most
        assert cache.blocks == sum(cache._held.values())
    if steps and steps[-1][0] == "put":
        assert cache.use(steps[-1][1]) == min(steps[-1][2], most)


RULE = ScalingRule((Trigger("requests", 10.0),), 1, 1000, UP, DOWN)


@given(st.floats(0.0, 5000.0), st.integers(1, 1000))
@settings(max_examples=40, deadline=None)
def test_a_rule_settles_at_constant_load_and_stays(load: float, begun: int) -> None:
    """Whatever the load: up or down to one number, never both, and then no change any more."""
    autoscaler, current, numbers = Autoscaler(RULE), begun, [begun]
    for tick in range(500):
        current = autoscaler.decide(15.0 * tick, current=current, ready=current, values={"requests": load})
        numbers.append(current)
    assert numbers == sorted(numbers) or numbers == sorted(numbers, reverse=True)
    assert len(set(numbers[-100:])) == 1
    assert abs(load / (10.0 * current) - 1) <= 0.1 or current == max(1, math.ceil(load / 10.0))


def test_the_chosen_rule_does_not_flap_where_requests_come_at_random() -> None:
    steady = Scenario(
        RECIPE, Arrivals(4.0, 5400.0), 5,
        rule=ScalingRule((Trigger("requests", POLICY.requests * 16, spare=1),), 2, 32, UP,
        DOWN), queue_limit=16, start_s=90.0,
    )  # fmt: skip
    result = simulate(steady)
    numbers = result.samples[result.samples[:, 0] > 1800.0, 4]
    assert numbers.max() - numbers.min() <= 2
    added, removed, turns = result.changes
    assert turns <= 4, (added, removed)


def test_kubernetes_algorithm() -> None:
    """The examples of its documentation."""
    value = ScalingRule((Trigger("queue_time_s", 0.1, "Value"),), 1, 100)
    assert value.replicas(4, 4, {"queue_time_s": 0.2}) == 8
    assert value.replicas(4, 4, {"queue_time_s": 0.05}) == 2
    # A difference of a tenth is let be.
    assert value.replicas(4, 4, {"queue_time_s": 0.109}) == 4
    # The largest of several metrics counts.
    both = replace(value, triggers=(*value.triggers, Trigger("requests", 10.0)))
    assert both.replicas(4, 4, {"queue_time_s": 0.2, "requests": 200.0}) == 20
    # Down by 10 percent or 4 pods in a minute, whatever is more: 80, 72, …
    policies = (ChangePolicy("Pods", 4, 60), ChangePolicy("Percent", 10, 60))
    down = ScalingRule((Trigger("requests", 1.0),), 10, 100, down=Behavior(0.0, policies))
    autoscaler, current, by_minute = Autoscaler(down), 80, []
    for tick in range(12 * 4):
        current = autoscaler.decide(15.0 * tick, current=current, ready=current, values={"requests": 10.0})
        by_minute += [current] if tick % 4 == 3 else []
    assert by_minute[:2] == [72, 64]
    assert all(before - after <= 8 for before, after in pairwise(by_minute))
    assert by_minute[-1] <= 36


def test_windows_take_the_largest_on_the_way_down() -> None:
    autoscaler = Autoscaler(ScalingRule((Trigger("requests", 1.0),), 1, 100))
    current, seen = 10, []
    for tick, load in enumerate([10.0] * 4 + [3.0] * 30):
        current = autoscaler.decide(15.0 * tick, current=current, ready=current, values={"requests": load})
        seen.append(current)
    # 300 s after the last time that 10 were needed, and not before.
    assert seen[: 4 + 19] == [10] * 23
    assert seen[-1] == 3


def test_affinity_reuses_more_and_bounds_what_one_replica_gets() -> None:
    rate = full_rate(service_of(RECIPE), PROGRAMS) * 8 * 0.7
    base = Scenario(RECIPE, Arrivals(rate, 900.0), 8, PROGRAMS, since_s=300.0)
    reused = {way: base_of(base, way)["reused"] for way in ("random", "least load", "affinity")}
    assert reused["affinity"] > reused["least load"] + 0.2
    assert reused["affinity"] > reused["random"] + 0.2
    assert reused["affinity"] < PROGRAMS.reusable + 0.05


def base_of(base: Scenario, way: Way) -> dict[str, float]:
    return replace(base, way=way).run()


def test_a_day_has_the_load_that_it_was_asked_for() -> None:
    coming = Arrivals(2.0, 86_400.0, valley=0.2, bursts=(Burst(36_000.0, 600.0),))
    starts = np.array([conversation.start_s for conversation in Traffic(PEOPLE, coming, 3).conversations()])
    seconds = np.arange(0.0, 86_400.0, 5.0) + 2.5
    expected = coming.share(seconds).sum() * 5.0 * 2.0 / PEOPLE.turns
    assert len(starts) == pytest.approx(expected, rel=0.02)
    assert (np.diff(starts) >= 0).all()
    in_burst = ((starts >= 36_000) & (starts < 36_600)).sum()
    before = ((starts >= 35_400) & (starts < 36_000)).sum()
    assert 4 * before < in_burst < 6 * before

"""Blame on simulated histories: poisons end for a while, tenants that send ever new ones cool down, others never do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.gateway.blame import TURN_S, TURNS_S, Attempt, LossJudge, Work

STEP_S = 0.2
ATTEMPTS = 3


@dataclass
class Workload:
    """Requests of one tenant."""

    tenant: str
    every_s: float
    runs_s: float
    # Seconds after which a request ends its server; None: none does.
    kills_after_s: float | None = None
    # Whether requests differ; else each is the same one again.
    fresh: bool = True
    # Share of clients that leave when their server is lost.
    leaving: float = 0.0


@dataclass
class Simulated:
    """One server with some slots, in front of it a queue that a judge decides for; requests in the order they came."""

    workloads: list[Workload]
    seed: int
    slots: int = 8
    restart_s: float = 4.0
    # Mean time between failures of the machine.
    fails_every_s: float | None = None
    judge: LossJudge = field(default_factory=LossJudge)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    cooled: Counter[str] = field(default_factory=Counter)

    def run(self, for_s: float) -> Simulated:
        chance, numbers = random.Random(self.seed), count()
        waiting: list[tuple[Workload, Work, int]] = []
        running: list[tuple[Workload, Attempt, int]] = []
        back_at = 0.0
        for step in range(int(for_s / STEP_S)):
            now = step * STEP_S
            for load in self.workloads:
                if chance.random() < STEP_S / load.every_s:
                    digest = f"{load.tenant}-{next(numbers) if load.fresh else 'same'}"
                    waiting.append((load, Work(digest, load.tenant), 1))
            if back_at and now >= back_at:
                self.judge.server_well(now, "server")
                back_at = 0.0
            for cool_down in self.judge.settle(now):
                self.cooled[cool_down.tenant] += 1
            lost = self.fails_every_s is not None and chance.random() < STEP_S / self.fails_every_s
            for entry in running.copy():
                load, attempt, _ = entry
                if load.kills_after_s is not None and now - attempt.began >= load.kills_after_s:
                    lost = True
                elif now - attempt.began >= load.runs_s:
                    running.remove(entry)
                    self.judge.passed(attempt)
                    self.answered[load.tenant] += 1
            if lost and not back_at:
                back_at = now + self.restart_s
                for load, attempt, times in running:
                    self.judge.lost(now, attempt, "server")
                    if times < ATTEMPTS and chance.random() >= load.leaving:
                        waiting.append((load, attempt.work, times + 1))
                running.clear()
                self.judge.server_gone(now, "server")
            for asked in waiting.copy() if not back_at else ():
                if len(running) == self.slots:
                    break
                load, work, times = asked
                if (refusal := self.judge.refusal(now, work)) is not None:
                    self.refused[load.tenant, refusal.kind] += 1
                    waiting.remove(asked)
                elif self.judge.may_begin(now, work):
                    running.append((load, self.judge.began(now, work), times))
                    waiting.remove(asked)
        return self


def innocents(names: str = "abc", **settings: float) -> list[Workload]:
    return [Workload(name, **{"every_s": 1.0, "runs_s": 1.5, **settings}) for name in names]


HALF_AN_HOUR_S = 1800.0
simulated = settings(max_examples=10)
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize(("fails_every_s", "most_cooled"), [(60.0, 4), (300.0, 0)])
def test_a_machine_that_fails_is_told_from_its_tenants(fails_every_s: float, most_cooled: int) -> None:
    """Twenty half-hours: of one that fails each minute, hardly a tenant cools down, for half a minute."""
    cooled, refused, answered = Counter[str](), 0, 0
    for seed in range(20):
        chance = random.Random(seed)
        runs_s, leaving = chance.uniform(0.2, 4), chance.random()
        loads = innocents("abcd"[: 1 + seed % 4], runs_s=runs_s, leaving=leaving)
        told = Simulated(loads, seed, fails_every_s=fails_every_s).run(HALF_AN_HOUR_S)
        cooled += told.cooled
        refused, answered = refused + sum(told.refused.values()), answered + sum(told.answered.values())
    assert sum(cooled.values()) <= most_cooled
    assert refused <= 0.003 * answered


@simulated
@given(SEEDS, st.floats(0.1, 3), st.floats(0.5, 20))
def test_the_same_poison_again_and_again_ends_few_servers(
    seed: int, kills_after_s: float, every_s: float
) -> None:
    poison = Workload("p", every_s, 100.0, kills_after_s=kills_after_s, fresh=False)
    told = Simulated([poison, *innocents()], seed).run(HALF_AN_HOUR_S)
    # Two, and one more at the end of each quarantine: after 60 s, 240 s, 960 s.
    assert told.judge.losses <= 5
    assert set(told.cooled) <= {"p"}
    assert {tenant for tenant, kind in told.refused if kind == "cooling_down"} <= {"p"}
    assert told.answered["p"] == 0
    for name in "abc":
        assert told.answered[name] > 0.85 * HALF_AN_HOUR_S


@simulated
@given(SEEDS, st.floats(0.1, 3), st.floats(0.5, 20), st.floats(0, 1))
def test_a_tenant_with_ever_new_poisons_cools_down_and_the_others_go_on(
    seed: int, kills_after_s: float, every_s: float, leaving: float
) -> None:
    poison = Workload("p", every_s, 100.0, kills_after_s=kills_after_s, leaving=leaving)
    told = Simulated([poison, *innocents()], seed).run(HALF_AN_HOUR_S)
    assert set(told.cooled) == {"p"}
    assert told.judge.losses <= 30
    for name in "abc":
        assert told.answered[name] > 0.85 * HALF_AN_HOUR_S


@simulated
@given(SEEDS, st.floats(0.1, 2))
def test_poison_is_found_on_a_machine_that_fails_besides(seed: int, kills_after_s: float) -> None:
    poison = Workload("p", 5.0, 100.0, kills_after_s=kills_after_s)
    told = Simulated([poison, *innocents()], seed, fails_every_s=300.0).run(HALF_AN_HOUR_S)
    assert told.cooled["p"] > 2 * sum(told.cooled[name] for name in "abc")
    assert told.judge.losses <= 50


def test_the_only_tenant_does_not_cool_down() -> None:
    """There is nobody whom that would help."""
    told = Simulated([Workload("p", 5.0, 100.0, kills_after_s=1.0)], 1).run(HALF_AN_HOUR_S)
    assert not told.cooled


def attempts(judge: LossJudge, now: float, *digests: str, tenant: str = "t") -> list[Attempt]:
    return [judge.began(now, Work(digest, tenant)) for digest in digests]


@pytest.mark.parametrize(("others", "expected"), [(0, [60, 240, 960, 3600, 3600]), (3, [60] * 5)])
def test_two_losses_quarantine_a_request_and_each_that_it_is_alone_at_for_longer(
    others: int, expected: Sequence[float]
) -> None:
    """Where others were in flight as often, it may be any of them, or a machine that does not stay up."""
    judge, now, waits = LossJudge(), 0.0, list[float]()
    works = [Work(f"r{number}", "t") for number in range(1 + others)]
    for _ in range(6):
        assert judge.settle(now) == []
        assert [judge.refusal(now, work) for work in works] == [None] * len(works)
        sent = [judge.began(now, work) for work in works]
        refusals = [judge.lost(now + 1, attempt, "server") for attempt in sent]
        judge.server_well(now + 2, "server")
        refusal = refusals[-1]
        now += 3 + (0 if refusal is None else refusal.wait_s)
        waits += [] if refusal is None else [refusal.wait_s]
    assert waits == expected
    assert judge.quarantined == 5 * len(works)


def test_an_answer_clears_a_request_and_one_loss_counts_once_however_many_report_it() -> None:
    judge = LossJudge()
    for now in (0.0, 10.0, 20.0):
        for attempt in attempts(judge, now, "same", "same", "same"):
            assert judge.lost(now + 1, attempt, "server") is None
        judge.server_well(now + 2, "server")
        (again,) = attempts(judge, now + 3, "same")
        judge.passed(again)
    assert (judge.losses, judge.quarantined) == (3, 0)


def test_a_request_that_was_sent_to_a_lost_server_was_not_in_flight_at_its_loss() -> None:
    judge = LossJudge()
    (first,) = attempts(judge, 0.0, "first")
    judge.lost(1.0, first, "server")
    for _ in range(3):
        (late,) = attempts(judge, 1.5, "late")
        assert judge.lost(2.0, late, "server") is None
    assert judge.losses == 1
    assert judge.refusal(3.0, late.work) is None


def test_two_servers_that_are_lost_at_once_quarantine_nothing() -> None:
    """As when a rack loses its power: nothing was sent between the losses."""
    judge = LossJudge()
    both = attempts(judge, 0.0, "popular", "popular")
    for attempt, server in zip(both, ("one", "two"), strict=True):
        assert judge.lost(1.0, attempt, server) is None
    assert judge.settle(3.0) == []
    assert judge.quarantined == 0


def test_suspects_go_out_one_tenant_at_a_time_and_new_requests_at_once() -> None:
    judge = LossJudge()
    lost = [*attempts(judge, 0.0, "a1", "a2", tenant="a"), *attempts(judge, 0.0, "b1", tenant="b")]
    for attempt in lost:
        judge.lost(2.0, attempt, "server")
    judge.server_well(5.0, "server")
    (first,) = attempts(judge, 5.0, "a1", tenant="a")
    assert judge.may_begin(5.0, Work("a2", "a"))
    assert not judge.may_begin(5.0, Work("b1", "b"))
    assert judge.may_begin(5.0, Work("b2", "b")), "it is no suspect"
    # As long as before, and a second.
    assert not judge.may_begin(7.9, Work("b1", "b"))
    assert judge.may_begin(8.0, Work("b1", "b"))
    judge.passed(first)


@pytest.mark.parametrize("reports_first", ["innocent", "poison"])
def test_a_request_that_outlived_its_turn_is_not_blamed_for_a_loss_in_anothers(reports_first: str) -> None:
    judge = LossJudge()
    long, poison = Work("long", "good"), Work("poison", "bad")
    for attempt in [judge.began(0.0, long), judge.began(1.5, poison)]:
        judge.lost(2.0, attempt, "server")
    judge.server_well(3.0, "server")
    again = judge.began(3.0, long)
    assert judge.may_begin(6.0, poison), "three seconds are as long as before, and one more"
    sent = {"innocent": again, "poison": judge.began(6.0, poison)}
    refusals = {
        name: judge.lost(7.0, sent[name], "server") for name in sorted(sent, key=reports_first.__ne__)
    }
    assert refusals["poison"] is not None
    assert (refusals["innocent"], again.blamed) == (None, False)
    # Where nobody else has a turn, the next loss is its own.
    judge.server_well(8.0, "server")
    again = judge.began(8.0, long)
    assert judge.lost(30.0, again, "server") is not None


def test_lines_of_batches_go_out_one_by_one() -> None:
    judge = LossJudge()
    lines = [Work(f"line{number}", "t", alone=True) for number in range(3)]
    for attempt in [judge.began(0.0, line) for line in lines]:
        judge.lost(1.0, attempt, "server")
    judge.server_well(2.0, "server")
    first = judge.began(2.0, lines[0])
    assert [judge.may_begin(2.0, line) for line in lines] == [True, False, False]
    assert not judge.may_begin(2.0, Work("line1", "t")), (
        "nor does it run beside another suspect of its tenant"
    )
    judge.passed(first)
    poison = judge.began(3.0, lines[1])
    assert judge.lost(4.0, poison, "server") is not None
    assert judge.refusal(5.0, lines[2]) is None


@pytest.mark.parametrize("tenants", [1, 40])
def test_turns_are_short_however_many_tenants_were_in_flight(tenants: int) -> None:
    judge, now = LossJudge(), 100.0
    works = [Work(f"r{n}", f"t{n}") for n in range(tenants)]
    for attempt in [judge.began(0.0, work) for work in works]:
        judge.lost(now, attempt, "server")
    judge.server_well(now, "server")
    began = now
    for work in works:
        while not judge.may_begin(now, work):
            now += 0.01
        judge.began(now, work)
    assert now - began <= max(TURN_S, TURNS_S) + 0.01 * tenants


def test_memory_is_bounded_and_what_is_old_is_forgotten() -> None:
    judge = LossJudge()
    for number in range(10_000):
        now = number * 10.0
        (attempt,) = attempts(judge, now, f"r{number}", tenant=f"t{number % 50}")
        judge.lost(now + 1, attempt, f"server{number % 1000}")
        judge.server_well(now + 2, f"server{number % 1000}")
        judge.settle(now + 2)

    def kept() -> list[int]:
        return [
            len(of)
            for of in (judge._losses, judge._last, judge._suspects, judge._suspected, judge._convictions)
        ]

    assert max(kept()) <= 256
    judge.settle(1e9)
    assert not any(kept())

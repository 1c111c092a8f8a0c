"""Tuning: intervals, malformed files, what is chosen and what is shown within a budget, and unlabelled logs."""

from __future__ import annotations

import json
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.decision import Decision
from pipeline.cache.semantic.guards import GUARDS, findings
from pipeline.cache.tuning.choosing import by_category, choose, weigh
from pipeline.cache.tuning.measuring import CountedShare, PairMeasurements, Setting, measure, pairs_needed
from pipeline.cache.tuning.pairs import (
    BadLines,
    LoggedQuestion,
    Pair,
    find_repeats,
    question_groups,
    read_log,
    read_pairs,
)

WORDS = [
    "parcel",
    "password",
    "refund",
    "invoice",
    "3",
    "4",
    "reset",
    "where",
    "my",
    "the",
    "cancel",
    "order",
]
START = Setting("built-in", 0.3, 0.5, ("numbers", "names"))


def embed(text: str) -> Vector | None:
    """Which of a few words are there; None for what is too long."""
    said = text.lower().replace("?", "").split()
    if len(said) > 20:
        return None
    vector = np.array([0.1, *(word in said for word in WORDS)], np.float32)
    unit: Vector = vector / np.linalg.norm(vector)
    return unit


class Halved:
    """Scores half the cosine, and forbids other numbers."""

    default_min_score = 0.4

    def prepare(self, text: str) -> None:
        pass

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:
        return Decision(cosine / 2, findings(question, candidate).get("numbers"))


def made(
    same: list[tuple[float, bool]], traps: list[tuple[float, bool]], **scores: list[float]
) -> PairMeasurements:
    """Pairs of a score, in some of which the first guard finds something; and the scores of other verifiers."""
    rows = [*same, *traps]
    found = np.zeros((len(rows), 2), np.bool_)
    found[:, 0] = [yes for _, yes in rows]
    pairs = [Pair(f"a{i}", f"b{i}", i < len(same)) for i in range(len(rows))]
    built_in = np.array([score for score, _ in rows])
    others = {name.replace("_", "-"): np.array(values) for name, values in scores.items()}
    return PairMeasurements(
        pairs, np.full(len(rows), 0.9), {"built-in": built_in, **others}, found, START.guards
    )


@given(st.integers(0, 400), st.integers(1, 400), st.floats(0.5, 0.999))
def test_the_interval_holds_the_share(count: int, more: int, confidence: float) -> None:
    share = CountedShare(count, count + more)
    assert 0 <= share.low(confidence) <= share.value <= share.high(confidence) <= 1
    assert CountedShare(10 * count, 10 * (count + more)).high(confidence) <= share.high(confidence) + 1e-12


def test_intervals_as_published() -> None:
    share = CountedShare(81, 263)  # R. G. Newcombe, Statistics in Medicine 17, 1998, table I, method 3
    assert (round(share.low(), 4), round(share.high(), 4)) == (0.2553, 0.3662)
    assert (round(CountedShare(15, 148).low(), 4), round(CountedShare(15, 148).high(), 4)) == (0.0624, 0.1605)
    assert CountedShare(0, 0).high() == 1


@given(st.integers(0, 40), st.integers(1, 200), st.floats(0.5, 0.999))
def test_the_bound_is_the_share_at_which_so_few_are_just_too_few(
    count: int, more: int, confidence: float
) -> None:
    share = CountedShare(count, count + more)
    bound = share.bound(confidence)
    assert share.value <= bound <= 1
    so_few = sum(comb(share.of, i) * bound**i * (1 - bound) ** (share.of - i) for i in range(count + 1))
    assert so_few == pytest.approx(1 - confidence, abs=1e-6)
    assert CountedShare(count, count).bound(confidence) == 1


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05, 0.3])
def test_so_many_traps_are_needed_and_no_fewer(budget: float) -> None:
    needed = pairs_needed(budget)
    assert CountedShare(0, needed).bound() <= budget < CountedShare(0, needed - 1).bound()


def test_every_bad_line_is_named() -> None:
    lines = [
        '{"a": "x", "b": "y", "same": 1}',
        "",
        "not json",
        '["a"]',
        '{"a": "", "b": 3, "same": 2}',
        '{"a": "x", "b": "y", "same": null}',
        '{"a": "x", "b": "y", "same": "1", "category": 4}',
    ]
    with pytest.raises(BadLines) as caught:
        read_pairs(lines)
    assert [line for line, _ in caught.value.faults] == [3, 4, 5, 6, 7]
    assert caught.value.faults[2][1] == (
        "a: needs a text; b: needs a text; same = 2: 1 if the same answer serves both, else 0"
    )
    assert "not labelled yet" in caught.value.faults[3][1]


def test_pairs_of_both_labels_are_needed() -> None:
    """Without traps nothing is known of false hits, and no threshold may be told."""
    row = '{"a": "x", "b": "y", "same": %d}'
    with pytest.raises(BadLines, match="is empty"):
        read_pairs(["  "])
    for label in (0, 1):
        with pytest.raises(BadLines, match=f"holds no pair with same = {1 - label}"):
            read_pairs([row % label] * 3)
    assert [pair.same for pair in read_pairs([row % 0, "", row % 1])] == [False, True]


def test_a_log_of_plain_lines() -> None:
    exported = {"key": "00", "scope": "ab", "question": "Where?", "answer": "There.", "embedded": True}
    lines = ["Where is it?\n", "\n", '{"question": "Why?", "scope": "a"}', json.dumps(exported)]
    assert read_log(lines) == [
        LoggedQuestion("Where is it?"),
        LoggedQuestion("Why?", "a"),
        LoggedQuestion("Where?", "ab"),
    ]
    with pytest.raises(BadLines) as caught:
        read_log(["{", "fine", '{"a": "x", "b": "y"}', '{"question": ""}'])
    assert [line for line, _ in caught.value.faults] == [1, 3, 4]
    with pytest.raises(BadLines, match="is empty"):
        read_log([])


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30), st.randoms())
def test_pairs_that_hang_together_are_one_group_in_any_order(
    edges: list[tuple[int, int]], random: object
) -> None:
    pairs = [Pair(f"q{a}", f"q{b}", True) for a, b in edges]
    groups = dict(zip(pairs, question_groups(pairs), strict=True))
    for pair in pairs:
        for other in pairs:
            if {pair.a, pair.b} & {other.a, other.b}:
                assert groups[pair] == groups[other]
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert dict(zip(shuffled, question_groups(shuffled), strict=True)) == groups


def test_the_lowest_score_that_keeps_the_budget() -> None:
    measured = made([(0.55 + i / 200, False) for i in range(80)], [(0.6, False)] * 20 + [(0.5, False)] * 480)
    choice = choose(measured, START, default=START, budget=0.01, all_dials=False)
    assert (choice.meets_budget, choice.halved) == (True, False)
    assert choice.setting.min_score == 0.61
    assert choice.outcome.false == CountedShare(0, 500)
    assert choice.outcome.recall == CountedShare(68, 80)


def test_too_few_traps_promise_nothing() -> None:
    choice = choose(made([(0.9, False)] * 10, [(0.6, False)] * 10), START, default=START, budget=0.01)
    assert choice.outcome.false.count == 0
    assert (choice.meets_budget, choice.basis, choice.traps_needed) == (False, "rate", 299)
    assert choice.can_show == pytest.approx(1 - 0.05 ** (1 / 10))


def test_a_cache_that_serves_nothing_is_no_proof() -> None:
    """Every true pair scores below every trap."""
    choice = choose(made([(0.4, False)] * 50, [(0.8, False)] * 1000), START, default=START, budget=0.01)
    assert not choice.meets_budget


def test_where_too_few_traps_show_nothing_the_observed_rate_decides() -> None:
    """1 of 100 is at the budget, though not shown to be; 2 of 100 are beyond it."""
    measured = made([(0.55, False)] * 10, [(0.9, False), (0.7, False)] + [(0.5, False)] * 98)
    choice = choose(measured, START, default=START, budget=0.01)
    assert (choice.basis, choice.setting.min_score) == ("rate", 0.999)
    near = made([(0.85, False)] * 10, [(0.9, False), (0.7, False)] + [(0.5, False)] * 98)
    choice = choose(near, START, default=START, budget=0.01)
    assert (choice.basis, choice.setting.min_score) == ("rate", 0.85)
    assert choice.outcome.false == CountedShare(1, 100)


def test_what_is_beyond_the_budget_is_served_least() -> None:
    choice = choose(
        made([(0.9, False)] * 10, [(0.9995, False)] * 5 + [(0.8, False)] * 5),
        START,
        default=START,
        budget=0.01,
    )
    assert (choice.meets_budget, choice.basis) == (False, "fewest")
    assert choice.outcome.false.count == 5


def test_a_guard_that_only_costs_is_left_out_and_one_that_stops_traps_is_not() -> None:
    costs = made([(0.9, at % 2 == 0) for at in range(200)], [(0.1, True)] * 1000)
    choice = choose(costs, START, default=START, budget=0.01)
    assert (choice.halved, choice.setting.guards) == (True, ("names",))
    assert choice.outcome.recall == CountedShare(200, 200)
    assert choose(costs, START, default=START, budget=0.01, all_dials=False).setting.guards == START.guards
    saves = made([(0.9, at % 2 == 0) for at in range(200)], [(0.95, True)] * 1000)
    assert choose(saves, START, default=START, budget=0.01).setting.guards == START.guards


def test_what_was_fixed_beforehand_is_taken_where_it_serves_more_than_what_a_half_chose() -> None:
    """One half of so few traps shows little; all of them show that the default keeps the budget."""
    rng = np.random.default_rng(3)
    same = [(score, False) for score in rng.beta(8, 2, 400).tolist()]
    traps = [(score, False) for score in rng.beta(4, 6, 900).tolist()]
    measured = made(same, traps)
    default = replace(START, min_score=0.85)
    choice = choose(measured, START, default=default, budget=0.01)
    assert (choice.candidates, choice.meets_budget, choice.halved) == (2, True, False)
    # Both candidates share the error of 5 %.
    assert choice.bound == choice.outcome.false.bound(0.975) <= 0.01
    assert choice.default == measured.outcome(default)
    assert choice.outcome.recall.count >= choice.default.recall.count
    # The recipe's own dials are a third candidate, and the worst.
    strict = replace(START, min_similarity=0.95)
    other = choose(measured, strict, default=default, budget=0.01)
    assert (other.candidates, other.setting.min_similarity) == (3, default.min_similarity)
    alone = choose(measured, strict, default=default, budget=0.01, all_dials=False)
    assert (alone.candidates, alone.outcome.recall.count) == (1, 0)


def test_the_better_verifier_is_taken() -> None:
    """To the built-in one, traps and true pairs are alike."""
    same, traps = [(0.7, False)] * 200, [(0.7, False)] * 1000
    measured = made(same, traps, cross_encoder=[0.9] * 200 + [0.2] * 1000)
    choice = choose(measured, START, default=START, budget=0.01)
    assert (choice.setting.verifier, choice.meets_budget) == ("cross-encoder", True)
    assert choice.outcome.recall == CountedShare(200, 200)


def test_a_floor_helps_where_far_pairs_score_high() -> None:
    measured = made([(0.8, False)] * 200, [(0.85, False)] * 1000)
    far = replace(measured, cosines=np.array([0.9] * 200 + [0.5] * 1000))
    choice = choose(far, START, default=START, budget=0.01)
    assert choice.meets_budget
    assert choice.setting.min_similarity > 0.5
    assert choice.outcome.recall == CountedShare(200, 200)


def test_what_is_shown_holds_for_pairs_that_were_not_seen() -> None:
    """Of many caches that were tuned on few pairs, no more than one in twenty may break the budget."""
    rng, broken, tuned, budget = np.random.default_rng(0), 0, 0, 0.05
    for _ in range(20):
        same = [(score, False) for score in rng.beta(6, 2, 150).tolist()]
        traps = [(score, bool(rng.random() < 0.3)) for score in rng.beta(4, 4, 400).tolist()]
        choice = choose(made(same, traps), START, default=START, budget=budget)
        if choice.meets_budget:
            tuned += 1
            fresh, forbidden = rng.beta(4, 4, 20_000), rng.random(20_000) < 0.3
            served = (fresh >= choice.setting.min_score) & ~(forbidden & ("numbers" in choice.setting.guards))
            broken += served.mean() > budget
    assert tuned > 10
    assert broken <= 4, "at one in twenty, more than 4 of 20 are seen once in 390 times"


def test_pairs_are_measured_without_their_guards() -> None:
    long = "the " * 30
    pairs = [
        Pair("Where is my parcel?", "where is my parcel", True),
        Pair("Cancel order 3", "Cancel order 4", False),
        Pair(long, long + "parcel", True),
    ]
    measured = measure(pairs, embed, {"built-in": Halved()}, findings, tuple(GUARDS))
    assert measured.scores["built-in"][0] == pytest.approx(0.5)
    assert (measured.cosines[2], measured.forbidden[0].sum()) == (-1, 0)
    assert measured.forbidden[1, measured.guards.index("numbers")]
    setting = Setting("built-in", 0.3, 0.2, tuple(GUARDS))
    assert measured.outcome(setting).recall == CountedShare(1, 2)
    assert measured.served(setting, same=False) == []
    assert measured.served(replace(setting, guards=("names",)), same=False) == [pairs[1]]


def test_a_log_tells_of_near_questions_but_never_of_labels() -> None:
    log = [
        LoggedQuestion("Where is my parcel?"),
        LoggedQuestion("Where is my parcel?"),
        LoggedQuestion("where is my parcel"),
        LoggedQuestion("Cancel order 3"),
        LoggedQuestion("Cancel order 4"),
        LoggedQuestion("Where is my parcel, please?", scope="another"),
    ]
    found = find_repeats(log, embed, Halved(), 0.4)
    assert (found.questions, found.different) == (6, 5)
    assert {(near.a, near.b) for near in found.nears} == {
        ("Where is my parcel?", "where is my parcel"),
        ("Cancel order 3", "Cancel order 4"),
    }
    assert (found.near(0.5), found.served(0.5)) == (2, 1)
    assert [near.a for near in found.merged()] == ["Where is my parcel?"]
    assert find_repeats(log, embed, Halved(), 0.6).merged() == []


def drawn(seed: int, count: int = 200) -> PairMeasurements:
    rng = np.random.default_rng(seed)
    pairs = [
        Pair(f"a{i}", f"b{i}", bool(rng.integers(2)), ("", "x", "y")[rng.integers(3)]) for i in range(count)
    ]
    found = rng.random((count, len(GUARDS))) < 0.1
    scores = {"built-in": rng.uniform(0, 1, count)}
    return PairMeasurements(pairs, rng.uniform(0.5, 1, count), scores, found, tuple(GUARDS))


@pytest.mark.parametrize("left_out", [(), ("names", "accents")])
def test_without_a_guard_just_what_it_alone_held_is_served(left_out: tuple[str, ...]) -> None:
    measured = drawn(0, 1000)
    guards = tuple(name for name in GUARDS if name not in left_out)
    setting = Setting("built-in", 0.6, 0.4, guards)
    whole = measured.outcome(setting)
    weights = weigh(measured, setting)
    assert [weight.guard for weight in weights] == list(guards)
    for weight in weights:
        fewer = tuple(name for name in guards if name != weight.guard)
        without = measured.outcome(replace(setting, guards=fewer))
        assert without.false.count - whole.false.count == weight.stopped
        assert without.recall.count - whole.recall.count == weight.lost


def test_categories_add_up_to_the_pairs_that_have_one() -> None:
    measured, setting = drawn(7), Setting("built-in", 0.6, 0.4, tuple(GUARDS))
    found = by_category(measured, setting)
    assert list(found) == ["x", "y"]
    named = np.array([pair.category != "" for pair in measured.pairs])
    whole = measured.outcome(setting, named)
    assert sum(outcome.recall.count for outcome in found.values()) == whole.recall.count
    assert sum(outcome.recall.of for outcome in found.values()) == whole.recall.of
    assert sum(outcome.false.count for outcome in found.values()) == whole.false.count
    assert sum(outcome.false.of for outcome in found.values()) == whole.false.of

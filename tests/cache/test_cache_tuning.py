"""Tuning: intervals, malformed files, what is chosen within a budget, what each check is worth, and unlabelled logs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.verification import CHECKS, default_verifier
from pipeline.cache.tuning.choosing import by_category, choose, weigh
from pipeline.cache.tuning.measuring import CountedShare, Measured, measure, pairs_needed
from pipeline.cache.tuning.pairs import BadLines, LoggedQuestion, Pair, read_log, read_pairs
from pipeline.cache.tuning.repeats import find_repeats

WORDS = (
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
)


def embed(text: str) -> Vector | None:
    """Which of a few words are there; None for what is too long."""
    said = text.lower().replace("?", "").split()
    if len(said) > 20:
        return None
    vector = np.array([0.1, *(word in said for word in WORDS)], np.float32)
    unit: Vector = vector / np.linalg.norm(vector)
    return unit


def made(same: list[tuple[float, bool]], traps: list[tuple[float, bool]]) -> Measured:
    """Pairs of a similarity, of which the first check objects to some."""
    rows = [*same, *traps]
    objects = np.zeros((len(rows), len(CHECKS)), np.bool_)
    objects[:, 0] = [objected for _, objected in rows]
    pairs = [Pair(f"a{i}", f"b{i}", i < len(same)) for i in range(len(rows))]
    return Measured(pairs, np.array([near for near, _ in rows]), objects, tuple(CHECKS))


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


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05, 0.3])
def test_so_many_traps_are_needed_and_no_fewer(budget: float) -> None:
    assert (
        CountedShare(0, pairs_needed(budget)).high()
        <= budget
        < CountedShare(0, pairs_needed(budget) - 1).high()
    )


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
    assert read_log(["Where is it?\n", "\n", '{"question": "Why?", "scope": "a"}']) == [
        LoggedQuestion("Where is it?"),
        LoggedQuestion("Why?", "a"),
    ]
    with pytest.raises(BadLines) as caught:
        read_log(["{", "fine", '{"a": "x", "b": "y"}', '{"question": ""}'])
    assert [line for line, _ in caught.value.faults] == [1, 3, 4]
    with pytest.raises(BadLines, match="is empty"):
        read_log([])


def test_the_lowest_threshold_within_the_budget() -> None:
    traps = [(0.6, False)] * 20 + [(0.5, False)] * 480
    measured = made([(0.55 + i / 200, False) for i in range(80)], traps)
    choice = choose(measured, budget=0.01)
    assert choice.meets_budget
    assert choice.outcome.threshold == 0.61
    assert choice.outcome.false == CountedShare(0, 500)
    assert choice.outcome.recall == CountedShare(68, 80)


def test_too_few_traps_prove_nothing() -> None:
    choice = choose(made([(0.9, False)] * 10, [(0.6, False)] * 10), budget=0.01)
    assert choice.outcome.false.count == 0
    assert (choice.meets_budget, choice.basis) == (False, "rate")
    assert choice.traps_needed == 381


def test_where_too_few_traps_prove_nothing_the_observed_rate_decides() -> None:
    """1 of 100 is at the budget, though not shown to be; 2 of 100 are beyond it."""
    measured = made([(0.55, False)] * 10, [(0.9, False), (0.7, False)] + [(0.5, False)] * 98)
    choice = choose(measured, budget=0.01)
    assert (choice.basis, choice.outcome.threshold) == ("rate", 0.99)
    near = made([(0.85, False)] * 10, [(0.9, False), (0.7, False)] + [(0.5, False)] * 98)
    choice = choose(near, budget=0.01)
    assert (choice.basis, choice.outcome.threshold) == ("rate", 0.85)
    assert choice.outcome.false == CountedShare(1, 100)


def test_what_is_beyond_the_budget_is_served_least() -> None:
    choice = choose(made([(0.9, False)] * 10, [(0.995, False)] * 5 + [(0.8, False)] * 5), budget=0.01)
    assert (choice.meets_budget, choice.basis) == (False, "fewest")
    assert choice.outcome.false.count == 5


def test_a_check_that_only_costs_is_left_out_and_one_that_stops_traps_is_not() -> None:
    costs = made([(0.9, at % 2 == 0) for at in range(100)], [(0.52, True)] * 600)
    choice = choose(costs, budget=0.01, may_skip=True)
    assert choice.skipped == (costs.checks[0],)
    assert choice.outcome.recall == CountedShare(100, 100)
    assert choose(costs, budget=0.01).skipped == ()
    saves = made([(0.9, at % 2 == 0) for at in range(100)], [(0.95, True)] * 600)
    assert choose(saves, budget=0.01, may_skip=True).skipped == ()


def test_a_check_stays_if_pairs_of_other_kinds_show_that_it_is_needed() -> None:
    """By four of five kinds nothing is lost without it; by the fifth all is."""
    same, traps = [(0.9, at % 2 == 0) for at in range(100)], [(0.52, True)] * 500 + [(0.95, True)] * 100
    measured = made(same, traps)
    kinds = ["same"] * 100 + [f"far {at % 4}" for at in range(500)] + ["near"] * 100
    pairs = [replace(pair, category=kind) for pair, kind in zip(measured.pairs, kinds, strict=True)]
    assert choose(replace(measured, pairs=pairs), budget=0.01, may_skip=True).skipped == ()


def test_pairs_that_share_a_question_are_never_on_both_sides_of_a_trial() -> None:
    """All hang together through the last pairs, so there are no fifths to try a choice on."""
    measured = made([(0.9, False)] * 10, [(0.6, False)] * 10)
    assert choose(measured, budget=0.01).held_out is not None
    chain = [replace(pair, a=f"q{at}", b=f"q{at + 1}") for at, pair in enumerate(measured.pairs)]
    mixed = replace(measured, pairs=chain[::2] + chain[1::2])
    assert choose(mixed, budget=0.01).held_out is None


def test_pairs_are_measured_by_the_checks_themselves() -> None:
    long = "the " * 30
    pairs = [
        Pair("Where is my parcel?", "where is my parcel", True),
        Pair("Cancel order 3", "Cancel order 4", False),
        Pair(long, long + "parcel", True),
    ]
    measured = measure(pairs, embed, default_verifier(), min_similarity=0.6)
    assert measured.values[0] == pytest.approx(1)
    assert measured.objects[0].sum() == 0
    assert measured.objects[1, measured.checks.index("numbers")]
    assert measured.outcome(0.5).recall == CountedShare(1, 2)
    assert measured.served(0.5, ["numbers"], same=False) == [pairs[1]]


def test_a_log_tells_of_near_questions_but_never_of_labels() -> None:
    log = [
        LoggedQuestion("Where is my parcel?"),
        LoggedQuestion("Where is my parcel?"),
        LoggedQuestion("where is my parcel"),
        LoggedQuestion("Cancel order 3"),
        LoggedQuestion("Cancel order 4"),
        LoggedQuestion("Where is my parcel, please?", scope="another"),
    ]
    found = find_repeats(log, embed, default_verifier())
    assert (found.questions, found.different) == (6, 5)
    assert {(near.a, near.b) for near in found.nears} == {
        ("Where is my parcel?", "where is my parcel"),
        ("Cancel order 3", "Cancel order 4"),
    }
    assert (found.near(0.5), found.served(0.5)) == (2, 1)
    assert [near.a for near in found.merged()] == ["Where is my parcel?"]


def test_a_log_is_what_export_writes() -> None:
    row = {"key": "00", "scope": "ab", "question": "Where?", "answer": "There.", "embedded": True}
    assert read_log([json.dumps(row)]) == [LoggedQuestion("Where?", "ab")]


def test_the_recipe_knows_the_checks_by_name() -> None:
    from typing import get_args

    from pipeline.recipe.response_cache import CheckName

    assert get_args(CheckName) == tuple(CHECKS)


def drawn(seed: int, count: int = 200) -> Measured:
    rng = np.random.default_rng(seed)
    pairs = [
        Pair(f"a{i}", f"b{i}", bool(rng.integers(2)), ("", "x", "y")[rng.integers(3)]) for i in range(count)
    ]
    objects = rng.random((count, len(CHECKS))) < 0.1
    return Measured(pairs, rng.uniform(0.5, 1, count), objects, tuple(CHECKS))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("skipped", [(), ("words", "order")])
def test_without_a_check_just_what_it_alone_held_is_served(seed: int, skipped: tuple[str, ...]) -> None:
    measured = drawn(seed)
    whole = measured.outcome(0.7, skipped)
    weights = weigh(measured, 0.7, skipped)
    assert [weight.check for weight in weights] == [name for name in CHECKS if name not in skipped]
    for weight in weights:
        without = measured.outcome(0.7, (*skipped, weight.check))
        assert without.false.count - whole.false.count == weight.stopped
        assert without.recall.count - whole.recall.count == weight.lost


def test_categories_add_up_to_the_pairs_that_have_one() -> None:
    measured = drawn(7)
    found = by_category(measured, 0.7)
    assert list(found) == ["x", "y"]
    named = np.array([pair.category != "" for pair in measured.pairs])
    whole = measured.outcome(0.7, (), named)
    assert sum(outcome.recall.count for outcome in found.values()) == whole.recall.count
    assert sum(outcome.recall.of for outcome in found.values()) == whole.recall.of
    assert sum(outcome.false.count for outcome in found.values()) == whole.false.count
    assert sum(outcome.false.of for outcome in found.values()) == whole.false.of

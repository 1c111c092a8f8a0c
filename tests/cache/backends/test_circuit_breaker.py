"""A server that does not answer is left alone for a while, longer each time."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from pipeline.cache.backend import BackendDown
from pipeline.cache.packed_backend import CircuitBreaker, ServerUnreachable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(rest: CircuitBreaker, answers: bool) -> str:
    try:
        with rest.attempt():
            if not answers:
                raise ServerUnreachable("no answer")
    except ServerUnreachable:
        return "asked in vain"
    except BackendDown as error:
        return "not asked" if str(error).startswith("no answer; asked again in") else str(error)
    return "answered"


def test_it_rests_twice_as_long_after_each_failure_up_to_a_quarter_of_a_minute() -> None:
    clock = Clock()
    rest = CircuitBreaker(clock)
    for pause in (0.5, 1, 2, 4, 8, 15, 15):
        assert ask(rest, answers=False) == "asked in vain"
        clock.now += pause - 0.01
        assert ask(rest, answers=False) == "not asked"
        clock.now += 0.01


def test_one_request_tries_when_the_rest_is_over_and_the_others_wait_for_it() -> None:
    clock = Clock()
    rest = CircuitBreaker(clock)
    assert ask(rest, answers=False) == "asked in vain"
    clock.now += 0.5
    with rest.attempt():
        assert ask(rest, answers=True) == "not asked"
    assert ask(rest, answers=True) == "answered"


def test_after_one_answer_all_may_ask() -> None:
    clock = Clock()
    rest = CircuitBreaker(clock)
    assert ask(rest, answers=False) == "asked in vain"
    clock.now += 0.5
    assert ask(rest, answers=True) == "answered"
    assert ask(rest, answers=True) == "answered"
    assert ask(rest, answers=False) == "asked in vain"
    clock.now += 0.5  # it begins with a short rest again
    assert ask(rest, answers=True) == "answered"


def test_a_refusal_is_no_reason_to_rest() -> None:
    clock = Clock()
    rest = CircuitBreaker(clock)
    with pytest.raises(BackendDown, match="full"), rest.attempt():
        raise BackendDown("full")
    assert ask(rest, answers=True) == "answered"
    assert ask(rest, answers=False) == "asked in vain"
    clock.now += 0.5
    with pytest.raises(BackendDown, match="full"), rest.attempt():
        raise BackendDown("full")
    assert ask(rest, answers=True) == "answered"


def test_requests_that_fail_together_count_as_one_failure() -> None:
    clock = Clock()
    rest = CircuitBreaker(clock)

    def fail() -> None:
        raise ServerUnreachable("no answer")

    with ExitStack() as together:
        # All have begun before the first of them fails.
        for _ in range(10):
            together.enter_context(suppress(ServerUnreachable))
            together.enter_context(rest.attempt())
            together.callback(fail)
    clock.now += 0.5
    assert ask(rest, answers=True) == "answered"
    # When it is over, it is over: the next failure begins a rest at once.
    assert ask(rest, answers=False) == "asked in vain"
    assert ask(rest, answers=True) == "not asked"

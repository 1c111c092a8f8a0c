"""When a process is started again: properties of the policy."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from pipeline.keeper import RestartPolicy

policies = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 20),
    window_s=st.floats(1, 1e4),
    pause_s=st.floats(0.01, 10),
    max_pause_s=st.floats(0.01, 100),
    max_failing_pause_s=st.floats(0.01, 1000),
)
# Seconds between one failure and the next.
gaps = st.lists(st.floats(0, 1e3), min_size=1, max_size=30)


def times(between: list[float]) -> list[float]:
    return list(accumulate(between))


@given(policies, gaps)
def test_it_fails_too_often_exactly_after_so_many_failures_in_the_window(
    policy: RestartPolicy, between: list[float]
) -> None:
    failures = times(between)
    now = failures[-1]
    recent = [failure for failure in failures if now - failure < policy.window_s]
    assert policy.too_often(failures, now) == (len(recent) > policy.max_restarts)


@given(policies, gaps)
def test_pauses_grow_up_to_the_longest_and_the_first_restart_is_made_at_once(
    policy: RestartPolicy, between: list[float]
) -> None:
    now = 0.0
    pauses = [policy.pause_before_restart([0.0] * count, now) for count in range(1, len(between) + 1)]
    assert pauses == sorted(pauses)
    assert all(pause <= policy.max_pause_s for pause in pauses)
    assert pauses[0] == 0


@given(policies)
def test_pauses_while_failing_grow_up_to_the_longest_and_it_is_tried_for_ever(policy: RestartPolicy) -> None:
    pauses = [policy.pause_while_failing(tries) for tries in (*range(20), 2000)]
    assert pauses == sorted(pauses)
    assert pauses[0] == min(policy.max_pause_s, policy.max_failing_pause_s)
    assert pauses[-1] == policy.max_failing_pause_s


@given(policies, gaps, gaps)
def test_old_failures_change_nothing(policy: RestartPolicy, old: list[float], between: list[float]) -> None:
    recent = [policy.window_s + 1 + sum(old) + time for time in times(between)]
    everything = [*times(old), *recent]
    now = recent[-1]
    assert policy.pause_before_restart(everything, now) == policy.pause_before_restart(recent, now)
    assert policy.too_often(everything, now) == policy.too_often(recent, now)

"""When a process is started again: properties of the policy."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.restart import RestartPolicy

policies = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 200),
    window_s=st.floats(1, 1e4),
    pause_s=st.floats(0.01, 10),
    max_pause_s=st.floats(0.01, 100),
)
# Seconds between one failure and the next.
gaps = st.lists(st.floats(0, 1e3), min_size=1, max_size=300)


def times(between: list[float]) -> list[float]:
    return [sum(between[: number + 1]) for number in range(len(between))]


@given(policies, gaps)
def test_it_is_given_up_exactly_after_so_many_failures_in_the_window(
    policy: RestartPolicy, between: list[float]
) -> None:
    failures = times(between)
    now = failures[-1]
    recent = [failure for failure in failures if now - failure < policy.window_s]
    assert (policy.pause_before_restart(failures, now) is None) == (len(recent) > policy.max_restarts)


@given(policies, gaps)
def test_pauses_grow_up_to_the_longest_and_the_first_restart_is_made_at_once(
    policy: RestartPolicy, between: list[float]
) -> None:
    now = 0.0
    pauses = [policy.pause_before_restart([0.0] * count, now) for count in range(1, len(between) + 1)]
    given = [pause for pause in pauses if pause is not None]
    assert given == sorted(given)
    assert all(pause <= policy.max_pause_s for pause in given)
    assert given[:1] in ([], [0.0])
    assert all(later is None for earlier, later in pairwise(pauses) if earlier is None)


@given(policies, gaps, gaps)
def test_old_failures_change_nothing(policy: RestartPolicy, old: list[float], between: list[float]) -> None:
    recent = [policy.window_s + 1 + sum(old) + time for time in times(between)]
    everything = [*times(old), *recent]
    now = recent[-1]
    assert policy.pause_before_restart(everything, now) == policy.pause_before_restart(recent, now)

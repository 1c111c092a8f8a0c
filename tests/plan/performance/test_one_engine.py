"""The loop that simulates one engine has the results of the scheduler that it stands for, to the last digit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.plan.performance import Workload
from pipeline.plan.performance.one_engine import is_simple, run_one
from pipeline.plan.performance.queueing import run_scheduler
from pipeline.plan.performance.served_engine import PromptBalance, ServedEngine
from pipeline.plan.performance.step_times import StepTimes


@st.composite
def engines(draw: st.DrawFn) -> ServedEngine:
    times = StepTimes(
        lambda sequences, tokens, longest: 7e-3 + 1.3e-5 * sequences + 3.1e-5 * tokens + 1e-7 * longest,
        read_s=draw(st.sampled_from([0.0, 1e-8, 3e-7])),
        pair_s=draw(st.sampled_from([0.0, 1e-9])),
        host=lambda sequences: 1.1e-3 + 1.7e-5 * sequences,
        hides_host=draw(st.booleans()),
        prompt_s=draw(st.sampled_from([0.0, 3e-3])),
        progress=draw(st.sampled_from([1.0, 2.37])),
        width=draw(st.sampled_from([1, 4])),
        ranks=draw(st.sampled_from([1, 4])),
        bundle=draw(st.sampled_from([1, 2])),
    )
    return ServedEngine(
        "", times,
        slots=draw(st.sampled_from([3, 16, 1000])), blocks=draw(st.sampled_from([90, 400, 100_000])),
        step_tokens=draw(st.sampled_from([64, 512, 8192])), chunked=draw(st.booleans()), overlaps=draw(st.booleans()),
        admit_s=draw(st.sampled_from([0.0, 1e-3])), ranks=draw(st.sampled_from([1, 4])),
    )  # fmt: skip


@settings(max_examples=100)
@given(
    engines(),
    st.builds(Workload, st.sampled_from([1, 40, 1500]), st.sampled_from([1, 2, 60])),
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=30).map(sorted),
    st.integers(0, 60),
)
def test_a_loop_has_the_results_of_the_scheduler(
    service: ServedEngine, work: Workload, starts: list[float], later: int
) -> None:
    lengths = work.lengths(len(starts) + later)
    assert run_one(service, lengths, starts) == run_scheduler(service, lengths, starts)


def test_prompts_that_wait_for_other_ranks_are_left_to_the_scheduler() -> None:
    service = ServedEngine("", StepTimes(lambda *_: 1.0), slots=1, blocks=10)
    assert is_simple(service)
    assert not is_simple(replace(service, balance=PromptBalance()))

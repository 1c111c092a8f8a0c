"""What is counted, and from when: fake servers that stall, hang, refuse and read what a client sends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Self

import numpy as np
import pytest

from pipeline.bench.load import LoadRecords, Period, poisson, run_load
from pipeline.bench.load_settings import Load
from pipeline.bench.result import LevelResult, ServerFigures
from pipeline.bench.run import MetricsWatch
from pipeline.bench.summary import summarize
from pipeline.bench.targets import BenchReply, BenchRequest, Target, TritonTarget
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.client import Stats
from pipeline.client.testing import Ending, FakeServer, Received
from pipeline.client.testing import Reply as Script
from pipeline.recipe import Slo
from pipeline.serving.live import DeploymentPages, MetricsPage
from tests.support import CHECKPOINTS

ONE = ScriptedConversation((Turn("Hi", 4),), chat=False)
FOREVER = 600.0


def measure(
    target: Target | FakeServer,
    load: Load,
    conversations: Iterator[ScriptedConversation],
    period: Period,
    stop: asyncio.Event | None = None,
    think_s: float = 0.0,
) -> LoadRecords:
    async def run() -> LoadRecords:
        asked = (
            TritonTarget(target.url, "tensorrt_llm_bls", CHECKPOINTS / "support-target", timeout_s=FOREVER)
            if isinstance(target, FakeServer)
            else target
        )
        async with asked:
            return await run_load(
                asked,
                load,
                conversations,
                period,
                sampling={"max_tokens": 8},
                seed=0,
                stop=stop,
                think_s=think_s,
            )

    return asyncio.run(run())


def figures(records: LoadRecords, slo: Slo | None = None) -> LevelResult:
    return summarize(records, slo, ServerFigures())


def every(seconds: float, count: int) -> Iterator[ScriptedConversation]:
    """Arrivals that follow each other evenly."""
    return (ScriptedConversation(ONE.turns, chat=False, start_s=number * seconds) for number in range(count))


class Scripted:
    """A target that is a function."""

    async def ask(self, question: BenchRequest) -> BenchReply:
        raise NotImplementedError

    async def check(self, question: BenchRequest) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


def test_all_who_came_while_a_server_stalled_have_waited() -> None:
    """No coordinated omission: requests go on coming, and each has waited since it was due, not since the first did."""
    arrived, released = threading.Semaphore(0), threading.Event()

    def answer(_: Received) -> Script:
        arrived.release()
        released.wait(FOREVER)
        return Script()

    def release() -> None:
        for _ in range(30):
            arrived.acquire(timeout=FOREVER)
        released.set()

    with FakeServer(answer) as server:
        releasing = threading.Thread(target=release)
        releasing.start()
        records = measure(server, Load("trace", 1.0), every(0.02, 30), Period(None, None))
        releasing.join()
    found = sorted(records.counted, key=lambda request: request.due_s)
    assert [request.outcome for request in found] == ["complete"] * 30
    assert [request.due_s for request in found] == [number * 0.02 for number in range(30)]
    # None was answered before the last had been sent.
    ended_s = max(request.sent_s for request in found)
    assert ended_s >= 29 * 0.02
    for request in found:
        assert (request.ttft_ms or 0.0) >= (ended_s - request.due_s) * 1e3
    p50 = figures(records).latencies["ttft"].p50
    assert p50 >= (ended_s - found[15].due_s) * 1e3


def test_what_the_generator_is_late_by_counts_as_waiting() -> None:
    class Stalling(Scripted):
        """Holds up the process that sends, once."""

        stalled = False

        async def ask(self, question: BenchRequest) -> BenchReply:  # noqa: ARG002
            sent = time.perf_counter()
            if not self.stalled:
                self.stalled = True
                time.sleep(0.5)
            await asyncio.sleep(0)
            first_at = time.perf_counter()
            ttft_ms = (first_at - sent) * 1e3
            return BenchReply(
                "complete", Stats(ttft_ms=ttft_ms, total_ms=ttft_ms, chunks=1), "x", sent_at=sent
            )

    records = measure(Stalling(), Load("trace", 1.0), every(0.05, 8), Period(None, None))
    found = sorted(records.counted, key=lambda request: request.due_s)
    # All eight were due within the half second, and none of them had its token before it was over.
    for request in found:
        assert (request.ttft_ms or 0.0) >= (0.5 - request.due_s) * 1e3 - 1
    assert max(records.late_ms) > 100
    level = figures(records)
    assert "late" in level.generator.limits
    assert level.generator.late_sent_p99_ms >= 300


def test_arrivals_are_poisson_and_those_of_their_seed() -> None:
    times = [next(arrivals) for arrivals in [poisson(50, 7)] for _ in range(5000)]
    assert times == [next(arrivals) for arrivals in [poisson(50, 7)] for _ in range(5000)]
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


@pytest.mark.parametrize(
    "load", [Load("concurrency", 3), Load("concurrency", 50), Load("rate", 1e6)], ids=str
)
def test_as_many_requests_are_sent_as_were_asked_for(load: Load) -> None:
    """Also by a schedule that is always late, and by more clients than there are requests."""
    with FakeServer(Script(("a", "b", "c"), input_tokens=7)) as server:
        records = measure(server, load, repeat(ONE), Period(None, 20))
    assert len(server.requests) == len(records.counted) == 20
    assert records.in_flight <= (3 if load.value == 3 else 20)
    level = figures(records, Slo(ttft_p95_ms=1e6, itl_p95_ms=1e6))
    assert level.requests == {"complete": 20, "left": 0, "refused": 0, "failed": 0, "abandoned": 0}
    for request in records.counted:
        assert request.first_s is not None
        assert request.first_s + request.itl_ms.sum() / 1e3 <= request.ended_s + 1e-6
    # From the first to the last end: all tokens, in all the time.
    assert level.seconds == pytest.approx(max(request.ended_s for request in records.counted), abs=1e-3)
    assert level.output_tokens_per_s * level.seconds == pytest.approx(20 * 3, rel=0.01)
    assert level.requests_per_s * level.seconds == pytest.approx(20, rel=0.01)
    assert (level.input_tokens_mean, level.output_tokens_mean) == (7, 3)
    assert level.goodput_per_s == level.requests_per_s
    assert level.within_slo
    width = level.seconds / len(level.timeline)
    assert sum(window.output_tokens_per_s for window in level.timeline) * width == pytest.approx(60, rel=0.1)


def test_the_warm_up_is_in_no_latency() -> None:
    with FakeServer() as server:
        records = measure(server, Load("trace", 1.0), every(0.02, 20), Period(None, None, warm_up_s=0.2))
    assert len(records.warm_up) == len(records.counted) == 10
    assert all(request.due_s >= 0.2 for request in records.counted)
    assert figures(records).latencies["ttft"].count == 10


def test_a_warm_up_of_requests_comes_besides_those_that_count() -> None:
    with FakeServer() as server:
        records = measure(server, Load("concurrency", 3), repeat(ONE), Period(None, 6, warm_up_requests=3))
    assert (len(records.warm_up), len(records.counted)) == (3, 6)
    assert 0 < records.began_s <= min(request.due_s for request in records.counted)


def test_what_has_no_end_within_the_grace_has_failed() -> None:
    with FakeServer(Script(ending=Ending.HANG)) as server:
        records = measure(server, Load("concurrency", 4), repeat(ONE), Period(0.2, None, grace_s=0.1))
        for request in server.requests:
            assert request.cancelled.wait(FOREVER)
    level = figures(records, Slo(ttft_p95_ms=1e6))
    assert level.requests["abandoned"] == 4
    assert level.failed_share == 1.0
    assert not level.within_slo
    assert level.seconds == pytest.approx(0.2)


def test_refusals_and_failures_keep_their_reasons_and_are_not_repeated_at_once() -> None:
    scripts = [
        Script(),
        Script((), ending=Ending.ERROR, error="out of luck"),
        Script(("a",), ending=Ending.LOST),
    ]
    with FakeServer(scripts) as server:
        records = measure(server, Load("concurrency", 1), repeat(ONE), Period(None, 9))
    level = figures(records)
    assert level.requests["complete"] == 3
    assert level.requests["failed"] + level.requests["refused"] == 6
    assert any("out of luck" in error for error in level.errors)
    assert sum(level.errors.values()) == 6
    # Without a token they are in no latency.
    assert level.latencies["ttft"].count == 3


def test_clients_leave_within_an_answer() -> None:
    leaving = ScriptedConversation((Turn("Hi", 10),), chat=False, leaves_at=0.3)
    with FakeServer(Script("abcdefghij", delay_s=0.01)) as server:
        records = measure(server, Load("concurrency", 2), repeat(leaving), Period(None, 4))
        for request in server.requests:
            assert request.cancelled.wait(FOREVER)
    level = figures(records)
    assert level.requests["left"] == 4
    assert {len(request.itl_ms) + 1 for request in records.counted} == {3}
    assert level.latencies["ttft"].count == 4
    assert "total" not in level.latencies
    assert level.failed_share == 0


def test_a_conversation_repeats_what_was_said() -> None:
    turns = ScriptedConversation((Turn("One?", 4, exact=True), Turn("Two?", 4), Turn("Three?", 4)))
    with FakeServer(Script(("Yes", "!"))) as server:
        records = measure(server, Load("concurrency", 1), iter((turns,)), Period(None, None), think_s=0.01)
        prompts = [request.prompt for request in server.requests]
        assert server.requests[0].tensors["min_tokens"] == [4]
        assert "min_tokens" not in server.requests[1].tensors
    assert [request.turn for request in records.counted] == [0, 1, 2]
    assert [prompt.count("Yes!") for prompt in prompts] == [0, 1, 2]
    assert all(prompts[2].index(text) < prompts[2].index("Three?") for text in ("One?", "Yes!", "Two?"))


def test_an_early_end_keeps_what_was_measured() -> None:
    async def run() -> LoadRecords:
        stop = asyncio.Event()

        def watch(records: LoadRecords, _: float) -> None:
            if len(records.counted) >= 2:
                stop.set()

        async with TritonTarget(server.url, "tensorrt_llm_bls", None, timeout_s=FOREVER) as target:
            return await run_load(
                target, Load("concurrency", 2), repeat(ONE), Period(FOREVER, None),
                sampling={"max_tokens": 8}, seed=0, watch=watch, stop=stop,
            )  # fmt: skip

    with FakeServer([Script(), Script(), Script(ending=Ending.HANG)]) as server:
        records = asyncio.run(run())
    assert records.interrupted
    level = figures(records)
    assert level.interrupted
    assert level.requests["complete"] >= 2
    assert level.requests["abandoned"] == 0
    assert level.seconds < FOREVER


def test_a_fault_of_this_program_is_not_counted_as_the_servers() -> None:
    class Broken(Scripted):
        async def ask(self, question: BenchRequest) -> BenchReply:  # noqa: ARG002
            raise ZeroDivisionError

    for load in (Load("concurrency", 2), Load("rate", 100)):
        with pytest.raises(ZeroDivisionError):
            measure(Broken(), load, repeat(ONE), Period(FOREVER, None))


def test_queue_prefill_and_drafts_are_what_the_server_said() -> None:
    script = Script(("a", "b"), queue_ms=12.0, prefill_ms=30.5, draft_tokens=8, accepted_tokens=6)
    with FakeServer(script) as server:
        level = figures(measure(server, Load("concurrency", 1), repeat(ONE), Period(None, 3)))
    assert level.latencies["queue"].p50 == 12.0
    assert level.latencies["prefill"].p99 == 30.5
    assert level.acceptance == 0.75


def pages(proposed: float, accepted: float) -> tuple[str, ...]:
    """The same counts on a page of our gateway and of vLLM, among those of another model."""
    ours, theirs = "pipeline_draft_tokens", "vllm:spec_decode_num"
    return (
        f"""# TYPE {ours} counter
{ours}_total{{model="llama",draft_token_type="proposed"}} {proposed}
{ours}_total{{model="llama",draft_token_type="accepted"}} {accepted}
{ours}_total{{model="other",draft_token_type="proposed"}} {9 * proposed}
{ours}_total{{model="other",draft_token_type="accepted"}} 0
""",
        f"""# TYPE {theirs}_draft_tokens counter
{theirs}_draft_tokens_total{{model_name="llama",engine="0"}} {proposed}
# TYPE {theirs}_accepted_tokens counter
{theirs}_accepted_tokens_total{{model_name="llama",engine="0"}} {accepted}
""",
    )


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize(("grown", "share"), [((40, 10), 0.25), ((0, 0), None)])
def test_drafts_of_a_load_are_those_that_the_page_counted_meanwhile(
    monkeypatch: pytest.MonkeyPatch, whose: int, grown: tuple[int, int], share: float | None
) -> None:
    counts = iter(((100, 90), (100 + grown[0], 90 + grown[1])))

    def fetch(*_: object) -> DeploymentPages:
        return DeploymentPages(None, MetricsPage.parse(pages(*next(counts))[whose]))

    monkeypatch.setattr(DeploymentPages, "fetch", fetch)
    watch = MetricsWatch("llama", None, "http://gateway")

    async def load() -> None:
        async with watch.watching():
            pass

    asyncio.run(load())
    assert watch.figures().acceptance == share

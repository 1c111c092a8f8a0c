"""Every figure of a load held to what a scripted server with a clock of its own knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.bench.load import LoadRecords, Period, run_load
from pipeline.bench.load_settings import Load
from pipeline.bench.result import LevelResult, ServerFigures
from pipeline.bench.summary import summarize
from pipeline.bench.targets import BenchRequest, OpenAITarget
from pipeline.bench.verdict import verdict
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.cli.render.bench import bench_table
from pipeline.errors import ServerError
from pipeline.reading import read_tokenizer
from tests.support import CHECKPOINTS
from tests.support.benched import SLO, result
from tests.support.scripted_openai import Answer, Chunk, ScriptedOpenAI, own_clock

Run = Callable[[Any], Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with own_clock(monkeypatch) as runs:
        yield runs


def measured(
    run: Run,
    script: Callable[[int, dict[str, Any]], Answer],
    *,
    requests: int,
    load: Load = Load("concurrency", 1),  # noqa: B008
    asked: int = 4,
) -> tuple[ScriptedOpenAI, LoadRecords]:
    """Put a load on a server that follows a script; the records, and what the server knows."""
    server = ScriptedOpenAI(script)
    conversation = ScriptedConversation((Turn("Hi", asked, exact=True),))

    async def measure() -> LoadRecords:
        async with server.serving(), OpenAITarget(server.url, "llama", timeout_s=600) as target:
            return await run_load(
                target, load, repeat(conversation), Period(None, requests), sampling={}, seed=0
            )

    return server, run(measure())


def figures(records: LoadRecords) -> LevelResult:
    return summarize(records, SLO, ServerFigures())


def steady(chunks: int = 4, first_s: float = 0.2, gap_s: float = 0.05, **more: Any) -> Answer:
    return Answer((Chunk(first_s), *repeat(Chunk(gap_s), chunks - 1)), **more)


chunks = st.builds(
    Chunk,
    wait_s=st.sampled_from((0.0, 0.001, 0.05, 1.0)),
    text=st.sampled_from((" word", "", "ü")),
    tokens=st.integers(1, 4),
    more=st.sampled_from(({}, {"error": None}, {"usage": None})),
    split=st.integers(0, 40),
    split_s=st.sampled_from((0.0, 0.3)),
)
answers = st.builds(
    Answer,
    chunks=st.lists(chunks, min_size=1, max_size=6).map(tuple),
    ends=st.sampled_from(("done", "done", "done", "early", "cut")),
    status=st.sampled_from((200, 200, 200, 429, 500)),
    body=st.just("no"),
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=st.lists(answers, min_size=1, max_size=8))
def test_what_is_measured_is_what_the_server_did(run: Run, scripts: list[Answer]) -> None:
    """Empty and split events, several tokens a chunk, bursts, stalls, null errors, early ends, cuts and refusals."""
    server, records = measured(run, lambda number, _: scripts[number], requests=len(scripts))
    level = figures(records)
    outcomes = Counter(
        {429: "refused", 500: "failed"}.get(script.status, "complete" if script.ends == "done" else "failed")
        for script in scripts
    )
    assert {name: count for name, count in level.requests.items() if count} == outcomes
    for truth, request in zip(server.requests, records.counted, strict=True):
        if truth.answer.status != 200 or not truth.chunks_s:
            assert request.ttft_ms is None
            continue
        assert request.ttft_ms == pytest.approx((truth.chunks_s[0] - truth.came_s) * 1e3, rel=0.01, abs=0.01)
        gaps = [(b - a) * 1e3 for a, b in zip(truth.chunks_s, truth.chunks_s[1:], strict=False)]
        assert request.itl_ms.tolist() == pytest.approx(gaps, rel=0.01, abs=0.01)
        if request.outcome == "complete":
            assert request.total_ms == pytest.approx((truth.ended_s - truth.came_s) * 1e3, rel=0.01, abs=0.01)
            assert request.stats.output_tokens == truth.tokens
            assert request.short == (truth.tokens < 4)


def test_throughput_is_that_of_the_server(run: Run) -> None:
    answer = Answer((*steady(chunks=8).chunks, Chunk(0.01, text="", tokens=0)))
    server, records = measured(run, lambda *_: answer, requests=12, load=Load("concurrency", 3))
    level = figures(records)
    lasts_s = max(request.ended_s for request in server.requests) - min(
        request.came_s for request in server.requests
    )
    assert level.output_tokens_per_s == pytest.approx(12 * 8 / lasts_s, rel=0.01)
    assert level.latencies["tpot"].p50 == pytest.approx(50, rel=0.01)
    assert level.longest_silence_s == pytest.approx(0.2, rel=0.01)
    assert not level.stalled


def test_a_stall_that_a_closed_loop_hides_is_named(run: Run) -> None:
    """Four of four hundred requests wait for five seconds: no percentile up to the 95th has them."""

    def script(number: int, _: object) -> Answer:
        return Answer((Chunk(0.1), Chunk(5.0 if 200 <= number < 204 else 0.01), Chunk(0.01), Chunk(0.01)))

    _, records = measured(run, script, requests=400, load=Load("concurrency", 4))
    level = figures(records)
    assert level.latencies["itl"].p99 == pytest.approx(10, rel=0.01)
    assert level.latencies["itl"].max == pytest.approx(5000, rel=0.01)
    assert level.longest_silence_s == pytest.approx(5, rel=0.01)
    assert level.stalled
    assert "no chunk from any request for 5 s" in verdict(result([level]))[1]


def test_nothing_is_silent_while_nobody_waits(run: Run) -> None:
    _, records = measured(run, lambda *_: steady(), requests=6, load=Load("rate", 0.5))
    level = figures(records)
    assert max(request.due_s for request in records.counted) > 4
    assert level.longest_silence_s == pytest.approx(0.2, rel=0.01)


def test_without_usage_tokens_are_counted_or_chunks_are_said(run: Run) -> None:
    tokenizer = read_tokenizer(Path(CHECKPOINTS / "support-target" / "tokenizer.json"))
    words = " Where is my parcel?"
    script = Answer((Chunk(0.2, words), Chunk(0.05, words), Chunk(0.05, words)), usage=False)
    _, records = measured(run, lambda *_: script, requests=3)
    level = figures(records)
    assert (level.tokens_by, level.unit, level.output_tokens_mean) == ("chunks", "chunks", None)
    assert any("chunks are counted in place of tokens" in warning for warning in level.warnings)
    assert "chunks/s" in verdict(result([level]))[1]

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    records.count_tokens(count)
    counted = figures(records)
    assert (counted.tokens_by, counted.unit) == ("tokenizer", "tokens")
    assert counted.output_tokens_mean == count(3 * words)
    assert counted.output_tokens_per_s == pytest.approx(
        level.output_tokens_per_s * count(3 * words) / 3, rel=0.01
    )


def test_answers_that_end_before_they_may_are_counted(run: Run) -> None:
    def script(number: int, _: object) -> Answer:
        return steady(chunks=2 if number % 2 else 4)

    server, records = measured(run, script, requests=10)
    level = figures(records)
    assert {request.body["min_tokens"] for request in server.requests} == {4}
    assert (level.requests["complete"], level.short_answers) == (10, 5)
    assert any(
        "5 of 10 answers were shorter than asked for (2 of 4 tokens)" in warning for warning in level.warnings
    )


def test_errors_of_one_kind_are_counted_together_whatever_their_ids(run: Run) -> None:
    def script(number: int, _: object) -> Answer:
        body = f"request req-{number:08x}f00 took {number + 10} ms: no memory is left"
        return Answer(status=500 if number % 3 else 429, body=body)

    _, records = measured(run, script, requests=30)
    level = figures(records)
    assert sorted(level.errors.values()) == [10, 20]
    assert {error[:8] for error in level.errors} == {"HTTP 500", "HTTP 429"}


def test_bursts_show_time_per_token_before_gaps(run: Run) -> None:
    """Drafts that are accepted come together: most gaps are nothing, and a token takes 20 ms."""
    burst = Answer((Chunk(0.2), *([Chunk(0.0), Chunk(0.0), Chunk(0.0), Chunk(0.08)] * 4)))
    _, records = measured(run, lambda *_: burst, requests=5)
    level = figures(records)
    assert level.latencies["itl"].p50 == 0
    assert level.latencies["tpot"].p50 == pytest.approx(20, rel=0.01)
    table: Any = bench_table(result([level]), width=100).renderables[1]
    headings = [str(column.header) for column in table.columns]
    assert headings.index("TPOT p50") < headings.index("ITL p95")
    assert "ITL p50" not in headings
    assert {"failed", "ITL max", "silent s"} <= {*headings}


def test_a_wrong_model_is_noticed_by_one_request(run: Run) -> None:
    def script(_: int, body: dict[str, Any]) -> Answer:
        known = body["model"] == "llama"
        return steady() if known else Answer(status=404, body=f"no model {body['model']}")

    server = ScriptedOpenAI(script, models=("llama", "qwen"))
    question = BenchRequest("Hi", {"max_tokens": 1})

    async def check(model: str) -> None:
        async with server.serving(), OpenAITarget(server.url, model, timeout_s=10) as target:
            await target.check(question)

    run(check("llama"))
    with pytest.raises(
        ServerError, match=r"refuses requests for lama: HTTP 404: no model lama; it serves llama, qwen"
    ):
        run(check("lama"))
    assert len(server.requests) == 2


def test_a_busy_server_is_not_taken_for_one_that_refuses(run: Run) -> None:
    server = ScriptedOpenAI(lambda *_: Answer(status=429, body="later"))

    async def check() -> None:
        async with server.serving(), OpenAITarget(server.url, "llama", timeout_s=10) as target:
            await target.check(BenchRequest("Hi", {"max_tokens": 1}))

    run(check())

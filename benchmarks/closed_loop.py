"""The closed loop of several benchmarks, over the load generator of `pipeline bench`."""

from __future__ import annotations

import itertools

from pipeline.bench.load import LoadRecords, Period, run_load
from pipeline.bench.load_settings import Load
from pipeline.bench.result import LevelResult, ServerFigures
from pipeline.bench.summary import summarize
from pipeline.bench.targets import Target
from pipeline.bench.workload import ScriptedConversation


async def closed_loop(
    target: Target, conversation: ScriptedConversation, streams: int, requests: int, tokens: int
) -> tuple[LoadRecords, LevelResult]:
    """Keep streams under way that each ask again when their answer has ended; the first of each is not counted.

    Args:
        target: Server to ask.
        conversation: Question of all requests.
        streams: Requests at a time.
        requests: Requests that count.
        tokens: Most tokens of an answer.

    Raises:
        SystemExit: A request failed.
    """
    async with target:
        records = await run_load(
            target,
            Load("concurrency", streams),
            itertools.repeat(conversation),
            Period(None, requests, warm_up_requests=streams),
            sampling={"max_tokens": tokens},
            seed=0,
        )
    level = summarize(records, None, ServerFigures())
    if level.failed_share:
        raise SystemExit(f"requests failed: {level.requests} {level.errors}")
    return records, level

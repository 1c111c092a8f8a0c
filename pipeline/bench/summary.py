"""Figures of one load, computed from its requests; terms as in `result`. Milliseconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from pipeline.bench.load import LoadRecords, RequestMeasurement
from pipeline.bench.load_settings import TokensBy
from pipeline.bench.result import (
    Distribution,
    Generator,
    LevelResult,
    ServerFigures,
    SloCheck,
    TimeWindow,
    rounded,
)
from pipeline.bench.statistics import Values, binned, percentile
from pipeline.recipe import Slo

_WINDOWS = 60  # of the time line
_ERRORS, _NAMED = 8, 3  # kinds of error that are kept, and that a warning names
_SHORT_TIMES = 5  # a load that is shorter than this many requests is mostly beginning and end
_LATE_MS = 10.0  # a generator that is later than this at the 99th percentile adds to what it measures
_LATE_SHARE = 0.1  # ... unless that is less than this share of TTFT's and ITL's 95th percentile
_BUSY = 0.9  # share of one processor beyond which this process may be the limit
_TOKENS_BY: tuple[TokensBy, ...] = ("chunks", "tokenizer", "server")  # least trustworthy first
# Words with a digit, such as ids of requests, in which errors of one kind differ; not the status.
_VARYING = re.compile(r"(?<!HTTP )(?<![\w-])(?=[\w-]*\d)[\w-]+")
_OUTCOMES = ("complete", "left", "refused", "failed", "abandoned")


def summarize(records: LoadRecords, slo: Slo | None, server: ServerFigures) -> LevelResult:
    """Compute the figures of one load.

    Latencies are those of the requests that count. Rates cover the time from the end of the warm-up to that of the
    period, whichever request a token or an answer belongs to: of a request under way at either end, a part counts.
    """
    counted, everything = records.counted, (*records.warm_up, *records.counted)
    complete = [request for request in counted if request.outcome == "complete"]
    # Answers that a client left have a first token, and gaps, as others have.
    begun = [request for request in counted if request.outcome in ("complete", "left")]
    seconds = max(records.ended_s - records.began_s, 1e-9)
    latencies = {
        "ttft": Distribution.of([_as_tuple(request.ttft_ms) for request in begun]),
        "itl": Distribution.of([request.itl_ms for request in begun]),
        "tpot": Distribution.of([_as_tuple(request.tpot_ms) for request in complete]),
        "total": Distribution.of([_as_tuple(request.total_ms) for request in complete]),
        "queue": Distribution.of([_as_tuple(request.stats.queue_ms) for request in begun]),
        "prefill": Distribution.of([_as_tuple(request.stats.prefill_ms) for request in begun]),
    }
    distributions = {name: latency for name, latency in latencies.items() if latency is not None}
    good_ends = _good_ends(complete, slo)
    good = None if good_ends is None or not complete else len(good_ends) / len(complete)
    chunks = _Chunks.of(everything)
    answered = sum(
        request.outcome == "complete" and records.began_s <= request.ended_s <= records.ended_s
        for request in everything
    )
    inputs = [request.stats.input_tokens for request in complete if request.stats.input_tokens is not None]
    outputs = [request.stats.output_tokens for request in complete if request.stats.output_tokens is not None]
    proposed = sum(request.stats.draft_tokens or 0 for request in begun)
    accepted = sum(request.stats.accepted_tokens or 0 for request in begun)
    cached = sum(request.stats.cached is not None for request in complete)
    rate, generator = answered / seconds, _generator(records, distributions)
    return LevelResult(
        kind=records.load.kind,
        value=records.load.value,
        seconds=round(seconds, 6),
        interrupted=records.interrupted,
        requests={name: sum(request.outcome == name for request in counted) for name in _OUTCOMES},
        errors=dict(_errors(counted)),
        short_answers=sum(request.short for request in complete),
        tokens_by=_tokens_by(complete),
        input_tokens_mean=rounded(float(np.mean(inputs))) if inputs else None,
        output_tokens_mean=rounded(float(np.mean(outputs))) if outputs else None,
        requests_per_s=rounded(rate),
        output_tokens_per_s=rounded(chunks.tokens_between(records.began_s, records.ended_s) / seconds),
        input_tokens_per_s=rounded(rate * float(np.mean(inputs))) if inputs else None,
        goodput_per_s=None if good is None else rounded(rate * good),
        good_share=None if good is None else rounded(good),
        latencies=distributions,
        acceptance=rounded(accepted / proposed) if proposed else server.acceptance,
        cached_share=rounded(cached / len(complete)) if complete else None,
        in_flight_max=records.in_flight,
        longest_silence_s=_longest_silence(records, chunks),
        generator=generator,
        server=server,
        slo=_slo_checks(slo, distributions),
        timeline=_timeline(records, chunks, good_ends),
        warnings=tuple(_warnings(records, generator, distributions, cached)),
        samples=_samples(complete),
    )


def _warnings(
    records: LoadRecords, generator: Generator, distributions: Mapping[str, Distribution], cached: int
) -> Iterator[str]:
    """Yield reasons to mistrust the figures."""
    if records.interrupted:
        yield "Ctrl-C ended the load early, and what was under way then is in no figure"
    if generator.limits:
        yield f"the generator itself may be the limit: {generator.limits}"
    ttft, total = distributions.get("ttft"), distributions.get("total")
    if ttft is None:
        yield "no request was answered"
    elif ttft.intervals["p95"] is None:
        yield "there are too few requests for an interval of p95: measure longer"
    elif ttft.intervals["p99"] is None:
        yield "there are too few requests for an interval of p99: measure longer"
    if total is not None and (records.ended_s - records.began_s) * 1e3 < _SHORT_TIMES * total.p50:
        yield f"the load was shorter than {_SHORT_TIMES} requests one after the other: measure longer"
    for error, count in _errors(records.counted)[:_NAMED]:
        yield f"{count} failed: {error}"
    complete = [request for request in records.counted if request.outcome == "complete"]
    if short := [request for request in complete if request.short]:
        had = float(np.mean([request.stats.output_tokens or 0 for request in short]))
        asked_tokens = float(np.mean([request.asked_tokens or 0 for request in short]))
        yield (
            f"{len(short)} of {len(complete)} answers were shorter than asked for "
            f"({had:.0f} of {asked_tokens:.0f} tokens): the server does not keep min_tokens"
        )
    match _tokens_by(complete):
        case "chunks":
            yield "the server sent no usage, so chunks are counted in place of tokens: --tokenizer FOLDER counts tokens"
        case "tokenizer":
            yield "the server sent no usage: the tokens of its answers were counted by the tokenizer"
    if abandoned := sum(request.outcome == "abandoned" for request in records.counted):
        yield f"{abandoned} requests had no end within the grace, and count as failed"
    if cached:
        yield f"{cached} answers came from the response cache, and are part of all figures"


def _errors(requests: Sequence[RequestMeasurement]) -> list[tuple[str, int]]:
    """An example of each kind of error, and how many requests had it: the most frequent first."""
    kinds: dict[str, list[str]] = {}
    for request in requests:
        if request.error:
            kinds.setdefault(_VARYING.sub("", request.error), []).append(request.error)
    most = sorted(kinds.values(), key=len, reverse=True)[:_ERRORS]
    return [(errors[0], len(errors)) for errors in most]


def _tokens_by(complete: Sequence[RequestMeasurement]) -> TokensBy:
    """Name who counted the tokens of answers; the least trustworthy of several."""
    methods = {request.tokens_by for request in complete}
    return next((way for way in _TOKENS_BY if way in methods), "server")


def _longest_silence(records: LoadRecords, chunks: _Chunks) -> float | None:
    """Longest time without a chunk while a request was under way, in the part of the load that counts."""
    requests = (*records.warm_up, *records.counted)
    marks = [(request.sent_s, 1) for request in requests] + [(request.ended_s, -1) for request in requests]
    marks += [(float(at_s), 0) for at_s in chunks.at_s]
    longest, flying, since_s = 0.0, 0, records.began_s
    for at_s, change in sorted(marks):
        until_s = min(at_s, records.ended_s)
        if flying:
            longest = max(longest, until_s - max(since_s, records.began_s))
        if change <= 0 or not flying:
            since_s = at_s
        flying += change
    return rounded(longest) if chunks.at_s.size else None


def _good_ends(complete: Sequence[RequestMeasurement], slo: Slo | None) -> list[float] | None:
    """Ends of completed requests that each met the SLO, in seconds; None without one."""
    if slo is None or (slo.ttft_p95_ms is None and slo.itl_p95_ms is None):
        return None
    first, between = slo.ttft_p95_ms or np.inf, slo.itl_p95_ms or np.inf
    return [
        request.ended_s
        for request in complete
        if (request.ttft_ms or 0.0) <= first and (request.tpot_ms or 0.0) <= between
    ]


def _slo_checks(slo: Slo | None, distributions: dict[str, Distribution]) -> tuple[SloCheck, ...]:
    checks = []
    for target, wanted in ({} if slo is None else slo.model_dump(exclude_none=True)).items():
        name, percent = target.split("_")[:2]
        latency = distributions.get(name)
        measured = None if latency is None else latency.at(int(percent[1:]))
        checks.append(
            SloCheck(
                target=target,
                wanted=wanted,
                measured=measured,
                met=measured is not None and measured <= wanted,
            )
        )
    return tuple(checks)


def _generator(records: LoadRecords, distributions: Mapping[str, Distribution]) -> Generator:
    late = percentile(records.late_ms or [0.0], 99)
    late_sent = percentile(
        [(request.sent_s - request.due_s) * 1e3 for request in records.counted] or [0.0], 99
    )
    measured = [distributions[name].p95 for name in ("ttft", "itl") if name in distributions]
    limits = []
    if late > _LATE_MS and late > _LATE_SHARE * min(measured, default=0.0):
        limits.append(f"it was {late:.0f} ms late at the 99th percentile")
    if records.cpu_share > _BUSY:
        limits.append(f"it used {records.cpu_share:.0%} of a processor")
    return Generator(
        late_p99_ms=rounded(late),
        cpu_share=rounded(records.cpu_share),
        late_sent_p99_ms=rounded(late_sent),
        limits=" and ".join(limits),
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """All chunks of some requests.

    Attributes:
        at_s: Time of each chunk, in seconds since the load began, [chunks].
        tokens: Tokens of each, as a mean over its answer, because servers do not report single chunks, [chunks].
        gap_at_s: Times of chunks that are not the first of their answers, [gaps].
        gap_ms: Time since the chunk before, [gaps].
    """

    at_s: Values
    tokens: Values
    gap_at_s: Values
    gap_ms: Values

    @classmethod
    def of(cls, records: Iterable[RequestMeasurement]) -> Self:
        empty = np.empty(0)
        at_s, tokens, gap_at_s, gap_ms = [empty], [empty], [empty], [empty]
        for record in records:
            if record.first_s is None:
                continue
            # Sums of rounded gaps may lie behind the end of the answer, and so of the load.
            later_s = np.minimum(
                record.first_s + np.cumsum(record.itl_ms, dtype=np.float64) / 1e3, record.ended_s
            )
            count = len(later_s) + 1
            at_s += [np.array([record.first_s]), later_s]
            tokens.append(np.full(count, (record.stats.output_tokens or count) / count))
            gap_at_s.append(later_s)
            gap_ms.append(record.itl_ms.astype(np.float64))
        return cls(*map(np.concatenate, (at_s, tokens, gap_at_s, gap_ms)))

    def tokens_between(self, low_s: float, high_s: float) -> float:
        return float(self.tokens[(low_s < self.at_s) & (self.at_s <= high_s)].sum())

    def gaps_between(self, low_s: float, high_s: float) -> Values:
        return self.gap_ms[(low_s < self.gap_at_s) & (self.gap_at_s <= high_s)]


def _timeline(
    records: LoadRecords, chunks: _Chunks, good_ends: Sequence[float] | None
) -> tuple[TimeWindow, ...]:
    """Percentiles of what came in each of `_WINDOWS` equal windows, the warm-up included."""
    begun = [request for request in (*records.warm_up, *records.counted) if request.first_s is not None]
    if not begun or records.ended_s <= 0:
        return ()
    first_s, ttft_ms = (
        np.array(values)
        for values in zip(*((request.first_s, request.ttft_ms) for request in begun), strict=True)
    )
    width = records.ended_s / _WINDOWS
    edges = np.linspace(0, records.ended_s, _WINDOWS + 1).tolist()
    windows = []
    for low, high in pairwise(edges):
        ttft = ttft_ms[(low < first_s) & (first_s <= high)]
        itl = chunks.gaps_between(low, high)
        windows.append(
            TimeWindow(
                at_s=rounded((low + high) / 2),
                ttft_p50_ms=_rounded_percentile(ttft, 50),
                ttft_p95_ms=_rounded_percentile(ttft, 95),
                itl_p50_ms=_rounded_percentile(itl, 50),
                itl_p95_ms=_rounded_percentile(itl, 95),
                output_tokens_per_s=rounded(chunks.tokens_between(low, high) / width),
                good_per_s=None
                if good_ends is None
                else rounded(sum(low < at_s <= high for at_s in good_ends) / width),
                itl_counts={int(number): int(count) for number, count in _filled(binned(itl))},
            )
        )
    return tuple(windows)


def _filled(counts: Values) -> Iterator[tuple[int, int]]:
    """Yield the bins that hold something, with their counts."""
    (numbers,) = np.nonzero(counts)
    yield from zip(numbers.tolist(), counts[numbers].tolist(), strict=True)


def _samples(complete: Sequence[RequestMeasurement]) -> dict[str, tuple[float | None, ...]]:
    return {
        "due_s": tuple(rounded(request.due_s) for request in complete),
        "ttft": tuple(_or_none(request.ttft_ms) for request in complete),
        "tpot": tuple(_or_none(request.tpot_ms) for request in complete),
        "total": tuple(_or_none(request.total_ms) for request in complete),
        "output_tokens": tuple(request.stats.output_tokens for request in complete),
    }


def _rounded_percentile(values: Values, percent: int) -> float | None:
    return rounded(percentile(values, percent)) if len(values) else None


def _as_tuple(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)


def _or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)

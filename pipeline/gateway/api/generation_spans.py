"""Spans of a generation, by OpenTelemetry's semantic conventions for generative AI (1.37 to 1.42,
`docs/gen-ai/gen-ai-spans.md`, status: development; `gen_ai.response.time_to_first_chunk` is newer than 1.37):

    POST /v1/chat/completions              SERVER, of the request
      queue                                waiting for a slot of the model
      cache lookup                         in the response cache, if there is one
      chat llama-3.1-8b                    CLIENT, the call of Triton; event: first_token
        InferRequest                       Triton's own spans, if it exports them
          tensorrt_llm_bls …

Each choice has spans of its own. An answer that the cache gave has no call of Triton.
"""

from __future__ import annotations

from typing import Any

from pipeline.gateway.api.generation import ChoiceTimes, Generation
from pipeline.gateway.metric_names import PROVIDER
from pipeline.gateway.traces import Span


def request_attributes(generation: Generation) -> dict[str, Any]:
    """Return the attributes of a completion that is over, as a whole."""
    model = generation.model.name
    return {
        "gen_ai.operation.name": generation.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model if generation.stats else None,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(stats.output_tokens or 0 for stats in generation.stats.values()),
        "gen_ai.response.finish_reasons": [
            times.finish_reason for times in generation.times.values() if times.finish_reason
        ]
        or None,
        **_sampling(generation),
    }


def end_spans(generation: Generation, span: Span, error_type: str | None) -> None:
    """Export the spans of each choice of a generation that is over, below the span of the request."""
    for index, times in generation.times.items():
        if times.started is None:
            continue
        span.start_child("queue", began=times.requested).end({}, ended=times.started)
        stats = generation.stats.get(index)
        cached = stats.cached if stats else None
        if generation.model.cache is not None and times.sent is not None:
            outcome = {"pipeline.cache": cached.kind if cached else "miss"}
            span.start_child("cache lookup", began=times.started).end(outcome, ended=times.sent)
        if times.span is not None and cached is None:
            _end_call(generation, index, times, times.span, error_type)


def _end_call(
    generation: Generation, index: int, times: ChoiceTimes, span: Span, error_type: str | None
) -> None:
    stats, failed = generation.stats.get(index), error_type if times.finish_reason is None else None
    if times.first_chunk is not None:
        span.add_event("first_token", times.first_chunk)
    host, _, port = generation.model.client.urls[0].rpartition(":")
    several = len(generation.model.client.urls) > 1
    waited = None if times.first_chunk is None or times.sent is None else times.first_chunk - times.sent
    span.end(
        {
            **request_attributes(generation),
            "gen_ai.usage.input_tokens": generation.prompt_of(index).tokens,
            "gen_ai.usage.output_tokens": stats.output_tokens if stats else None,
            "gen_ai.response.finish_reasons": [times.finish_reason] if times.finish_reason else None,
            "gen_ai.response.time_to_first_chunk": waited,
            "server.address": None if several else host,
            "server.port": None if several else int(port),
            "error.type": failed,
        },
        error=failed,
        ended=times.ended,
    )


def _sampling(generation: Generation) -> dict[str, Any]:
    """Collect the sampling parameters that the request sets."""
    request = generation.request
    return {
        "gen_ai.request.max_tokens": generation.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.presence_penalty": request.presence_penalty,
        "gen_ai.request.stop_sequences": list(request.stop) if request.stop else None,
        "gen_ai.request.choice.count": request.n if request.n and request.n > 1 else None,
        "gen_ai.request.stream": True if request.stream else None,
    }

"""The way of a request through every API: authenticated, parsed, checked, answered by a model, recorded.

An answer is one JSON object or an event stream, and is given up when the client leaves. How it ended is recorded in the
metrics and in the request's line of the log.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pipeline.client import Cached, Chunk, ClientError, PromptTooLong
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.api.generation_spans import end_spans, request_attributes
from pipeline.gateway.api.parsing import MAX_TOKENS, ignored_headers, parse_request, tolerate
from pipeline.gateway.api.prompts import Content
from pipeline.gateway.api.schema import GenerationRequest, ModelRequest
from pipeline.gateway.api.sse import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    ReaderTooSlow,
    WriteCoalescer,
    cancel_on_disconnect,
    encode_event,
    wait_for_disconnect,
)
from pipeline.gateway.context import SMALL_BODY_BYTES, EndpointFamily, GatewayContext
from pipeline.gateway.errors import QUARANTINED, ApiError, error_response, from_client_error, to_api_error
from pipeline.gateway.limits import Tenant
from pipeline.gateway.records import CacheHit, RequestRecord
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.text_processes import OVER_BUDGET, OverBudget

# Codes of errors that may end an answer in its middle.
_BROKEN_OFF = ("upstream_lost", "timeout", "upstream_error", QUARANTINED)
_Body = TypeVar("_Body", bound=ModelRequest)


class AnswerContext(NamedTuple):
    """Model, tenant and record of a request: what an answer is made of besides the body."""

    model: ServedModel
    tenant: Tenant
    record: RequestRecord

    def generation(self, request: GenerationRequest, contents: Sequence[Content]) -> Generation:
        """Check a request, render its prompts, and count their tokens; raises what `Generation` does."""
        self.tenant.check_choices(len(contents) * request.candidates)
        return Generation(self.model, self.tenant, request, contents, self.record.id, self.record.span)


class ModelAnswer(ABC):
    """A model's answer to one request, in the form of one API.

    It may be made in any thread, and raises what `Generation` does; its methods are for the event loop.

    Attributes:
        keep_alive: event that a stream sends after long silence.
        cached: where the first chunk came from, if not from the model.
    """

    keep_alive: ClassVar[bytes] = KEEP_ALIVE

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.cached: Cached | None = None
        self._open_body: WriteCoalescer | None = None

    def write_to(self, body: WriteCoalescer) -> None:
        """Let events go to the body of a stream, past `events`, where nothing has to be waited for: that wakes no task.

        To be called before `events`. Events that go past it follow those that it has yielded.
        """
        self._open_body = body
        # Chunks of several choices come to `events` through a queue.
        if self.generation.choices == 1:
            self.generation.take_chunk = self._take_chunk

    def _take_chunk(self, chunk: Chunk) -> bool:
        """Write the events of a chunk, unless it is special, or has to wait."""
        if self._open_body is None or not self._open_body.has_room or chunk.prompt_log_probs is not None:
            return False
        if event := self.chunk_event(chunk):
            self._open_body.put_now(event)
        return True

    @abstractmethod
    def chunk_event(self, chunk: Chunk) -> bytes:
        """Encode the events of a chunk of the first choice but its first and last; b"" if it has none."""

    @property
    def streams(self) -> bool:
        """Whether the answer is to be streamed."""
        return bool(self.generation.request.stream)

    @abstractmethod
    async def whole(self) -> Mapping[str, Any] | bytes:
        """Generate the whole answer, and return it as one object, or the JSON of one."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer as server-sent events, those of a chunk as soon as it has come."""

    def error_events(self, error: ApiError, request_id: str) -> bytes:
        """Encode the end of a stream that fails after it began."""
        return encode_event(error.body(request_id))


_Answer = TypeVar("_Answer", bound=ModelAnswer)


class RecordedAnswer:
    """An answer with the metrics and the log record that it ends up in."""

    def __init__(self, answer: ModelAnswer, context: GatewayContext, record: RequestRecord) -> None:
        self.answer, self.record = answer, record
        self._context = context
        context.metrics.begin(answer.generation)

    @property
    def x_cache(self) -> str:
        """Origin of the answer: miss, exact, shared, or semantic with the similarity of the two questions."""
        cached = self.answer.cached
        if cached is None:
            return "miss"
        return f"semantic; similarity={cached.similarity:.4f}" if cached.kind == "semantic" else cached.kind

    def fail(self, error: Exception) -> ApiError:
        """Record an error, and return what to answer.

        Raises:
            Exception: the error itself, if it is neither an `ApiError` nor a `ClientError`.
        """
        answered = to_api_error(error)
        if answered.code in _BROKEN_OFF and (tokens := self._completion_tokens):
            answered.completion_tokens = tokens
            again = "" if answered.code == QUARANTINED else ", and the request may be sent again"
            answered.message += f"; {tokens} tokens of the answer had come{again}"
        record = self.record
        record.error, record.error_type, record.exception = answered.message, answered.code, error
        return answered

    @property
    def _completion_tokens(self) -> int:
        return sum(stats.output_tokens or 0 for stats in self.answer.generation.stats.values())

    def finish(self, status: int) -> None:
        """Record how the answer ended: its status, tokens and latencies."""
        generation, cached, record = self.answer.generation, self.answer.cached, self.record
        choices, times = list(generation.stats.values()), list(generation.times.values())
        self._context.metrics.observe(generation, began=record.began, status=status)
        keys = [stats.cached.key for stats in choices if stats.cached is not None and stats.cached.key]
        if keys:
            hit = CacheHit(generation.model.name, keys)
            self._context.hits.remember(generation.tenant.name, record.id, hit)
        first_chunks = [choice.first_chunk for choice in times if choice.first_chunk is not None]
        waits = [choice.started - choice.requested for choice in times if choice.started is not None]
        gaps = [gap for stats in choices for gap in stats.itl_ms]
        tpots = [round(stats.tpot_ms, 2) for stats in choices if stats.tpot_ms is not None]
        record.outcome = status
        record.fields |= {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "ttft_ms": round((min(first_chunks) - record.began) * 1e3, 1) if first_chunks else None,
            "cached": cached.kind if cached else None,
            "stream": self.answer.streams,
            "queue_ms": round(max(waits) * 1e3, 1) if waits else None,
            "tpot_ms": max(tpots, default=None),
            "max_itl_ms": round(max(gaps), 1) if gaps else None,
            "retries": generation.retries,
            "finish_reasons": [choice.finish_reason for choice in times],
        }
        if record.span.recording:
            record.attributes = request_attributes(generation)
            end_spans(generation, record.span, record.error_type)
        if record.prompt_log is not None:
            prompts = [prompt.text(generation.model) for prompt in generation.inputs.prompts]
            texts = [text for _, text in sorted(generation.texts.items())]
            record.fields |= record.prompt_log.fields(prompts, texts)


async def json_response(request: Request, recorded: RecordedAnswer) -> Response:
    """Generate a whole answer; give up when the client leaves.

    Raises:
        ApiError: the request fails.
    """
    work = asyncio.ensure_future(recorded.answer.whole())
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    status = 499
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            # Nobody reads it.
            return Response(status_code=status)
        body, status = work.result(), 200
    except (ApiError, ClientError, ExceptionGroup) as error:
        answered = recorded.fail(error)
        status = answered.status
        raise answered from error
    except Exception:
        status = 500
        raise
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait([work, gone])
        recorded.finish(status)
    headers = {"x-cache": recorded.x_cache}
    if isinstance(body, bytes):
        return Response(body, headers=headers, media_type="application/json")
    return JSONResponse(body, headers=headers)


class EventStream(Response):
    """An answer as server-sent events.

    The status is sent with the first event, so that a request that fails before it gets the status of its error. After
    a sign of life, which is sent with 200, an error is an event.
    """

    def __init__(self, recorded: RecordedAnswer) -> None:
        self._recorded = recorded
        self._answered = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            await self._stream(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        recorded, status, refused = self._recorded, 499, None
        body = WriteCoalescer(
            send, scope.get("peer"), start=self._start, keep_alive=recorded.answer.keep_alive, keep_alive_s=KEEP_ALIVE_S
        )  # fmt: skip
        try:
            async with body, aclosing(recorded.answer.events()) as events:
                ended = 200
                recorded.answer.write_to(body)
                try:
                    async for event in events:
                        self._answered = True
                        await body.put(event)
                except (ApiError, ClientError, ExceptionGroup) as error:
                    answered = recorded.fail(error)
                    ended = answered.status
                    if body.begun:
                        await body.put(recorded.answer.error_events(answered, recorded.record.id))
                    else:
                        refused = answered
            status = ended
            if refused is not None:
                await error_response(scope, refused)(scope, receive, send)
        except ReaderTooSlow as error:
            if "peer" not in scope:
                raise
            recorded.record.error, recorded.record.error_type = str(error), "reader_too_slow"
            scope["peer"].abort()
        except Exception:
            status = 500
            raise
        finally:
            recorded.finish(status)

    def _start(self) -> Message:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        # Before the first event nobody knows where the answer comes from.
        if self._answered:
            headers.append((b"x-cache", self._recorded.x_cache.encode()))
        return {"type": "http.response.start", "status": 200, "headers": headers}


class GeneratingEndpoints(EndpointFamily):
    """Endpoints whose requests a model answers."""

    def too_long(self, error: PromptTooLong) -> ApiError:
        """Return the answer to a request whose prompt is too long, in the words of the API."""
        return from_client_error(error)

    async def generate(
        self,
        request: Request,
        kind: type[_Body],
        make: Callable[[_Body, AnswerContext], ModelAnswer],
        *,
        prompt_field: str,
        recall: Callable[[_Body, Tenant], Awaitable[int]] | None = None,
    ) -> Response:
        """Answer a request, whole or streamed; arguments and errors are those of `check`."""
        answer = await self.check(request, kind, make, prompt_field=prompt_field, recall=recall)
        recorded = RecordedAnswer(answer, self.context, request.scope["record"])
        return EventStream(recorded) if answer.streams else await json_response(request, recorded)

    async def check(
        self,
        request: Request,
        kind: type[_Body],
        make: Callable[[_Body, AnswerContext], _Answer],
        *,
        prompt_field: str,
        recall: Callable[[_Body, Tenant], Awaitable[int]] | None = None,
    ) -> _Answer:
        """Authenticate, parse and check a request, its prompt counted in tokens. Nothing is generated yet.

        Args:
            make: checks a body and makes the answer; in a thread, if that may take long.
            prompt_field: field of the body that holds the prompt.
            recall: reads what a body refers to, before `make` is called, and returns its bytes; None: bodies refer to
                nothing.

        Raises:
            ApiError: the request is refused.
        """
        context = self.context
        tenant = await context.authenticate(request)
        record: RequestRecord = request.scope["record"]
        body = await context.receive_body(request)

        def parse() -> _Body:
            parsed = parse_request(kind, body)
            model = context.find_model(parsed.model)
            record.fields |= {"model": model.name, "adapter": model.adapter_of(parsed.model)}
            return parsed

        def begin(parsed: _Body) -> _Answer:
            model = context.find_model(parsed.model)
            ignored = tolerate(parsed, model.template, strict=model.strict)
            answer = make(parsed, AnswerContext(model, tenant, record))
            fields = parsed.model_fields_set | getattr(parsed, "chat_fields", {}).keys()
            ignored += sorted(answer.generation.unread & fields)
            own_words = getattr(kind, "own_words", str)
            ignored += [
                own_words(f"tools.{index}.function.strict") for index in answer.generation.tools.unguided
            ]
            record.headers += ignored_headers(ignored)
            if (answer.generation.request.output_token_limit or 0) > model.max_output_tokens:
                record.headers.append((MAX_TOKENS.encode(), str(model.max_output_tokens).encode()))
            return answer

        try:
            size = len(body)
            if size <= SMALL_BODY_BYTES:
                parsed = parse()
            elif recall is None:
                return await context.parsers.run(lambda: begin(parse()), request, size, tenant)
            else:
                parsed = await context.parsers.run(parse, request, size, tenant)
            if recall is not None:
                size += await recall(parsed, tenant)
            if size > SMALL_BODY_BYTES or parsed.has_schemas:
                return await context.parsers.run(lambda: begin(parsed), request, size, tenant)
            return begin(parsed)
        except OverBudget as error:
            text = f"{prompt_field}: {error}"
            raise ApiError(400, text, param=prompt_field, code=OVER_BUDGET) from error
        except PromptTooLong as error:
            await tenant.charge_tokens(error.tokens)
            answered = self.too_long(error)
            answered.param = prompt_field
            raise answered from error
        except ClientError as error:
            raise from_client_error(error) from error

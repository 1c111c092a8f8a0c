"""Requests between Triton and the engine: takes them in, answers, and ends them early.

The engine's thread only puts what a step has made into the outbox, all of it at once; another thread sends it. So the
next step runs while the tokens of the last one are on their way, and the two threads seldom wait for the interpreter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import engine
import triton_python_backend_utils as pb_utils
from request_parser import RequestLimits, read_output_options, read_requests
from responder import Responder
from shared.cancellation import CancellationWatch, WatchedSender
from shared.refusal import NOT_DECOUPLED, RequestRefused
from shared.tensors import FINAL, failure, read, read_flag, response
from shared.token_socket import PARAMETER, TokenSender, TokenTarget

# Responses a second that all streams share: beyond it, tokens of several steps go out together. Each costs about half
# a millisecond of a core on its way through Triton, the text model and gRPC. A single stream gets every token at once.
_MAX_RESPONSES_PER_S = 1200
_IDLE_S = 0.01  # after this long without news from the engine, nothing waits any longer
# Periods after which a request of the text model is asked about. That model watches its client, and stops the request.
_TEXT_MODEL_PERIODS = 3

_Made = tuple[Responder, int, engine.RequestOutput]  # output of a row


class RequestManager:
    """All open requests of one engine."""

    def __init__(
        self,
        runner: engine.Engine,
        limits: RequestLimits,
        *,
        exclude_input_in_output: bool,
        decoupled: bool,
        max_open: int | None,
        cancellation_period_s: float,
        on_finish: Callable[[engine.RequestMetrics], None],
    ) -> None:
        """`decoupled`: several responses to a request; else one. `max_open`: requests that may run and wait; None is no
        limit. `on_finish` is called with what each request cost, if it has tokens.
        """
        self._engine = runner
        self._limits = limits
        self._exclude_input_in_output = exclude_input_in_output
        self._decoupled = decoupled
        self._max_open = max_open
        self._on_finish = on_finish
        self._numbers = count(1)
        self._open: dict[str, list[Responder]] = defaultdict(list)  # by Triton's request id, which may repeat
        self._lock = Lock()  # guards _open
        self._watch = CancellationWatch(cancellation_period_s)
        self._text_model_watch = CancellationWatch(_TEXT_MODEL_PERIODS * cancellation_period_s)
        self._made: list[_Made] = []  # of the step under way; for the engine's thread
        self._outbox: SimpleQueue[list[_Made] | None] = SimpleQueue()
        self._tokens = TokenSender()  # for the thread of the outbox
        self._thread = Thread(target=self._send_all, name="responses", daemon=True)
        self._thread.start()
        runner.after_round = self._hand_on

    def take(self, request: Any) -> None:
        """Answer a request of Triton, now or later."""
        sender = WatchedSender(request.get_response_sender())
        try:
            if read_flag(request, "stop"):
                self._stop(request.request_id())
                sender.send(response(), flags=FINAL)  # empty, as upstream's
            else:
                self._start(self._enter(request, sender))
        except Exception as error:
            sender.send(failure(error), flags=FINAL)

    def close(self) -> None:
        """Send what the engine still says; the engine must be closed."""
        self._outbox.put(None)
        self._thread.join()
        self._tokens.close()
        self._watch.close()
        self._text_model_watch.close()

    def _enter(self, request: Any, sender: WatchedSender) -> Responder:
        tensor = partial(read, request)
        options = read_output_options(tensor, exclude_input_in_output=self._exclude_input_in_output)
        requests = read_requests(tensor, self._limits, new_id=lambda: str(next(self._numbers)))
        if not self._decoupled and options.streaming:
            raise RequestRefused(f"streaming = true: {NOT_DECOUPLED}")
        if not self._decoupled and len(requests) != 1:
            raise RequestRefused(f"input_ids: has {len(requests)} prompts, must be one: {NOT_DECOUPLED}")
        target = json.loads(request.parameters() or "{}").get(PARAMETER)
        way = None if target is None else (self._tokens, TokenTarget.read(str(target)))
        responder = Responder(request.request_id(), sender, requests, options, way)
        with self._lock:
            waiting = sum(len(responders) for responders in self._open.values())
            if self._max_open is not None and waiting >= self._max_open:
                raise RequestRefused(
                    f"Exceeds maximum queue size: {waiting} requests run or wait"
                )  # Triton's own words
            self._open[responder.id].append(responder)
        return responder

    def _start(self, responder: Responder) -> None:
        watch = self._watch if responder.socket is None else self._text_model_watch
        watch.watch(responder.sender, on_cancel=partial(self._cancel, responder))
        try:
            for row, request in enumerate(responder.requests):
                self._engine.submit(request, partial(self._put, responder, row))
        except Exception as error:
            responder.fail(RequestRefused(str(error)) if isinstance(error, engine.InvalidRequest) else error)
            self._cancel(responder)
            self._leave(responder)

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestRefused("stop: the request id says what is to be stopped, and this request has none")
        with self._lock:
            responders = list(self._open.get(request_id, ()))
        for responder in responders:
            self._cancel(responder)

    def _cancel(self, responder: Responder) -> None:
        for request in responder.requests:
            self._engine.cancel(request.id)

    def _leave(self, responder: Responder) -> None:
        with self._lock:
            others = [other for other in self._open.pop(responder.id, ()) if other is not responder]
            if others:
                self._open[responder.id] = others

    def _put(self, responder: Responder, row: int, output: engine.RequestOutput) -> None:
        """Called by the engine's thread."""
        if output.context_logits is not None:
            responder.read_context_logits(row, output.context_logits)
            return
        if responder.requests[row].draft_tokens is not None and output.tokens and not output.finish:
            self._engine.cancel(output.request_id)  # verified: what was accepted, and one token more
        if output.metrics is not None and output.metrics.num_output_tokens:
            self._on_finish(output.metrics)
        self._made.append((responder, row, output))

    def _hand_on(self) -> None:
        """Called by the engine's thread after each step."""
        if self._made:
            self._outbox.put(self._made)
            self._made = []

    def _pass_on(self, responder: Responder, row: int, output: engine.RequestOutput, pause_s: float) -> None:
        if responder.is_done():
            return
        try:
            responder.take(row, output, pause_s)
        except Exception as error:
            self._cancel(responder)
            self._break_off(responder, error)
        if responder.is_done():
            self._leave(responder)

    def _break_off(self, responder: Responder, error: Exception) -> None:
        try:
            responder.break_off(error)
        except Exception as second:  # Triton takes no more for this request
            pb_utils.Logger.log_error(f"request {responder.id!r}: {error}; then: {second}")

    def _streams(self) -> int:
        with self._lock:
            return max(1, sum(len(responders) for responders in self._open.values()))

    def _send_all(self) -> None:
        while True:
            if self._outbox.empty():
                self._send_tokens()
            try:
                made = self._outbox.get(timeout=_IDLE_S if self._has_waiting() else None)
            except Empty:
                self._flush()
                continue
            if made is None:
                return
            pause_s = (self._streams() - 1) / _MAX_RESPONSES_PER_S
            for responder, row, output in made:
                self._pass_on(responder, row, output, pause_s)

    def _has_waiting(self) -> bool:
        """Whether tokens wait for a later response, or for room in a socket.

        Without any, looking after them would only take the processor from the engine.
        """
        return self._tokens.waits or any(responder.waits for responder in self._responders())

    def _flush(self) -> None:
        for responder in self._responders():
            try:
                responder.flush()
            except Exception as error:
                self._end(responder, error)

    def _send_tokens(self) -> None:
        gone = self._tokens.flush()
        for responder in self._responders() if gone else ():
            if responder.socket in gone:
                self._end(responder, ConnectionError("the text model that asked is gone"))

    def _responders(self) -> list[Responder]:
        with self._lock:
            return [responder for responders in self._open.values() for responder in responders]

    def _end(self, responder: Responder, error: Exception) -> None:
        self._cancel(responder)
        self._break_off(responder, error)
        self._leave(responder)

"""Triton model `tensorrt_llm_bls`: text to text in one model, the entry point of a deployment.

It holds the state of each request (tokens so far, text not certain yet, stop words across pieces), so that joined
pieces are exactly the text of all tokens, and a client that leaves frees the engine. Tensors are those of
TensorRT-LLM's model of the same name (versions 1.0 to 1.2); it runs in front of the C++ backend and of the cpu
engine alike. It tokenizes by itself, which saves a call of `preprocessing`.

Each request has a thread of its own, because reading the engine's responses and sending our own both block. Where the
model is not decoupled, these threads send its one response, too: `execute` has returned long before, so that requests
run side by side (Triton 24.10; upstream's `llmapi` model does the same).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton_python_backend_utils as pb_utils
from engine_call import UNIQUE_ID, logits_type
from engine_client import EngineClient, follow_trace
from serving import ServingContext, TextRequest
from shared.cancellation import CancellationWatch, WatchedSender
from shared.parameters import Parameters
from shared.prompts import PromptEncoder
from shared.refusal import RequestRefused
from shared.tensors import FINAL, failure, read_flag, response, texts
from shared.tokenizer import TextDecoder, TextTokenizer
from speculation import DraftHealth, DraftSettings

_MAX_OPEN_REQUESTS = 1024  # more wait here; threads are made as they are needed


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = Parameters(args)
        tokenizer = TextTokenizer(
            parameters.path("tokenizer_dir"), add_special_tokens=parameters.flag("add_special_tokens", True)
        )
        self._setup = ServingContext(
            encoder=PromptEncoder(
                tokenizer,
                end_id=parameters.number("end_id"),
                pad_id=parameters.number("pad_id"),
                stop_token_ids=parameters.numbers("stop_token_ids"),
                vocab_size=parameters.number("vocab_size"),
            ),
            decoders={
                skip: TextDecoder(tokenizer.tokenizer, skip_special_tokens=skip) for skip in (True, False)
            },
            skip_special_tokens=parameters.flag("skip_special_tokens", True),
            engine=EngineClient(
                parameters.text("tensorrt_llm_model_name", "tensorrt_llm"),
                own=parameters.flag("engine_takes_prior_output", False),
            ),
            speculation=_speculation(parameters, json.loads(args["model_config"])),
            accumulate_tokens=parameters.flag("accumulate_tokens", False),
            exclude_input_in_output=parameters.flag("exclude_input_in_output", False),
            decoupled=parameters.decoupled,
            context_logits=parameters.flag("gather_context_logits", False),
            engine_takes_prior_output=parameters.flag("engine_takes_prior_output", False),
        )
        self._watch = CancellationWatch(parameters.number("cancellation_check_period_ms", 100) / 1000)
        most = parameters.number("max_open_requests") if parameters.has("max_open_requests") else None
        self._admission = OpenRequestLimit(most)
        self._open: dict[str, TextRequest] = {}  # by their ids
        self._threads = ThreadPoolExecutor(_MAX_OPEN_REQUESTS, thread_name_prefix="request")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._threads.submit(self._serve, request, WatchedSender(request.get_response_sender()))

    def finalize(self) -> None:
        self._threads.shutdown()
        self._watch.close()
        self._setup.engine.close()
        if self._setup.speculation is not None:
            self._setup.speculation.draft.close()

    def _serve(self, request: Any, sender: WatchedSender) -> None:
        last = None
        try:
            follow_trace(request)
            stop = read_flag(request, "stop")
            last = self._stop(request.request_id()) if stop else self._answer(request, sender)
        except Exception as error:
            last = failure(error)
        sender.send(last, flags=FINAL)

    def _stop(self, request_id: str) -> Any:
        """End the request of that id, if it is under way. Returns the last response of the one that asks for it."""
        if len(request_id) < UNIQUE_ID:
            raise RequestRefused(
                f"stop = true: give the id of the request that is to end, of {UNIQUE_ID} characters or more"
            )
        if serving := self._open.get(request_id):
            serving.stop()
        return None if self._setup.decoupled else response(text_output=texts([""]))

    def _answer(self, request: Any, sender: WatchedSender) -> Any:
        """Send the responses of an answer but the last, and return that, if it is not empty."""
        kept: list[Any] = []
        request_id = request.request_id()
        with self._admission.place():
            serving = TextRequest(request, self._setup)
            if len(request_id) >= UNIQUE_ID:
                self._open[request_id] = serving
            self._watch.watch(sender, on_cancel=serving.stop)
            try:
                # Where it may be one response only, that goes out with the final flag.
                serving.run(sender.send if self._setup.decoupled else kept.append)
                for one in serving.rests():
                    if kept:
                        sender.send(kept.pop())
                    kept.append(one)
            finally:
                if self._open.get(request_id) is serving:
                    del self._open[request_id]
                serving.stop()  # does nothing unless something went wrong
        if not kept and not self._setup.decoupled:
            raise RuntimeError("the engine ended the answer without a response")
        return kept[-1] if kept else None


def _speculation(parameters: Parameters, config: Mapping[str, Any]) -> DraftSettings | None:
    name = parameters.text("tensorrt_llm_draft_model_name", "")
    if not name:
        return None

    def optional(name: str) -> int | None:
        return parameters.number(name) if parameters.has(name) else None

    threshold = parameters.text("draft_acceptance_threshold", "")
    return DraftSettings(
        draft=EngineClient(name),
        health=DraftHealth(pb_utils.Logger.log_warn),
        logits=logits_type(config),
        max_draft_tokens=optional("max_draft_tokens"),
        max_input_tokens=optional("max_input_tokens"),
        max_output_tokens=optional("max_output_tokens"),
        acceptance_threshold=float(threshold) if threshold else None,
        timeout_s=parameters.number("draft_timeout_ms", 10_000) / 1000,
    )


class OpenRequestLimit:
    """Limit of answers at the same time, where each is many calls of the engines. Thread-safe.

    An engine that takes so many requests and refuses the next would refuse a round in the middle of an answer. As an
    answer has one call of an engine under way at a time, as many answers as the engine takes requests are never refused
    there; the answer after them is, before it begins.
    """

    def __init__(self, most: int | None) -> None:
        """`most`: answers that may run and wait; None is no limit."""
        self._most = most
        self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold the place of one answer.

        Raises:
            RequestRefused: All are taken; in Triton's own words for a full queue.
        """
        with self._lock:
            if self._most is not None and self._open >= self._most:
                raise RequestRefused(f"Exceeds maximum queue size: {self._open} requests run or wait")
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

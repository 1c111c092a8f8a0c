"""Requests between Triton and the LLM: takes them in, answers, and ends them early.

Everything about open requests happens on one event loop, because the LLM's answers come on the loop that asked for
them. Responses are sent by a thread of its own, so that the loop does not wait for Triton.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from continuation import Continuation
from llm_request import LlmRequest, read_request
from llm_response import LlmResponses
from llm_settings import LlmSettings
from shared.cancellation import CancellationWatch, WatchedSender
from shared.refusal import NOT_DECOUPLED, RequestRefused
from shared.tensors import FINAL, failure, read_flag
from shared.tokenizer import TextDecoder, load_tokenizer
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import GuidedDecodingParams, LoRARequest, RequestError
from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict

_PUBLISH_S = 0.5


class LlmRequestManager:
    """All open requests of one LLM."""

    def __init__(
        self,
        model: str,
        arguments: dict[str, Any],
        settings: LlmSettings,
        types: Mapping[str, Any],
        *,
        decoupled: bool,
    ) -> None:
        """Start the LLM, which takes minutes.

        Args:
            model: Name of this model of Triton's.
            types: Numpy type of each output of the model.
            decoupled: Several responses to a request; else one.
        """
        self._llm = LLM(**update_llm_args_with_extra_dict({}, arguments))
        self._max_open = settings.max_open_requests
        self._settings = settings
        self._types = types
        self._decoupled = decoupled
        self._open: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by Triton's request id
        self._loop = asyncio.new_event_loop()
        self._responses = ResponseSender(ProgressCounter(model))
        self._watch = CancellationWatch(settings.cancellation_check_period_s)
        self._thread = Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def take(self, request: Any) -> None:
        """Answer a request of Triton, now or later."""
        stream = ResponseStream(self._responses, WatchedSender(request.get_response_sender()))
        id = request.request_id()
        try:
            step = (
                partial(self._stop, id, stream)
                if read_flag(request, "stop")
                else partial(self._begin, id, self._read(request), stream)
            )
        except Exception as error:
            stream.finish(failure(error))
        else:
            self._loop.call_soon_threadsafe(step)  # in order, so that a stop finds what came before it

    def close(self) -> None:
        """Wait for what is running, then end the LLM."""
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._watch.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._responses.close()
        self._llm.shutdown()
        del self._llm
        gc.collect()  # what is left of the LLM would keep this process alive

    def _read(self, request: Any) -> LlmRequest:
        wanted = read_request(request, self._settings)
        if wanted.streaming and not self._decoupled:
            raise RequestRefused(f"streaming = true: {NOT_DECOUPLED}")
        return wanted

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt, as the LLM makes them itself."""
        return list(self._llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt

    @cached_property
    def _decoders(self) -> Mapping[bool, TextDecoder]:
        """By whether special tokens are left out. Answers that begin here are decoded by the LLM."""
        arguments = self._settings.arguments
        tokenizer = load_tokenizer(Path(arguments.get("tokenizer") or arguments["model"]))
        return {skip: TextDecoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)}

    def _begin(self, id: str, wanted: LlmRequest, stream: ResponseStream) -> None:
        running = sum(map(len, self._open.values()))
        if self._max_open is not None and running >= self._max_open:
            refused = RequestRefused(
                f"Exceeds maximum queue size: {running} requests run or wait"
            )  # Triton's words
            stream.finish(failure(refused))
            return
        task = self._loop.create_task(self._serve(wanted, stream))
        self._open[id].add(task)
        task.add_done_callback(partial(self._end, id, stream))
        self._watch.watch(stream.sender, on_cancel=partial(self._loop.call_soon_threadsafe, task.cancel))

    def _stop(self, id: str, stream: ResponseStream) -> None:
        if not id:
            refused = RequestRefused("A request id must be provided for request cancellation")
            stream.finish(failure(refused))
            return
        for task in self._open.get(id, ()):
            task.cancel()
        stream.finish(_cancelled())

    async def _serve(self, wanted: LlmRequest, stream: ResponseStream) -> Any:
        """Send all responses but the last, which is returned."""
        responses = LlmResponses(wanted, self._types, partial(self._decode, wanted.sampling))
        continued = Continuation(wanted, self._decoders) if wanted.prior else None
        if continued is not None:
            if (ended := continued.ended) is not None:
                return responses.make(ended)
            wanted = continued.rest(await asyncio.to_thread(self._prompt_ids, wanted.prompt))
        try:
            result = self._ask(wanted)
        except (ValueError, RequestError) as error:  # a prompt that is too long, a parameter out of bounds
            raise RequestRefused(str(error)) from error
        try:
            async for output in result:
                if output.finished and wanted.alternatives is not None:
                    # Takes about a millisecond a token of the prompt, in which others must not wait.
                    return await asyncio.to_thread(responses.make, output)
                answer = output if continued is None else continued.take(output)
                made = responses.make(answer)
                if answer.finished:
                    if not output.finished or (responses.stopped_in_text and not result.aborted()):
                        result.abort()
                    return made
                if wanted.streaming:
                    stream.offer(made)
        except asyncio.CancelledError:
            result.abort()
            raise
        raise RuntimeError("the LLM ended an answer without saying that it was its end")

    def _ask(self, wanted: LlmRequest) -> Any:
        """Begin to generate; the LLM's `RequestOutput`."""
        arguments, call = dict(wanted.sampling), dict(wanted.call)
        if "embedding_bias" in arguments:
            arguments["embedding_bias"] = torch.from_numpy(arguments["embedding_bias"])
        if wanted.guide is not None:
            arguments["guided_decoding"] = GuidedDecodingParams(**wanted.guide)
        if wanted.lora is not None:
            call["lora_request"] = LoRARequest(**wanted.lora)
        sampling = SamplingParams(**arguments)
        return self._llm.generate_async(wanted.prompt, sampling, streaming=wanted.streaming, **call)

    def _decode(self, sampling: Mapping[str, Any], tokens: Sequence[int]) -> str:
        """The text of an answer's tokens, as the LLM makes it where it does not stream."""
        skip = bool(sampling.get("skip_special_tokens", True))
        text: str = self._llm.tokenizer.decode(list(tokens), skip_special_tokens=skip)
        return text

    def _end(self, id: str, stream: ResponseStream, task: asyncio.Task[Any]) -> None:
        self._open[id].discard(task)
        if not self._open[id]:
            del self._open[id]
        if task.cancelled():
            last = _cancelled()
        else:
            error = task.exception()
            last = failure(error) if isinstance(error, Exception) else task.result()
        stream.finish(last)

    async def _settle(self) -> None:
        while self._open:
            await asyncio.wait([task for tasks in self._open.values() for task in tasks])


def _cancelled() -> Any:
    error = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
    return pb_utils.InferenceResponse(error=error)


class ProgressCounter:
    """Responses that were sent, on Triton's page of metrics, so that a model that is busy is told from one that hangs.

        pipeline_responses_total{model="tensorrt_llm",version="1"} 1024

    The LLM API tells nothing of its steps there. For one thread.
    """

    def __init__(self, model: str) -> None:
        # Triton wants the family to outlive its metric.
        self._family = pb_utils.MetricFamily(
            name="pipeline_responses_total", description="Responses sent", kind=pb_utils.MetricFamily.COUNTER
        )
        self._metric = self._family.Metric(labels={"model": model, "version": "1"})
        self._unpublished, self._published_at = 0, 0.0

    def count(self) -> None:
        """Count one. It is published twice a second at most: that is a trip to the server process."""
        self._unpublished += 1
        now = time.monotonic()
        if now - self._published_at >= _PUBLISH_S:
            self._metric.increment(self._unpublished)
            self._unpublished, self._published_at = 0, now


class ResponseSender:
    """A thread that sends responses in order. Safe to use from several threads."""

    def __init__(self, progress: ProgressCounter) -> None:
        self._progress = progress
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def post(self, send: Callable[[], None]) -> None:
        """Call `send` when its turn comes."""
        self._work.put(send)

    def close(self) -> None:
        """Send what waits, then end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (send := self._work.get()) is not None:
            try:
                send()
            except Exception as error:  # Triton takes no more for this request; the others go on
                pb_utils.Logger.log_error(f"[trtllm] a response could not be sent: {error}")
            self._progress.count()


class ResponseStream:
    """The responses of one request.

    Each response repeats the text so far. Where Triton takes them more slowly than the LLM makes them, only the newest
    is sent, and nothing piles up.
    """

    def __init__(self, responses: ResponseSender, sender: WatchedSender) -> None:
        self.sender = sender
        self._responses = responses
        self._newest: Any = None  # that has not been sent
        self._lock = Lock()

    def offer(self, response: Any) -> None:
        """Send a response, unless the next one comes before its turn."""
        with self._lock:
            waits, self._newest = self._newest is not None, response
        if not waits:
            self._responses.post(self._send)

    def finish(self, last: Any) -> None:
        """Send the last response."""
        self._responses.post(partial(self.sender.send, last, flags=FINAL))

    def _send(self) -> None:
        with self._lock:
            response, self._newest = self._newest, None
        self.sender.send(response)

"""Where requests of Triton and the LLM meet: takes requests in, answers, and ends them early.

Everything about open requests happens on one event loop, because the LLM's answers come on the loop that asked for
them; another thread sends (`llm_outbox`).
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from threading import Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from llm_answer import answer
from llm_request import Asked, read_request
from llm_response_sender import Outbox, Stream
from llm_settings import LlmSettings
from shared.cancellation import CancellationWatch, WatchedSender
from shared.refusal import NOT_DECOUPLED, Refused
from shared.tensors import failure, read_flag
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import GuidedDecodingParams
from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict


class RequestManager:
    """All open requests of one LLM."""

    def __init__(
        self, arguments: dict[str, Any], settings: LlmSettings, types: Mapping[str, Any], *, decoupled: bool
    ) -> None:
        """Start the LLM, which takes minutes.

        Args:
            types: numpy type of each output of the model.
            decoupled: several responses to a request; else one.
        """
        self._llm = LLM(**update_llm_args_with_extra_dict({}, arguments))
        self._max_open = settings.max_open_requests
        self._types = types
        self._decoupled = decoupled
        self._open: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by Triton's request id
        self._loop = asyncio.new_event_loop()
        self._outbox = Outbox()
        self._watch = CancellationWatch(settings.cancellation_check_period_s)
        self._thread = Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def take(self, request: Any) -> None:
        """Answer a request of Triton, now or later."""
        stream = Stream(self._outbox, WatchedSender(request.get_response_sender()))
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
        self._outbox.close()
        self._llm.shutdown()
        del self._llm
        gc.collect()  # what is left of the LLM would keep this process alive

    def _read(self, request: Any) -> Asked:
        asked = read_request(request)
        if asked.streaming and not self._decoupled:
            raise Refused(f"streaming = true: {NOT_DECOUPLED}")
        return asked

    def _begin(self, id: str, asked: Asked, stream: Stream) -> None:
        running = sum(map(len, self._open.values()))
        if self._max_open is not None and running >= self._max_open:
            refused = Refused(f"Exceeds maximum queue size: {running} requests run or wait")  # Triton's words
            stream.finish(failure(refused))
            return
        task = self._loop.create_task(self._serve(asked, stream))
        self._open[id].add(task)
        task.add_done_callback(partial(self._end, id, stream))
        self._watch.watch(stream.sender, on_cancel=partial(self._loop.call_soon_threadsafe, task.cancel))

    def _stop(self, id: str, stream: Stream) -> None:
        if not id:
            refused = Refused("A request id must be provided for request cancellation")
            stream.finish(failure(refused))
            return
        for task in self._open.get(id, ()):
            task.cancel()
        stream.finish(_cancelled())

    async def _serve(self, asked: Asked, stream: Stream) -> Any:
        """Send all responses but the last, which is returned."""
        try:
            guide = None if asked.guide is None else GuidedDecodingParams(**asked.guide)
            sampling = SamplingParams(**asked.sampling, guided_decoding=guide)
            result = self._llm.generate_async(asked.prompt, sampling, streaming=asked.streaming)
        except ValueError as error:  # a prompt that is too long, a parameter out of bounds
            raise Refused(str(error)) from error
        try:
            async for output in result:
                made = answer(output, asked, self._types)
                if output.finished:
                    return made
                if asked.streaming:
                    stream.offer(made)
        except asyncio.CancelledError:
            result.abort()
            raise
        raise RuntimeError("the LLM ended an answer without saying that it was its end")

    def _end(self, id: str, stream: Stream, task: asyncio.Task[Any]) -> None:
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

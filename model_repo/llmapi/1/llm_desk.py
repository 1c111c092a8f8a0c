"""Where requests of Triton and the LLM meet: takes requests in, answers, and ends them early.

Everything about open requests happens on one event loop, because the LLM's answers come on the loop that asked for
them. Another thread sends, so that the loop does not wait for Triton.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from llm_answer import answer
from llm_request import Asked, read_request
from llm_settings import LlmSettings
from shared.cancellation import CancellationWatch, WatchedSender
from shared.refusal import Refused
from shared.tensors import FINAL, failure, read_flag
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict


class Desk:
    """All open requests of one LLM."""

    def __init__(self, arguments: dict[str, Any], settings: LlmSettings, types: Mapping[str, Any]) -> None:
        """Start the LLM, which takes minutes. `types`: numpy type of each output of the model."""
        self._llm = LLM(**update_llm_args_with_extra_dict({}, arguments))
        self._max_open = settings.max_open_requests
        self._types = types
        self._open: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by Triton's request id
        self._loop = asyncio.new_event_loop()
        self._outbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._watch = CancellationWatch(settings.cancellation_check_period_s)
        self._threads = [
            Thread(target=self._loop.run_forever, name="llm", daemon=True),
            Thread(target=self._send_all, name="responses", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self, request: Any) -> None:
        """Answer a request of Triton, now or later."""
        sender = WatchedSender(request.get_response_sender())
        id = request.request_id()
        try:
            step = (
                partial(self._stop, id, sender)
                if read_flag(request, "stop")
                else partial(self._begin, id, read_request(request), sender)
            )
        except Exception as error:
            self._finish(sender, failure(error))
        else:
            self._loop.call_soon_threadsafe(step)  # in order, so that a stop finds what came before it

    def close(self) -> None:
        """Wait for what is running, then end the LLM."""
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._watch.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        self._loop.close()
        self._llm.shutdown()
        del self._llm
        gc.collect()  # what is left of the LLM would keep this process alive

    def _begin(self, id: str, asked: Asked, sender: WatchedSender) -> None:
        running = sum(map(len, self._open.values()))
        if self._max_open is not None and running >= self._max_open:
            refused = Refused(f"Exceeds maximum queue size: {running} requests run or wait")  # Triton's words
            self._finish(sender, failure(refused))
            return
        task = self._loop.create_task(self._serve(asked, sender))
        self._open[id].add(task)
        task.add_done_callback(partial(self._end, id, sender))
        self._watch.watch(sender, on_cancel=partial(self._loop.call_soon_threadsafe, task.cancel))

    def _stop(self, id: str, sender: WatchedSender) -> None:
        if not id:
            refused = Refused("A request id must be provided for request cancellation")
            self._finish(sender, failure(refused))
            return
        for task in self._open.get(id, ()):
            task.cancel()
        self._finish(sender, _cancelled())

    async def _serve(self, asked: Asked, sender: WatchedSender) -> Any:
        """Send all responses but the last, which is returned."""
        try:
            result = self._llm.generate_async(
                asked.prompt, SamplingParams(**asked.sampling), streaming=asked.streaming
            )
        except ValueError as error:  # a prompt that is too long, a parameter out of bounds
            raise Refused(str(error)) from error
        try:
            async for output in result:
                made = answer(output, asked, self._types)
                if output.finished:
                    return made
                if asked.streaming:
                    self._outbox.put(partial(sender.send, made))
        except asyncio.CancelledError:
            result.abort()
            raise
        raise RuntimeError("the LLM ended an answer without saying that it was its end")

    def _end(self, id: str, sender: WatchedSender, task: asyncio.Task[Any]) -> None:
        self._open[id].discard(task)
        if not self._open[id]:
            del self._open[id]
        if task.cancelled():
            last = _cancelled()
        else:
            error = task.exception()
            last = failure(error) if isinstance(error, Exception) else task.result()
        self._finish(sender, last)

    def _finish(self, sender: WatchedSender, last: Any) -> None:
        self._outbox.put(partial(sender.send, last, flags=FINAL))

    async def _settle(self) -> None:
        while self._open:
            await asyncio.wait([task for tasks in self._open.values() for task in tasks])

    def _send_all(self) -> None:
        while (send := self._outbox.get()) is not None:
            try:
                send()
            except Exception as error:  # Triton takes no more for this request; the others go on
                pb_utils.Logger.log_error(f"[trtllm] a response could not be sent: {error}")


def _cancelled() -> Any:
    error = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
    return pb_utils.InferenceResponse(error=error)

"""Sends responses from a thread of its own, so that the LLM's event loop does not wait for Triton.

Each response of a stream repeats the text so far. Where Triton takes them more slowly than the LLM makes them, only the
newest of a request goes out, and nothing piles up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from shared.cancellation import WatchedSender
from shared.tensors import FINAL


class Outbox:
    """The thread, and what it has to do. Safe to use from several threads."""

    def __init__(self) -> None:
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


class Stream:
    """The responses of one request, oldest first, less those that a newer one makes superfluous."""

    def __init__(self, outbox: Outbox, sender: WatchedSender) -> None:
        self.sender = sender
        self._outbox = outbox
        self._newest: Any = None  # that has not been sent
        self._lock = Lock()

    def offer(self, response: Any) -> None:
        """Send a response, unless the next one comes before its turn."""
        with self._lock:
            waits, self._newest = self._newest is not None, response
        if not waits:
            self._outbox.post(self._send)

    def finish(self, last: Any) -> None:
        """Send the last response."""
        self._outbox.post(partial(self.sender.send, last, flags=FINAL))

    def _send(self) -> None:
        with self._lock:
            response, self._newest = self._newest, None
        self.sender.send(response)

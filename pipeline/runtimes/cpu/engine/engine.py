"""`Engine`: one thread that runs `EngineCore`, and an inbox that any thread may write to.

Requests join while others run: the inbox is read between steps. Sinks are called on the engine's thread; they must be
quick, and may call `submit` and `cancel`. If the thread dies, every request in flight gets an error, and later ones
are refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from .core import EngineCore
from .grammars import Grammars, Vocabulary
from .paged_model import PagedModel
from .request import EngineRequest, EngineStopped, FinishReason, InvalidRequest, RequestOutput
from .settings import EngineSettings
from .stats import EngineStats

_log = logging.getLogger(__name__)


class Engine:
    """A model behind a thread of its own, which any thread may send requests to.

    >>> engine = Engine(Path("target"), None, EngineSettings())           # doctest: +SKIP
    >>> engine.submit(EngineRequest("1", (1, 2, 3), 8, end_id=2), sink=print)   # doctest: +SKIP
    """

    def __init__(
        self, target: Path, draft: Path | None, settings: EngineSettings, vocabulary: Vocabulary | None = None
    ) -> None:
        """Load the models and start the thread.

        Args:
            target: Folder with openvino_model.xml, openvino_model.bin and engine.json.
            draft: The same of a draft model; None for no speculation.
            settings: Sizes of the engine.
            vocabulary: Tokenizer for guided decoding; None refuses requests with a guide.
        """
        model = PagedModel(target, settings)
        grammars = Grammars(vocabulary, model.vocab_size) if vocabulary else None
        self._core = EngineCore(model, PagedModel(draft, settings) if draft else None, settings, grammars)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._in_flight: set[str] = set()
        self._stopped: str | None = None  # why no more requests are taken
        self._thread = threading.Thread(target=self._run, name="cpu-engine", daemon=True)
        self._thread.start()

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._core.max_sequence_tokens

    @property
    def stopped(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""
        return self._stopped

    def submit(self, request: EngineRequest, sink: Callable[[RequestOutput], None]) -> None:
        """Take a request.

        Args:
            request: What to generate.
            sink: Called on the engine's thread with each output; the last one has `finish`.

        Raises:
            InvalidRequest: The request could never run.
            EngineStopped: The engine is closed, or its thread died.
        """
        self._core.check(request)

        def forward(output: RequestOutput) -> None:
            if output.finish:
                with self._lock:
                    self._in_flight.discard(request.id)
            sink(output)

        with self._lock:
            if self._stopped:
                raise EngineStopped(self._stopped)
            if request.id in self._in_flight:
                raise InvalidRequest(f"a request with id {request.id!r} is in flight")
            self._in_flight.add(request.id)
            self._inbox.put(lambda: self._core.add(request, forward))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; its last output says CANCELLED. Unknown ids are ignored.

        Args:
            request_id: `id` of a request that was submitted.
        """
        self._inbox.put(lambda: self._core.cancel(request_id))

    def stats(self) -> EngineStats:
        """A snapshot of what the engine has done and holds."""
        return self._core.stats()

    def close(self) -> None:
        """Cancel everything in flight and end the thread, after the step that is under way."""
        self._stop("the engine is closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = self._stopped or reason
            self._inbox.put(_nothing)  # wakes the thread

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._read_inbox(wait=self._core.idle)
                if not self._stopped and not self._core.idle:
                    self._core.step()
        except BaseException as error:
            _log.critical("the engine thread died", exc_info=True)
            self._stop(f"the engine died: {type(error).__name__}: {error}")
            self._end_all(FinishReason.ERROR)
        else:
            self._end_all(FinishReason.CANCELLED)

    def _read_inbox(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _end_all(self, finish: FinishReason) -> None:
        """Drain the inbox, then finish all requests; later submissions are ignored."""
        self._read_inbox(wait=False)
        self._core.end_all(finish, self._stopped or "")


def _nothing() -> None:
    pass

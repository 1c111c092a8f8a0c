"""`Engine`: one thread that runs `EngineCore`, and an inbox that any thread may write to.

Requests join while others run: the inbox is read between steps. The form of an answer is compiled before, in other
threads and processes (`grammars`). Sinks are called on the engine's thread; they must be quick, and may call `submit`
and `cancel`. If the thread dies, every request in flight gets an error, and later ones are refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from .core import EngineCore
from .grammars import Grammars, Vocabulary
from .matcher import Matcher
from .paged_model import PagedModel
from .request import EngineRequest, EngineStopped, FinishReason, InvalidRequest, RequestOutput
from .sequence import Sink
from .settings import EngineSettings
from .stats import EngineStats

_log = logging.getLogger(__name__)


class Engine:
    """An engine that runs in its own thread; any thread may submit requests.

    >>> engine = Engine(Path("target"), None, EngineSettings())           # doctest: +SKIP
    >>> engine.submit(EngineRequest("1", (1, 2, 3), 8, end_id=2), sink=print)   # doctest: +SKIP

    Attributes:
        after_round: Called on the engine's thread after the sinks of a step, or of what ended without one, so that what
            they got can be handed on at once. To be set before the first request.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        settings: EngineSettings,
        vocabulary: Vocabulary | None = None,
        adapters: Path | None = None,
    ) -> None:
        """Load the models and start the thread.

        Args:
            target: Folder with openvino_model.xml, openvino_model.bin and engine.json.
            draft: The same of a draft model; None for no speculation.
            settings: Sizes of the engine.
            vocabulary: Tokenizer for guided decoding; None refuses requests with a guide.
            adapters: File of LoRA adapters of the target.
        """
        model = PagedModel(target, settings, adapters)
        self._grammars = Grammars(vocabulary, model.vocab_size) if vocabulary else None
        if self._grammars:
            self._grammars.start()
        self._core = EngineCore(
            model, PagedModel(draft, settings) if draft else None, settings, self._grammars
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Requests whose guide is being compiled. For the engine's thread.
        self._guided: dict[str, Sink] = {}
        self.after_round: Callable[[], None] = _nothing
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
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may have; that of number 1 comes first."""
        return self._core.adapters

    @property
    def precisions(self) -> dict[str, str]:
        """Model -> type that it computes in, and why: "bf16: Intel Xeon has it"."""
        return self._core.precisions

    @property
    def stopped(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""
        return self._stopped

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Take a request, without waiting for anything.

        Args:
            request: Prompt, sampling parameters and guide.
            sink: Called on the engine's thread with each output; the last one has `finish`, REFUSED if the guide of
                the request cannot be held to.

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
            if request.guide is None:
                self._inbox.put(lambda: self._core.add(request, forward))
            else:
                self._inbox.put(lambda: self._compile(request, forward))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; its last output says CANCELLED. Unknown ids are ignored."""
        self._inbox.put(lambda: self._cancel(request_id))

    def stats(self) -> EngineStats:
        """A snapshot of what the engine has done and holds."""
        return self._core.stats()

    def close(self) -> None:
        """Cancel everything in flight and end the thread, after the step that is under way."""
        self._stop("the engine is closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._grammars:
            self._grammars.close()

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
                self.after_round()
        except BaseException as error:
            _log.critical("the engine thread died", exc_info=True)
            self._stop(f"the engine died: {type(error).__name__}: {error}")
            self._end_all(FinishReason.ERROR)
        else:
            self._end_all(FinishReason.CANCELLED)

    def _compile(self, request: EngineRequest, sink: Sink) -> None:
        """Add a request to the core when its guide is compiled."""
        assert self._grammars is not None, "EngineCore.check has seen to it"
        assert request.guide is not None, "or it would have been added"
        self._guided[request.id] = sink

        def done(matcher: Matcher | Exception) -> None:
            self._inbox.put(lambda: self._add_guided(request, matcher))

        self._grammars.prepare(request.guide, self._core.ends(request), done)

    def _add_guided(self, request: EngineRequest, matcher: Matcher | Exception) -> None:
        # Unless it was cancelled meanwhile.
        if (sink := self._guided.pop(request.id, None)) is None:
            return
        if isinstance(matcher, Matcher):
            self._core.add(request, sink, matcher)
            return
        refused = isinstance(matcher, InvalidRequest)
        finish = FinishReason.REFUSED if refused else FinishReason.ERROR
        _end(request.id, sink, finish, str(matcher))

    def _cancel(self, request_id: str) -> None:
        if (sink := self._guided.pop(request_id, None)) is not None:
            _end(request_id, sink, FinishReason.CANCELLED)
        self._core.cancel(request_id)

    def _read_inbox(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _end_all(self, finish: FinishReason) -> None:
        """Drain the inbox, then finish all requests; later submissions are ignored."""
        self._read_inbox(wait=False)
        self._core.end_all(finish, self._stopped or "")
        for request_id, sink in self._guided.items():
            _end(request_id, sink, finish, self._stopped)
        self._guided.clear()
        self.after_round()


def _end(request_id: str, sink: Sink, finish: FinishReason, error: str | None = None) -> None:
    """End a request that the core has not taken."""
    try:
        sink(RequestOutput(request_id, (), finish=finish, error=error))
    except Exception:
        _log.exception("request %s: its sink failed", request_id)


def _nothing() -> None:
    pass

"""Long texts of users, worked on in processes that the kernel ends when they take too long or too much memory.

Each model has a server that forks workers (`pipeline.gateway.text_server`); both are replaced when they are lost. Who
asks them waits, so they are for calls that a `CpuMeter` runs in a thread: short texts, and all texts in the event loop,
are worked on in this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from pipeline.client import ChatTemplate, Refused
from pipeline.gateway.errors import ApiError
from pipeline.gateway.text_server import BEGUN, cpu_budget_s, receive_message, send_message
from pipeline.models.chat_template import TemplateError

_log = logging.getLogger("pipeline.gateway")

# Tokenizing so much takes 3 to 4 ms, checking such a schema 3 to 5, and the way to a worker and back 0.2 to 0.4.
LONG_CHARS, LONG_SCHEMA_CHARS = 8 * 1024, 256
# A message or a tool costs a template about as much as so many characters cost the tokenizer.
_CHARS_PER_MESSAGE = 64
_ANSWER_S = 60.0  # most of the wait for a worker, and for its answer
_ATTEMPTS = 2
_Result = TypeVar("_Result")
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class TextBudget:
    """Budget of one piece of work.

    Attributes:
        cpu_s: processor time of a short piece; a second more for each megabyte.
        memory_mib: memory, besides that of the tokenizer.
    """

    cpu_s: float = 2.0
    memory_mib: int = 256


# Code of a request that is refused for it.
OVER_BUDGET = "over_budget"


class OverBudget(Refused):
    """A text takes more time or memory to read than one request may have."""


class CpuMeter:
    """Measures the processor time of a call, in its thread and in the workers that work for it."""

    def __init__(self) -> None:
        self.used_s = 0.0

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Make the call, and return what it does."""
        began, _thread.meter = time.thread_time(), self
        try:
            return call()
        finally:
            _thread.meter = None
            self.used_s += time.thread_time() - began


def is_long(chars: int, most: int = LONG_CHARS) -> bool:
    """Whether a text is to be left to a worker: if it has more than `most` characters, and this thread may wait."""
    return chars > most and getattr(_thread, "meter", None) is not None


class TextProcesses:
    """Work on long texts for one model. Safe to call from several threads.

    >>> with closing(TextProcesses(Path("package/tokenizer"))) as processes:            # doctest: +SKIP
    ...     processes.do("count", text="word " * 100_000)
    100001
    """

    def __init__(
        self, tokenizer: Path, *, tool_section: bool = False, budget: TextBudget | None = None
    ) -> None:
        """
        Args:
            tool_section: whether tools stand in a section of the prompt where the template takes none.
        """
        self.budget = budget or TextBudget()
        budgets = (str(self.budget.cpu_s), str(self.budget.memory_mib))
        self._command = [sys.executable, "-m", "pipeline.gateway.text_server", str(tokenizer), *budgets]
        self._command += ["--tool-section"] if tool_section else []
        self._lock = threading.Lock()  # guards what follows
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[socket.socket] = []  # workers that wait
        self._closed = False

    def start(self) -> None:
        """Start the server of workers, unless it runs; it loads what it needs in the background."""
        with self._lock:
            self._connected()

    def close(self) -> None:
        """End the server and its workers. Work under way goes on to its end."""
        with self._lock:
            self._closed = True
            self._end()

    def do(self, task: str, **request: Any) -> Any:
        """Do a piece of work; see `pipeline.gateway.text_server.TextWork`.

        Args:
            task: name of the work.
            **request: its arguments, which JSON can hold.

        Raises:
            OverBudget: it takes more time or memory than it may.
            TemplateError: the chat template does not take what it is given.
            ApiError: 503, if no process can be made for it now.
        """
        sent = json.dumps({"do": task, **request}).encode()
        worker = self._begin(sent)
        try:
            answer = receive_message(worker)
        except TimeoutError:
            # The machine is too busy to go on with it.
            worker.close()
            raise _unavailable() from None
        if answer is None:
            worker.close()
            budget_s = cpu_budget_s(self.budget.cpu_s, len(sent))
            _charge(budget_s)
            budget = f"{budget_s:.1f} s of processor time or {self.budget.memory_mib} MiB of memory"
            raise OverBudget(f"takes more than {budget} to read")
        with self._lock:
            self._idle.append(worker)
            if self._closed:
                self._end()
        read = json.loads(answer)
        _charge(read["cpu_s"])
        if "error" not in read:
            return read["result"]
        kind, text = read["error"]
        if kind == "template":
            raise TemplateError(text)
        raise RuntimeError(f"{task} failed in a process of its own: {text}")

    def _begin(self, request: bytes) -> socket.socket:
        """Send a request to a worker that waits, or to a new one; return the worker when it has begun."""
        forks = 0
        while forks < _ATTEMPTS:
            with self._lock:
                control = self._connected()
                waiting = bool(self._idle)
                worker = self._idle.pop() if waiting else _fork(control)
            forks += not waiting
            try:
                send_message(worker, request)
                if worker.recv(1) == BEGUN:
                    return worker
            except TimeoutError:
                forks = _ATTEMPTS
            except (BrokenPipeError, ConnectionResetError):
                # It was ended while it waited, or the server was.
                pass
            worker.close()
            if not waiting:
                with self._lock:
                    # Unless another thread has seen it before.
                    if self._control is control:
                        self._end()
        _log.error("no process for a long text: %s", " ".join(self._command))
        raise _unavailable()

    def _connected(self) -> socket.socket:
        if self._closed:
            raise _unavailable()
        if self._control is None:
            self._control, child_end = socket.socketpair()
            with child_end:
                self._server = subprocess.Popen(
                    self._command,
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                )
        return self._control

    def _end(self) -> None:
        server, control, self._server, self._control = self._server, self._control, None, None
        while self._idle:
            self._idle.pop().close()
        if control is not None and server is not None:
            control.close()
            server.kill()
            server.wait()


class ProcessTemplate(ChatTemplate):
    """A chat template, the same as that of the processes, whose renderings are made there."""

    def __init__(self, template: ChatTemplate, processes: TextProcesses) -> None:
        super().__init__(template.sources, template.special_tokens)
        self._processes = processes

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """See `ChatTemplate.render`."""
        text: str = self._processes.do("render", messages=messages, settings=settings)
        return text


class ProcessTokenizer:
    """Tokenizer of prompts that leaves long texts to the processes, which have the same `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any, processes: TextProcesses) -> None:
        self._tokenizer, self._processes = tokenizer, processes

    def encode_batch_fast(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return for each text something of the length of its tokens."""
        return [
            range(self._processes.do("count", text=text))
            if is_long(len(text))
            else self._tokenizer.encode_batch_fast([text])[0]
            for text in texts
        ]

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Return the `ids` and the `special_tokens_mask` of a text."""
        if not is_long(len(text)):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids, mask = self._processes.do("encode", text=text, add_special_tokens=add_special_tokens)
        return SimpleNamespace(ids=ids, special_tokens_mask=mask)


def prompt_chars(messages: Sequence[Mapping[str, Any]], *more: Any) -> int:
    """Estimate how long a template takes with these messages and more, in characters of text that take as long."""
    chars = sum(len(json.dumps(part)) for part in more if part)
    for message in messages:
        content = message.get("content")
        plain = isinstance(content, str) and len(message) == 2
        chars += _CHARS_PER_MESSAGE + (len(str(content)) if plain else len(json.dumps(message)))
    return chars


def _unavailable() -> ApiError:
    text = "There is no process to read a long request in now"
    return ApiError(503, text, code="overloaded", retry_after_s=1)


def _fork(control: socket.socket) -> socket.socket:
    """Ask the server for a worker; what is sent to it is lost if there is no server any more."""
    worker, child_end = socket.socketpair()
    worker.settimeout(_ANSWER_S)
    with child_end, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(control, [b"f"], [child_end.fileno()])
    return worker


def _charge(cpu_s: float) -> None:
    meter: CpuMeter | None = getattr(_thread, "meter", None)
    if meter is not None:
        meter.used_s += cpu_s

"""Guides of answers: compiled for each request, without blocking the engine or its callers.

Guides mean what they mean to TensorRT-LLM (`guided_decoding_guide_type` and `guided_decoding_guide`, release 1.2), but
that `json` is an object, and that JSON has no white space between its parts, as in OpenAI's own answers: a small model
would never come to an end of it, and each space would cost a token. As there (xgrammar's strict mode), an object has no
properties but those that its schema names, unless the schema speaks of others. The work is llguidance's.

A guide is compiled twice: in a process that the kernel ends at a budget (`grammar_server`), and if that succeeds, here,
in a thread that lets others run. There are two such threads. One gives each guide little time, so that the usual ones
do not wait for expensive ones; what takes longer goes to the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher

from . import grammar_server
from .matcher import Matcher
from .request import Guide, InvalidRequest

_KEPT = 64  # compiled grammars, and as many reasons why others are none
_KEPT_BYTES = 256 * 2**20
_MAX_GUIDE_BYTES = 2**20
_EXPENSIVE_NICENESS = 5  # the engine and its streams go before an expensive guide
_ANSWER_S = 60.0  # of a busy machine, for a worker's answer
_ATTEMPTS = 2  # the server may have been lost, and the worker that waited with it


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as text."""

    tokenizer: Path  # tokenizer.json
    end_id: int  # a token that ends texts


@dataclass(frozen=True, slots=True)
class GrammarBudget:
    """Most that compiling one guide may take.

    Attributes:
        quick_s: Processor time after which a guide makes way for others.
        cpu_s: Processor time, in seconds, after which it is refused.
        memory_mib: Memory besides the tokenizer's.
    """

    quick_s: float = 0.05
    cpu_s: float = 1.0
    memory_mib: int = 256


class GrammarsUnavailable(RuntimeError):
    """No worker process could be started to compile a guide."""


class Grammars:
    """Compiles and caches the guides of one model. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, budget: GrammarBudget | None = None) -> None:
        """
        Raises:
            ValueError: llguidance does not know this kind of tokenizer.
        """
        self._tokenizer = grammar_server.make_tokenizer(vocabulary.tokenizer, vocabulary.end_id)
        self._vocab_size, self._end_id = vocab_size, vocabulary.end_id
        self._budget = budget or GrammarBudget()
        self._workers = _Workers(vocabulary, self._budget.memory_mib)
        self._lanes = [ThreadPoolExecutor(1, name) for name in ("guides", "expensive-guides")]
        self._lock = threading.Lock()  # guards what follows
        self._ready: OrderedDict[Guide, tuple[LLMatcher, int]] = OrderedDict()  # and its bytes
        self._refused: OrderedDict[Guide, InvalidRequest] = OrderedDict()

    def start(self) -> None:
        """Start the process that compiles, which reads the tokenizer in the background."""
        self._workers.start()

    def close(self) -> None:
        """End the process; guides that are being compiled are dropped."""
        self._workers.close()
        for lane in self._lanes:
            lane.shutdown(cancel_futures=True)

    def prepare(
        self, guide: Guide, ends: Collection[int], done: Callable[[Matcher | Exception], None]
    ) -> None:
        """Make a matcher, and hand it on: at once if the guide was compiled before, else later, in another thread.

        Args:
            guide: Form of the answer.
            ends: Tokens that end the answer where the form allows.
            done: Called with the matcher; with InvalidRequest if the guide is no form, cannot be held to, or is over
                budget; or with what else went wrong. Not called after `close`.
        """
        if (known := self._known(guide)) is not None:
            done(self._matcher(known, ends) if isinstance(known, LLMatcher) else known)
        else:
            self._lanes[0].submit(self._prepare, guide, ends, done, 0)

    def matcher(self, guide: Guide, ends: Collection[int] = ()) -> Matcher:
        """Make a matcher at the beginning of an answer, which may take as long as the budget allows.

        Raises:
            InvalidRequest: The guide is no form, cannot be held to, or is over budget.
            GrammarsUnavailable: No process can be made.
        """
        known = self._known(guide) or self._compile(guide, self._budget.cpu_s)
        if isinstance(known, InvalidRequest):
            raise known
        return self._matcher(known, ends)

    def is_special(self, token: int) -> bool:
        """Whether a token is no text, as those that end a turn."""
        return token < self._tokenizer.vocab_size and self._tokenizer.is_special_token(token)

    def _prepare(
        self, guide: Guide, ends: Collection[int], done: Callable[[Matcher | Exception], None], lane: int
    ) -> None:
        result: Matcher | Exception
        try:
            quick = lane == 0 and self._budget.quick_s < self._budget.cpu_s
            known = self._known(guide) or self._compile(
                guide, self._budget.quick_s if quick else self._budget.cpu_s, final=not quick
            )
            result = self._matcher(known, ends) if isinstance(known, LLMatcher) else known
        except _OverBudget:
            self._lanes[1].submit(self._prepare, guide, ends, done, 1)
            return
        except Exception as error:
            result = error
        done(result)

    def _known(self, guide: Guide) -> LLMatcher | InvalidRequest | None:
        with self._lock:
            if guide in self._ready:
                self._ready.move_to_end(guide)
                return self._ready[guide][0]
            return self._refused.get(guide)

    def _compile(self, guide: Guide, cpu_s: float, *, final: bool = True) -> LLMatcher | InvalidRequest:
        """Compile a guide, and cache the result or the error.

        Raises:
            _OverBudget: It takes too long, and is not to be `final`.
        """
        try:
            grammar, size = self._workers.compile(guide, cpu_s, _EXPENSIVE_NICENESS if final else 0)
            made = grammar_server.make_matcher(self._tokenizer, grammar)
        except _OverBudget:
            if not final:
                raise
            budget = f"{cpu_s:g} s of processor time or {self._budget.memory_mib} MiB of memory"
            return self._refuse(guide, f"takes more than {budget} to compile")
        except ValueError as error:
            return self._refuse(guide, str(error))
        with self._lock:
            self._ready[guide] = made, size
            while len(self._ready) > _KEPT or (
                len(self._ready) > 1 and sum(size for _, size in self._ready.values()) > _KEPT_BYTES
            ):
                self._ready.popitem(last=False)
        return made

    def _refuse(self, guide: Guide, why: str) -> InvalidRequest:
        refusal = InvalidRequest(
            f"guided_decoding_guide: cannot be held to as {guide.kind}: {' '.join(why.split())}"
        )
        with self._lock:
            self._refused[guide] = refusal
            if len(self._refused) > _KEPT:
                self._refused.popitem(last=False)
        return refusal

    def _matcher(self, grammar: LLMatcher, ends: Collection[int]) -> Matcher:
        return Matcher(
            grammar.deep_copy(),
            size=self._tokenizer.vocab_size,
            vocab_size=self._vocab_size,
            end=self._end_id,
            ends=ends,
            closing=[token for token in ends if token != self._end_id and self.is_special(token)],
        )


class _OverBudget(Exception):
    """A worker exceeded its budget and was killed."""


class _Workers:
    """Client of `grammar_server`: one process, restarted when it is lost."""

    def __init__(self, vocabulary: Vocabulary, memory_mib: int) -> None:
        # -P: its folder, this one, has modules that are named as others'.
        arguments = (grammar_server.__file__, vocabulary.tokenizer, vocabulary.end_id, memory_mib)
        self._command = [sys.executable or "python3", "-P", *map(str, arguments)]
        self._lock = threading.Lock()  # guards what follows
        self._control: socket.socket | None = None
        # A worker that waits for the next guide: making one takes longer than most guides do.
        self._spare: list[socket.socket] = []
        self._end: weakref.finalize[..., _Workers] | None = None
        self._closed = False

    def start(self) -> None:
        with self._lock:
            self._make_spare(self._connected())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lose()

    def compile(self, guide: Guide, cpu_s: float, niceness: int) -> tuple[str, int]:
        """Compile a guide in a worker.

        Returns:
            The grammar as llguidance takes it, and the bytes that compiling it took.

        Raises:
            ValueError: It is no form, or cannot be held to.
            _OverBudget: The worker was ended.
            GrammarsUnavailable: There is no worker, or it does not answer.
        """
        if len(guide.text.encode(errors="replace")) > _MAX_GUIDE_BYTES:
            raise ValueError(f"has more than {_MAX_GUIDE_BYTES} bytes")
        fields = {"kind": guide.kind, "text": guide.text, "cpu_s": cpu_s, "nice": niceness}
        request = json.dumps(fields).encode()
        for _ in range(_ATTEMPTS):
            with self._lock:
                control = self._connected()
                self._make_spare(control)
                taken = self._spare.pop()
                self._make_spare(control)
            try:
                with taken as worker, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.sendall(request)
                    worker.shutdown(socket.SHUT_WR)
                    if worker.recv(len(grammar_server.BEGUN)) == grammar_server.BEGUN:
                        return _read(worker)
            except TimeoutError:
                raise GrammarsUnavailable("the machine is too busy to compile a form now") from None
            with self._lock:
                # Unless another thread has seen it before.
                if self._control is control:
                    self._lose()
        raise GrammarsUnavailable("no process to compile a form in can be had now")

    def _connected(self) -> socket.socket:
        if self._closed:
            raise GrammarsUnavailable("the engine is closed")
        if self._control is None:
            self._control, child_end = socket.socketpair()
            with child_end:
                process = subprocess.Popen(
                    self._command,
                    stdin=child_end.fileno(),
                    # Python in Triton's stub knows modules from more places than its command line would.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            self._end = weakref.finalize(self, _end, process, self._control, self._spare)
        return self._control

    def _lose(self) -> None:
        if self._end is not None:
            self._end()
        self._control = self._end = None

    def _make_spare(self, control: socket.socket) -> None:
        if not self._spare:
            self._spare.append(_worker(control))


def _end(process: subprocess.Popen[bytes], control: socket.socket, spare: list[socket.socket]) -> None:
    while spare:
        spare.pop().close()
    control.close()
    process.kill()
    process.wait()


def _worker(control: socket.socket) -> socket.socket:
    """Ask the server for a worker; a request to it is lost if the server has ended."""
    worker, child_end = socket.socketpair()
    worker.settimeout(_ANSWER_S)
    with child_end, contextlib.suppress(OSError):
        socket.send_fds(control, [b"f"], [child_end.fileno()])
    return worker


def _read(worker: socket.socket) -> tuple[str, int]:
    answer = b"".join(iter(lambda: worker.recv(2**18), b""))
    if not answer:
        raise _OverBudget
    read = json.loads(answer)
    if "error" in read:
        raise ValueError(read["error"])
    return read["grammar"], read["memory_bytes"]

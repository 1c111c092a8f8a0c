"""One benchmark from its options to its result.

subject = Subject.of_record(RunningServer.find(store.running, "tiny-cpu"), slo=None)
result = run_bench(subject, BenchOptions(loads=(Load("concurrency", 8),)), Silent())
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pipeline import __version__
from pipeline.bench.arrivals import Load
from pipeline.bench.forecast import Promise
from pipeline.bench.load import LoadRecords, Period, run_load
from pipeline.bench.prompt_file import PromptFile
from pipeline.bench.result import BenchResult, LevelResult
from pipeline.bench.server_watch import ServerWatch
from pipeline.bench.subject import Subject
from pipeline.bench.summary import summarize
from pipeline.bench.sweep import find_limit, run_levels
from pipeline.bench.workload import (
    Lengths,
    ScriptedConversation,
    Shape,
    TemplateTokens,
    Words,
    shaped,
    synthetic,
)
from pipeline.client import ChatTemplate, Sampling
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.machine.host import processor_name
from pipeline.progress import Progress
from pipeline.reading import read_tokenizer

_PLAIN = Shape()


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a benchmark does.

    Attributes:
        loads: One after the other; with `sweep` the first is where it begins.
        sweep: Whether to go on from the first load until the SLO breaks.
        most: Where a sweep ends at the latest.
        file: Prompts of a file, or "calibration" for the held-out questions of the recipe's calibration set; None for
            words at random.
        prompts: Tokens of each question of words at random.
        answers: Tokens of each answer; with a file None leaves them to the model.
        shape: Shared prefixes, turns, cancellations.
        chat: Whether words at random go through the chat template.
        seconds: Of each load; None for as long as `requests` take.
        requests: Of each load; None for as many as come in `seconds`.
        warm_up_s: Seconds before each load counts.
        grace_s: With `seconds`: how long answers are waited for after them.
        think_s: Seconds between an answer and the next question of its conversation.
        temperature: Of all requests; 0 takes the likeliest token.
        timeout_s: For each answer.
        seed: Of prompts and arrivals.
    """

    loads: tuple[Load, ...]
    sweep: bool = False
    most: float = 1024
    file: Path | Literal["calibration"] | None = None
    prompts: Lengths | None = None
    answers: Lengths | None = None
    shape: Shape = _PLAIN
    chat: bool = True
    seconds: float | None = 30.0
    requests: int | None = None
    warm_up_s: float = 3.0
    grace_s: float = 60.0
    think_s: float = 0.0
    temperature: float = 0.0
    timeout_s: float = 600.0
    seed: int = 0


# Called while a load is under way: it, what is known so far, the seconds since it began.
Watcher = Callable[[Load, LoadRecords, float], None]


def run_bench(
    subject: Subject,
    options: BenchOptions,
    progress: Progress,
    *,
    watch: Watcher | None = None,
    ended: Callable[[LevelResult], None] | None = None,
) -> BenchResult:
    """Put the loads on a deployment, one after the other.

    Args:
        subject: What is measured.
        options: How.
        progress: Told of each load.
        watch: Called several times a second.
        ended: Called with the figures of each load when it is over.

    The first Ctrl-C ends the load that is under way; what was measured is returned, and says so.

    Raises:
        ServerError: It cannot be reached.
        InvalidInput: The file of prompts has faults, or lengths are more than the deployment takes.
    """
    workload = BenchWorkload(subject, options)
    # Before an hour of load, so that a fault of it shows at once.
    promise = Promise.made(subject.recipe, subject.store)
    watched = ServerWatch(subject.name, subject.triton_metrics, subject.gateway_url)
    longest = subject.default_answer or subject.max_answer
    sampling: Sampling = {"temperature": options.temperature, "max_tokens": longest}
    period = Period(options.seconds, options.requests, options.warm_up_s, options.grace_s)
    target = subject.target(options.timeout_s, chat=options.chat)
    levels: list[LevelResult] = []

    async def run() -> float | None:
        stop = asyncio.Event()

        async def measure(load: Load) -> LevelResult:
            seed = options.seed + len(levels)
            with progress.task(str(load)):
                async with watched.watching():
                    records = await run_load(
                        target,
                        load,
                        workload.conversations(load, seed),
                        period,
                        sampling=sampling,
                        seed=seed,
                        think_s=options.think_s,
                        watch=None if watch is None else lambda seen, now_s: watch(load, seen, now_s),
                        stop=stop,
                    )
            level = summarize(records, subject.slo, watched.figures())
            levels.append(level)
            if ended is not None:
                ended(level)
            if level.interrupted:
                raise _Interrupted
            return level

        async with target:
            with _interrupts(stop), contextlib.suppress(_Interrupted):
                if options.sweep:
                    return await find_limit(options.loads[0], options.most, measure)
                await run_levels(options.loads, measure)
        return None

    with _many_files():
        broke_at = asyncio.run(run())
    if options.sweep:
        levels.sort(key=lambda one: one.value)
    return BenchResult(
        name=subject.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        target={"way": subject.way, "url": subject.url, "model": subject.model, **subject.about},
        machine=_machine(),
        workload=workload.described(),
        seed=options.seed,
        slo={} if subject.slo is None else subject.slo.model_dump(exclude_none=True),
        forecast=promise.of(levels),
        levels=tuple(levels),
        warnings=tuple(workload.warnings(levels)),
        broke_at=broke_at,
    )


class _Interrupted(Exception):
    """A load was ended by Ctrl-C, and no other follows."""


@contextlib.contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """Let the first Ctrl-C end the load that is under way, so that it is reported, and the second everything."""
    if threading.current_thread() is not threading.main_thread():
        # Signals are not for other threads.
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _many_files() -> Iterator[None]:
    """Let this process have as many connections open as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class BenchWorkload:
    """The conversations that options ask for, of one subject."""

    def __init__(self, subject: Subject, options: BenchOptions) -> None:
        """Read the file, if there is one, and the tokenizer, if lengths need it.

        Args:
            subject: What is measured.
            options: How.

        Raises:
            InvalidInput: The file has faults, or is no trace where one is needed; or lengths are more than the
                deployment takes.
            UserError: The tokenizer is needed and not known; or its template takes no system prompt.
        """
        self._subject, self._options = subject, options
        match options.file:
            case None:
                self._file = None
            case "calibration":
                self._file = PromptFile.of_dataset(subject.dataset)
            case path:
                self._file = PromptFile.read(Path(path))
        self.span_s = (
            self._file.span_s
            if self._file is not None and any(load.kind == "trace" for load in options.loads)
            else None
        )
        needs_words = self._file is None or self._file.needs_words
        if needs_words and subject.tokenizer is None:
            raise UserError(
                "prompts of a length need --tokenizer FOLDER, or the name of a deployment of this machine"
            )
        if (
            subject.way == "triton"
            and subject.tokenizer is None
            and self._file is not None
            and self._file.chats
        ):
            raise UserError("chats are sent to Triton through the model's chat template: --tokenizer FOLDER")
        self._words = (
            Words(read_tokenizer(subject.tokenizer / "tokenizer.json"))
            if needs_words and subject.tokenizer is not None
            else None
        )
        self._around = self._template_tokens()
        self._prompts = options.prompts or Lengths(min(512, subject.max_prompt // 2))
        self._answers = options.answers or (
            Lengths(min(128, subject.max_answer)) if self._file is None else None
        )

        if faults := list(self._too_long()):
            raise InvalidInput(f"what {subject.name} is to be asked", faults)

    def _template_tokens(self) -> TemplateTokens:
        if self._words is None or self._subject.tokenizer is None or not self._options.chat:
            return TemplateTokens()
        template = ChatTemplate.from_directory(self._subject.tokenizer)
        return TemplateTokens.of(template, self._words, system=self._options.shape.prefix_tokens > 0)

    def _too_long(self) -> Iterator[Fault]:
        """Lengths that the deployment would have to refuse."""
        subject, prefix = self._subject, self._options.shape.prefix_tokens
        asked = prefix + self._around.first + math.ceil(self._prompts.high or self._prompts.mean)
        if self._file is None and asked > subject.max_prompt:
            parts = f"{prefix} of the prefix, {self._around.first} of the chat template and {self._prompts}"
            yield Fault(
                f"are more than the {subject.max_prompt} tokens that a prompt may have",
                key="prompt tokens",
                value=parts,
            )
        if self._answers is not None and (self._answers.high or self._answers.mean) > subject.max_answer:
            yield Fault(
                f"are more than the {subject.max_answer} that an answer may have",
                key="output tokens",
                value=str(self._answers),
            )

    def conversations(self, load: Load, seed: int) -> Iterator[ScriptedConversation]:
        """Make the conversations of one load.

        Args:
            load: A trace is gone through once.
            seed: Of what is drawn.
        """
        subject, options = self._subject, self._options
        limits = {"most_prompt": subject.max_prompt, "most_answer": subject.max_answer}
        if self._file is not None:
            once = load.kind == "trace"
            source = self._file.conversations(self._words, self._answers, once=once, seed=seed, **limits)
        else:
            assert self._words is not None, "there is no file"
            assert self._answers is not None, "there is no file"
            source = synthetic(
                self._words,
                self._prompts,
                self._answers,
                options.shape,
                seed=seed,
                around=self._around,
                chat=options.chat,
                **limits,
            )
        return shaped(source, options.shape, seed)

    def warnings(self, levels: Sequence[LevelResult]) -> Iterator[str]:
        """Say why not to trust what such prompts show.

        Args:
            levels: What was measured.
        """
        if self._file is None and any(level.acceptance is not None for level in levels):
            yield "a draft model predicts words at random badly: --prompts shows what it is worth"

    def described(self) -> dict[str, Any]:
        """Say what is asked, for the result."""
        options = self._options
        return {
            "source": "words at random" if self._file is None else self._file.name,
            "prompt_tokens": str(self._prompts) if self._file is None else None,
            "answer_tokens": None if self._answers is None else str(self._answers),
            "prefix_tokens": options.shape.prefix_tokens,
            "prefixes": options.shape.prefixes,
            "turns": options.shape.turns,
            "cancelled": options.shape.cancelled,
            "think_s": options.think_s,
            "seconds": options.seconds,
            "requests": options.requests,
            "warm_up_s": options.warm_up_s,
            "temperature": options.temperature,
        }


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "pipeline": __version__,
        "processor": processor_name(),
        "processors": os.cpu_count(),
    }

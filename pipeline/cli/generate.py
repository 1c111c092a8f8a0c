"""`pipeline generate`: whole answers to any number of prompts, several at a time.

Prompts come from the command line, or a line each from a file. A line is text, or a JSON object: {"prompt": "…"} or
{"messages": [{"role": "user", "content": "…"}]}, beside it an "id" of any kind that is repeated with the answer, and
sampling parameters such as "max_tokens" and "seed".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from pipeline.cli.connection import (
    AnyClient,
    as_pipeline_error,
    connected,
    find_destination,
    request_options,
)
from pipeline.cli.options import complete_deployment, opened, output_option, set_option, store_option
from pipeline.cli.output import is_quiet
from pipeline.errors import Fault, InvalidInput, PipelineError
from pipeline.printable import json_text, printable
from pipeline.reading import check_line, checked_json

if TYPE_CHECKING:
    from pipeline.client import Answer, ClientError


@click.command(name="generate")
@click.argument("words", nargs=-1, metavar="[RECIPE] [QUESTION]…", shell_complete=complete_deployment)
@set_option
@store_option
@request_options
@click.option("--raw", is_flag=True, help="Send prompts as they are, without a chat template.")
@click.option(
    "--input",
    "source",
    type=click.File(encoding="utf-8", errors="surrogateescape"),
    metavar="FILE",
    help="A prompt a line; - is standard input.",
)
@output_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object an answer, a line each.")
@click.option(
    "--concurrency", type=click.IntRange(1, 1024), default=8, show_default=True, help="Answers at a time."
)
@click.option("--no-stats", is_flag=True, help="No progress and no figures on standard error.")
def command(
    words: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    raw: bool,
    source: TextIO | None,
    output: str,
    as_json: bool,
    concurrency: int,
    no_stats: bool,
    **options: Any,
) -> None:
    """Ask the running server of RECIPE for whole answers, written in the order of the questions.

    With --url there is no RECIPE. Lines of --input are text, or JSON objects with "prompt" or "messages", an "id" of
    your own, and sampling parameters. A prompt that fails does not stop the others; the exit code then tells.

    \b
    pipeline generate tiny-cpu "How do I log in?" "How do I log out?"
    pipeline generate tiny-cpu --input questions.jsonl --json --temperature 0 --output answers.jsonl
    """
    recipe, prompts = _read(words, source, with_url=options["url"] is not None)
    destination = find_destination(recipe, overrides, store, options)
    with connected(destination, options, raw=raw) as client:
        tally = _Tally(len(prompts), show=not (no_stats or is_quiet()))
        answers = _answers(client, prompts, options["system"], concurrency, raw=raw)
        with opened(output) as file, closing(answers):
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                tally.add(prompt, answer)
                _write(file, number, prompt, answer, as_json=as_json, alone=len(prompts) == 1)
        tally.end()
    if tally.failure is not None:
        raise tally.failure


def _read(
    words: tuple[str, ...], source: TextIO | None, *, with_url: bool
) -> tuple[str | None, list[Prompt]]:
    """Recipe and prompts."""
    if not with_url and not words:
        raise click.UsageError("give a RECIPE, or the --url of a server")
    recipe, questions = (None, words) if with_url else (words[0], words[1:])
    if bool(questions) == (source is not None):
        raise click.UsageError("give questions, or --input FILE with a prompt a line; not both")
    return recipe, [Prompt(text) for text in questions] if source is None else read_prompts(
        source, source.name
    )


def _answers(
    client: AnyClient, prompts: Sequence[Prompt], system: str, concurrency: int, *, raw: bool
) -> Generator[Answer | ClientError, None, None]:
    """In the order of the prompts, each as soon as it and those before it are there."""
    from pipeline.client import ClientError

    def ask(prompt: Prompt) -> Answer | ClientError:
        content = prompt.content
        if isinstance(content, str) and not raw:
            said = [{"role": "system", "content": system}] if system else []
            content = [*said, {"role": "user", "content": content}]
        try:
            return client.generate(content, **prompt.sampling)
        except ClientError as error:
            return error

    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="generate")
    try:
        running: list[Future[Answer | ClientError]] = [pool.submit(ask, prompt) for prompt in prompts]
        for one in running:
            yield one.result()
    finally:  # Ctrl-C: nothing more is sent, and what runs is cancelled on the server, too
        pool.shutdown(wait=False, cancel_futures=True)
        if not all(one.done() for one in running):
            client.close()
        pool.shutdown()


def _write(
    output: TextIO, number: int, prompt: Prompt, answer: Answer | ClientError, *, as_json: bool, alone: bool
) -> None:
    from pipeline.client import ClientError

    if as_json:
        told: dict[str, Any] = {"index": number, **({} if prompt.id is None else {"id": prompt.id})}
        if isinstance(answer, ClientError):
            told |= {"error": str(answer), "kind": type(answer).__name__}
        else:
            told |= {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "request_id": answer.request_id,
            }
            told |= {"stats": answer.stats.as_dict()}
            told |= {} if answer.log_probs is None else {"log_probs": answer.log_probs}
        output.write(json_text(told) + "\n")
    elif not isinstance(answer, ClientError):
        text = printable(answer.text) if output.isatty() else answer.text
        output.write(text + ("\n" if alone else "\n\n"))
    output.flush()


@dataclass
class _Tally:
    """What came so far."""

    total: int
    show: bool
    done: int = 0
    failed: int = 0
    cached: int = 0
    tokens: int = 0
    failure: PipelineError | None = None
    began: float = field(default_factory=time.perf_counter)

    def add(self, prompt: Prompt, answer: Answer | ClientError) -> None:
        """Count an answer, and tell where a person looks on."""
        from pipeline.client import ClientError

        self.done += 1
        if isinstance(answer, ClientError):
            self.failed += 1
            told = as_pipeline_error(answer, prompt.sampling)
            self.failure = type(told)(
                f"{self.failed} of {self.total} prompts have no answer; the last: {told}"
            )
        else:
            self.cached += answer.stats.cached is not None
            self.tokens += answer.stats.output_tokens or 0
        if self.show and sys.stderr.isatty():
            click.echo(f"\r{self}\x1b[K", err=True, nl=False)

    def end(self) -> None:
        """The last line."""
        if self.show:
            click.echo(f"\r{self}\x1b[K" if sys.stderr.isatty() else str(self), err=True)

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.began
        parts = [f"{self.done}/{self.total} in {seconds:.1f} s", f"{self.tokens / seconds:.1f} tokens/s"]
        parts += [f"{self.cached} from the cache"] if self.cached else []
        parts += [f"{self.failed} failed"] if self.failed else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of them."""

    content: str | Sequence[Mapping[str, Any]]  # text, or messages
    id: Any = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(lines: Iterable[str], where: str) -> list[Prompt]:
    """A prompt a line; empty lines are left out. Bytes that are not UTF-8 come as `surrogateescape` has them.

    Raises:
        InvalidInput: with every line that is none, and if there is none at all.
    """
    prompts, faults = list[Prompt](), list[Fault]()
    for number, line in enumerate(lines, 1):
        try:
            if text := check_line(line.strip()):
                prompts.append(_object(text) if text.startswith("{") else Prompt(text))
        except ValueError as error:
            faults.append(Fault(str(error), where=where, line=number))
    if not prompts and not faults:
        faults.append(Fault("holds no prompt", where=where, fix="write one a line"))
    if faults:
        raise InvalidInput(where, faults)
    return prompts


def _object(text: str) -> Prompt:
    try:
        given = checked_json(text)
    except ValueError as error:
        raise ValueError(f"begins like JSON and is not: {error}") from None
    found = [name for name in ("prompt", "messages") if name in given]
    if len(found) != 1:
        raise ValueError('needs "prompt" or "messages", one of them')
    content = given.pop(found[0])
    if found == ["prompt"] and not isinstance(content, str):
        raise ValueError("prompt: must be text")
    if found == ["messages"] and not (
        isinstance(content, list)
        and content
        and all(isinstance(one, dict) and "role" in one for one in content)
    ):
        raise ValueError('messages: must be a list of objects such as {"role": "user", "content": "Hi"}')
    return Prompt(content, given.pop("id", None), given)

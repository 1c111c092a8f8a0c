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
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import click
from pydantic import Field

from pipeline.cli.connection import RequestSettings, as_pipeline_error, connected, find_destination
from pipeline.cli.options import Verb, complete_deployment, opened, output_option, set_option
from pipeline.cli.output import is_quiet
from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault, InvalidInput, PipelineError
from pipeline.printable import json_text, printable
from pipeline.reading import check_line, checked_json
from pipeline.settings import Option

if TYPE_CHECKING:
    from pipeline.cli.connection import AnyClient
    from pipeline.client import Answer, ClientError


class GenerateSettings(RequestSettings):
    raw: bool = Field(default=False, description="Send prompts as they are, without a chat template.")
    as_json: Annotated[bool, Option("--json")] = Field(
        default=False, description="Write one JSON object an answer, a line each."
    )
    concurrency: Annotated[int, Option(metavar="N")] = Field(
        default=8, ge=1, le=1024, description="Answers at a time."
    )


@click.command(name="generate", cls=Verb)
@click.argument("argv", nargs=-1, metavar="[RECIPE] [QUESTION]…", shell_complete=complete_deployment)
@set_option
@options_of(GenerateSettings)
@click.option(
    "--input",
    "source",
    type=click.File(encoding="utf-8", errors="surrogateescape"),
    metavar="FILE",
    help="A prompt a line; - is standard input.",
)
@output_option
def command(
    argv: tuple[str, ...],
    overrides: tuple[str, ...],
    settings: GenerateSettings,
    source: TextIO | None,
    output: str,
) -> None:
    """Ask the running server of RECIPE for whole answers, written in the order of the questions.

    With --url there is no RECIPE. Lines of --input are text, or JSON objects with "prompt" or "messages", an "id" of
    your own, and sampling parameters. A prompt that fails does not stop the others; the exit code says so at the end.

    \b
    pipeline generate tiny-cpu "How do I log in?" "How do I log out?"
    pipeline generate tiny-cpu --input questions.jsonl --json --temperature 0 --output answers.jsonl
    """
    recipe, prompts = _read(argv, source, with_url=settings.url is not None)
    destination = find_destination(recipe, overrides, settings)
    with connected(destination, settings, raw=settings.raw) as client:
        tally = _Tally(len(prompts), show=not is_quiet())
        answers = _answers(client, prompts, settings)
        with opened(output) as file, closing(answers):
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                tally.add(prompt, answer)
                _write(file, number, prompt, answer, as_json=settings.as_json, alone=len(prompts) == 1)
        tally.end()
    if tally.failure is not None:
        raise tally.failure


def _read(argv: tuple[str, ...], source: TextIO | None, *, with_url: bool) -> tuple[str | None, list[Prompt]]:
    """Recipe and prompts."""
    if not with_url and not argv:
        raise click.UsageError("give a RECIPE, or the --url of a server")
    recipe, questions = (None, argv) if with_url else (argv[0], argv[1:])
    if bool(questions) == (source is not None):
        raise click.UsageError("give questions, or --input FILE with a prompt a line; not both")
    if source is None:
        return recipe, [Prompt(text) for text in questions]
    return recipe, read_prompts(source, source.name)


def _answers(
    client: AnyClient, prompts: Sequence[Prompt], settings: GenerateSettings
) -> Generator[Answer | ClientError, None, None]:
    """Yield answers in the order of the prompts, each as soon as it and those before it are there."""
    from pipeline.client import ClientError, Conversation

    def ask(prompt: Prompt) -> Answer | ClientError:
        content = prompt.content
        if isinstance(content, str) and not settings.raw:
            content = Conversation(settings.system).messages(content)
        try:
            return client.generate(content, **prompt.sampling)
        except ClientError as error:
            return error

    pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="generate")
    try:
        running: list[Future[Answer | ClientError]] = [pool.submit(ask, prompt) for prompt in prompts]
        for future in running:
            yield future.result()
    finally:
        # After Ctrl-C nothing more is sent, and requests that run are cancelled on the server, too.
        pool.shutdown(wait=False, cancel_futures=True)
        if not all(future.done() for future in running):
            client.close()
        pool.shutdown()


def _write(
    output: TextIO, number: int, prompt: Prompt, answer: Answer | ClientError, *, as_json: bool, alone: bool
) -> None:
    from pipeline.client import ClientError

    if as_json:
        row: dict[str, Any] = {"index": number, **({} if prompt.id is None else {"id": prompt.id})}
        if isinstance(answer, ClientError):
            row |= {"error": str(answer), "kind": type(answer).__name__}
        else:
            row |= {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "request_id": answer.request_id,
                "stats": answer.stats.as_dict(),
            }
            row |= {} if answer.log_probs is None else {"log_probs": answer.log_probs}
        output.write(json_text(row) + "\n")
    elif not isinstance(answer, ClientError):
        text = printable(answer.text) if output.isatty() else answer.text
        output.write(text + ("\n" if alone else "\n\n"))
    output.flush()


@dataclass
class _Tally:
    """Progress: answers, failures and tokens so far."""

    total: int
    show: bool
    done: int = 0
    failed: int = 0
    cached: int = 0
    tokens: int = 0
    failure: PipelineError | None = None
    began: float = field(default_factory=time.perf_counter)

    def add(self, prompt: Prompt, answer: Answer | ClientError) -> None:
        """Count an answer, and show the progress on a terminal."""
        from pipeline.client import ClientError

        self.done += 1
        if isinstance(answer, ClientError):
            self.failed += 1
            error = as_pipeline_error(answer, prompt.sampling)
            self.failure = type(error)(
                f"{self.failed} of {self.total} prompts have no answer; the last: {error}"
            )
        else:
            self.cached += answer.stats.cached is not None
            self.tokens += answer.stats.output_tokens or 0
        if self.show and sys.stderr.isatty():
            click.echo(f"\r{self}\x1b[K", err=True, nl=False)

    def end(self) -> None:
        """Print the last line."""
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
    """A prompt (text or messages), with an id and sampling parameters of its own."""

    content: str | Sequence[Mapping[str, Any]]
    id: Any = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(lines: Iterable[str], where: str) -> list[Prompt]:
    """Read a prompt a line; empty lines are left out. Bytes that are not UTF-8 come as `surrogateescape` has them.

    Raises:
        InvalidInput: lines are not prompts, which it lists; or there is none at all.
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
        fields = checked_json(text)
    except ValueError as error:
        raise ValueError(f"begins like JSON and is not: {error}") from None
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError('needs "prompt" or "messages", one of them')
    is_text = "prompt" in fields
    content = fields.pop("prompt" if is_text else "messages")
    if is_text and not isinstance(content, str):
        raise ValueError("prompt: must be text")
    if not is_text and not (
        isinstance(content, list)
        and content
        and all(isinstance(message, dict) and "role" in message for message in content)
    ):
        raise ValueError('messages: must be a list of objects such as {"role": "user", "content": "Hi"}')
    return Prompt(content, fields.pop("id", None), fields)

"""`pipeline stream`: one question, its answer as it is generated."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from pipeline.cli.connection import RequestSettings, connected, find_destination, stats_text
from pipeline.cli.options import Verb, complete_deployment, set_option
from pipeline.cli.output import note, print_answer
from pipeline.cli.settings_options import options_of
from pipeline.printable import json_text
from pipeline.settings import Option

if TYPE_CHECKING:
    from pipeline.cli.connection import AnyStream
    from pipeline.client import Message


class StreamSettings(RequestSettings):
    raw: bool = Field(default=False, description="Send the question as it is, without a chat template.")
    as_json: Annotated[bool, Option("--json")] = Field(
        default=False, description="Print one JSON object a chunk, then one with the figures."
    )


@click.command(name="stream", cls=Verb)
@click.argument("argv", nargs=-1, metavar="[RECIPE] QUESTION", shell_complete=complete_deployment)
@set_option
@options_of(StreamSettings)
def command(argv: tuple[str, ...], overrides: tuple[str, ...], settings: StreamSettings) -> None:
    """Ask the running server of RECIPE, and print the answer as it comes.

    With --url there is no RECIPE. QUESTION - reads standard input. Ctrl-C stops the answer, on the server too.

    \b
    pipeline stream tiny-cpu "How do I reset my password?"
    pipeline stream --url gpu-host:8001 --tokenizer ./tokenizer "How do I reset my password?"
    pipeline stream --url http://gpu-host:8080/v1 "How do I reset my password?"
    """
    recipe, question = _read(argv, with_url=settings.url is not None)
    destination = find_destination(recipe, overrides, settings)
    prompt = _prompt(question, settings.system, raw=settings.raw)
    with connected(destination, settings, raw=settings.raw) as client, client.stream(prompt) as stream:
        code = _print(stream, as_json=settings.as_json)
        if settings.as_json:
            click.echo(json.dumps({"stats": stream.stats.as_dict(), "request_id": stream.request_id}))
        else:
            note(stats_text(stream.stats, stream.finish_reason))
    if code:
        raise click.exceptions.Exit(code)


def _read(argv: tuple[str, ...], *, with_url: bool) -> tuple[str | None, str]:
    """Recipe and question."""
    if with_url and len(argv) == 1:
        recipe, question = None, argv[0]
    elif not with_url and len(argv) == 2:
        recipe, question = argv
    else:
        wanted = "one QUESTION and no RECIPE, because of --url" if with_url else "a RECIPE and one QUESTION"
        raise click.UsageError(f"give {wanted}; put quotation marks around a question of several words")
    return recipe, sys.stdin.read() if question == "-" else question


def _prompt(question: str, system: str, *, raw: bool) -> str | list[Message]:
    if raw and system:
        raise click.UsageError("--system needs the chat template that --raw leaves out")
    from pipeline.client import Conversation

    return question if raw else Conversation(system).messages(question)


def _print(stream: AnyStream, *, as_json: bool) -> int:
    """Print every chunk when it comes; return the exit code."""
    from pipeline.client import ClientError

    try:
        for chunk in stream:
            if as_json:
                click.echo(json_text(asdict(chunk)))
            else:
                print_answer(chunk.text)
    except KeyboardInterrupt:
        stream.cancel()
        _end_line(stream, as_json=as_json)
        click.echo("stopped", err=True)
        return 130
    except BrokenPipeError:
        # The reader has enough, like `| head`.
        stream.cancel()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ClientError:
        _end_line(stream, as_json=as_json)
        raise
    _end_line(stream, as_json=as_json)
    return 0


def _end_line(stream: AnyStream, *, as_json: bool) -> None:
    if stream.text and not as_json and not stream.text.endswith("\n"):
        click.echo()

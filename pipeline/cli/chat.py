"""`pipeline chat`: a conversation with a deployment, in the terminal or from a pipe."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from pipeline.cli.connection import (
    RequestSettings,
    as_pipeline_error,
    connected,
    find_destination,
    stats_text,
)
from pipeline.cli.options import Verb, complete_deployment, set_option
from pipeline.cli.output import note, print_answer
from pipeline.cli.settings_options import options_of
from pipeline.printable import printable

if TYPE_CHECKING:
    from types import FrameType

    from pipeline.cli.connection import AnyClient, AnyStream
    from pipeline.client import Conversation

_HELP = """/reset          forget what was said
/system TEXT    set the system prompt, and forget what was said; without TEXT, show it
/stats          figures of the last answer
/quit           leave (or Ctrl-D)
Ctrl-C stops an answer."""


@click.command(
    name="chat", cls=Verb, epilog="In the conversation: /reset, /system TEXT, /stats, /help, /quit."
)
@click.argument("recipe", required=False, shell_complete=complete_deployment)
@set_option
@options_of(RequestSettings)
def command(recipe: str | None, overrides: tuple[str, ...], settings: RequestSettings) -> None:
    """Talk to the running server of RECIPE; each line is a turn.

    With --url there is no RECIPE. Standard input may be a pipe. When the conversation gets too long for the model,
    its oldest turns are dropped, and a notice says so. Ctrl-C stops the answer, not the program.

    \b
    pipeline chat tiny-cpu
    pipeline chat --url gpu-host:8001 --tokenizer ./tokenizer
    pipeline chat --url http://gpu-host:8080/v1 --model llama
    """
    if (recipe is None) == (settings.url is None):
        raise click.UsageError("give a RECIPE, or the --url of a server")
    destination = find_destination(recipe, overrides, settings)
    with connected(destination, settings, raw=False) as client:
        code = _Chat(client, settings.system).run()
    if code:
        raise click.exceptions.Exit(code)


class _Chat:
    def __init__(self, client: AnyClient, system: str) -> None:
        from pipeline.client import Conversation

        self._client = client
        self._talk: Conversation = Conversation(system)
        self._figures = "no answer yet"
        self._failed = False

    def run(self) -> int:
        """Take turns until /quit or the end of the input; return the exit code."""
        interactive = sys.stdin.isatty()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # Each Ctrl-C stops an answer, not only the first one.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interactive:
            client = self._client
            # Fails now if no server is there.
            client.model()
            note(f"{client.model_name} on {client.url}; /help tells what there is")
        for line in _typed() if interactive else sys.stdin:
            text = line.strip()
            if text == "/quit":
                break
            if text.startswith("/"):
                self._obey(text)
            elif text:
                self._turn(text)
        return 1 if self._failed and not interactive else 0

    def _obey(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        match name:
            case "/reset":
                self._talk.turns.clear()
                reply = "forgotten"
            case "/system" if argument:
                self._talk.turns.clear()
                self._talk.system = argument.strip()
                reply = "forgotten; the system prompt is set"
            case "/system":
                reply = self._talk.system or "no system prompt"
            case "/stats":
                reply = self._figures
            case "/help":
                reply = _HELP
            case _:
                reply = f"no command {name}\n{_HELP}"
        click.echo(reply, err=True)

    def _turn(self, question: str) -> None:
        """Answer one question. A conversation that got too long for the model loses its oldest turns."""
        from pipeline.client import ClientError, Refused

        before = list(self._talk.turns)
        try:
            while True:
                try:
                    self._answer(question)
                    break
                except Refused:
                    if not self._talk.turns:
                        raise
                    del self._talk.turns[0]
            if dropped := len(before) + 1 - len(self._talk.turns):
                turns = "turn" if dropped == 1 else f"{dropped} turns"
                click.echo(f"[too long for the model: forgot the oldest {turns}]", err=True)
        except ClientError as error:
            self._talk.turns = before
            self._failed = True
            click.echo(printable(f"pipeline: {as_pipeline_error(error)}"), err=True)
        except KeyboardInterrupt:
            # Before the answer began.
            self._talk.turns = before
            click.echo("[stopped]", err=True)

    def _answer(self, question: str) -> None:
        """Print an answer and keep it, also the part of an answer that was stopped."""
        from pipeline.client import Cancelled

        with self._client.stream(self._talk.messages(question)) as stream:
            try:
                with _cancelled_by_ctrl_c(stream):
                    for chunk in stream:
                        print_answer(chunk.text)
            except Cancelled:
                click.echo(" [stopped]", nl=False, err=True)
            finally:
                if stream.text or stream.finish_reason:
                    click.echo()
                self._figures = stats_text(stream.stats, stream.finish_reason)
            self._talk.add(question, stream.text)


@contextlib.contextmanager
def _cancelled_by_ctrl_c(stream: AnyStream) -> Iterator[None]:
    """Let Ctrl-C cancel the stream, from a thread: raised in the midst of gRPC, an exception could break the call."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def cancel(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=stream.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _typed() -> Iterator[str]:
    """Yield lines from the keyboard, with a history; Ctrl-C drops a line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        # `input` then edits lines.
        importlib.import_module("readline")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            click.echo("\n/quit or Ctrl-D leaves", err=True)
        except EOFError:
            click.echo(err=True)
            return

"""The `pipeline` command: a group whose commands are loaded when they are asked for.

Each command is a module of this folder that holds one click command named `command`. Neither `pipeline --help` nor the
completion of a command's name imports one of them: they print the sentences of `_SECTIONS`. The light commands start
without torch, OpenVINO or Triton being imported.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from pipeline import __version__
from pipeline.cli.options import VerbGroup
from pipeline.errors import PipelineError
from pipeline.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from click.shell_completion import CompletionItem

_SECTIONS = {  # section -> command -> what it does
    "Make": {
        "init": "Write a recipe for a model of your own, with limits that fit.",
        "migrate": "Make a recipe for the LLM API from a recipe for engines, and say what changes.",
        "recipes": "List, show, copy and validate recipes.",
        "plan": "Say what a recipe comes to before anything is made: memory, steps, speed, cost.",
        "build": "Make all that a recipe needs, up to its Triton model repository.",
        "adopt": "Take what was built on another machine into the store.",
    },
    "Serve": {
        "serve": "Run a recipe's model on this machine: Triton and the OpenAI API, supervised.",
        "ps": "List what is served on this machine, with its state.",
        "logs": "Print the logs of a deployment's Triton, gateway and supervisor.",
        "stop": "End deployments, when their requests are completed.",
        "rollout": "Serve another package of a running deployment without failing a request.",
        "rollback": "Go back to the package that was served before.",
        "deploy": "Write files for other tools: a docker script, a compose file, a systemd unit.",
        "gateway": "Run the OpenAI API by itself, in front of servers here or elsewhere.",
    },
    "Ask": {
        "stream": "Ask one question, and print the answer as it comes.",
        "chat": "Talk to a running server, turn by turn.",
        "generate": "Ask many questions, several at a time, for whole answers.",
    },
    "Measure": {
        "bench": "Put load on a deployment: latencies, tokens a second, goodput against the SLO.",
        "compare": "Tell whether B is slower than A, or answers worse: runs, deployments or packages.",
        "tune": "Try values of a recipe on a real server, and write the better ones as a new recipe.",
    },
    "Watch": {
        "top": "Show running deployments live: streams, latencies, KV cache, queue, restarts.",
        "monitoring": "Write Prometheus rules and a Grafana dashboard, with the targets of a recipe's SLO.",
    },
    "Inspect": {
        "doctor": "Say what this machine has, and which recipes can be built and deployed here.",
        "accept": "Build, serve and check a recipe on this machine, and write one report to send back.",
        "rules": "List the rules that recipes and machines are held against, with reasons and sources.",
        "versions": "Print the releases of TensorRT-LLM that recipes may name, or check a combination.",
        "store": "Look after the artifacts that builds leave on disk.",
        "cache": "Look after the answers that a deployment's response cache keeps.",
    },
}
COMMANDS = {name: summary for commands in _SECTIONS.values() for name, summary in commands.items()}

# What a disk, a limit or a permission does to any command, wherever that is met.
_OF_THE_MACHINE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
}


class _Pipeline(VerbGroup):
    # click makes a plain failure of a reader that has left, so it is caught before.
    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with _quiet_without_reader():
            return super().make_context(*arguments, **extra)
        raise AssertionError("a reader that has left ends the command")

    def invoke(self, ctx: click.Context) -> Any:
        with _quiet_without_reader():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"pipeline.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
            ctx.fail(f"no command {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for section, commands in _SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(f"{name:<8}", summary) for name, summary in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=COMMANDS[name]) for name in COMMANDS if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]


_EPILOG = """
Options of all commands may stand before or behind the command.

\b
Completion in your shell: put one of these lines into its start-up file.
  bash   eval "$(_PIPELINE_COMPLETE=bash_source pipeline)"
  zsh    eval "$(_PIPELINE_COMPLETE=zsh_source pipeline)"
  fish   _PIPELINE_COMPLETE=fish_source pipeline | source
"""


@click.group(
    cls=_Pipeline,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="pipeline")
def cli() -> None:
    """Put a large language model behind NVIDIA Triton: one recipe in, streamed tokens out.

    \b
    pipeline build tiny-cpu
    pipeline serve tiny-cpu
    pipeline stream tiny-cpu "How do I reset my password?"
    """


def main() -> None:
    """Run a command line; print one message for every foreseen failure, a traceback with --debug only."""
    debug = "--debug" in sys.argv
    try:
        code: Any = cli.main(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except BrokenPipeError:
        sys.exit(_reader_left())
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except PipelineError as error:
        if debug:
            raise
        print(printable(f"pipeline: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if debug or error.errno not in _OF_THE_MACHINE:
            raise
        print(printable(f"pipeline: {error.filename or 'a file'}: {error.strerror}"), file=sys.stderr)
        sys.exit(PipelineError.exit_code)


def program() -> None:
    """Run the command line of this process.

    The first Ctrl-C raises KeyboardInterrupt, so that what was begun is undone; a second one ends the process at once.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)
    main()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _quiet_without_reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(_reader_left()) from None


def _reader_left() -> int:
    """Drop what is still to be printed, as for `| head`; the exit code of a program that SIGPIPE has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


if __name__ == "__main__":
    program()

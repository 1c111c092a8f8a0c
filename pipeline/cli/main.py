"""The `pipeline` command: a group whose verbs are loaded when they are asked for.

Each verb is a module of this folder that holds one click command named `command`. The light verbs therefore start
without torch, OpenVINO or Triton being imported.
"""

from __future__ import annotations

import errno
import importlib
import sys

import click

from pipeline import __version__
from pipeline.errors import PipelineError

VERBS = (
    "adopt",
    "build",
    "cache",
    "chat",
    "deploy",
    "doctor",
    "gateway",
    "generate",
    "plan",
    "recipes",
    "rules",
    "serve",
    "store",
    "stream",
    "versions",
)

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


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"pipeline.cli.{cmd_name}").command
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipeline")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def cli(debug: bool) -> None:
    """Put a large language model behind NVIDIA Triton: one recipe in, streamed tokens out."""


def main() -> None:
    """Entry point: one message for every foreseen failure, a traceback with --debug only."""
    debug = "--debug" in sys.argv
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except PipelineError as error:
        if debug:
            raise
        print(f"pipeline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if debug or error.errno not in _OF_THE_MACHINE:
            raise
        print(f"pipeline: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        sys.exit(PipelineError.exit_code)


if __name__ == "__main__":
    main()

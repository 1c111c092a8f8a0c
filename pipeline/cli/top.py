"""`pipeline top`: running deployments, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, complete_running, open_store
from pipeline.printable import json_text

if TYPE_CHECKING:
    from pipeline.serving.status import LiveView

# Where the output is no terminal.
_WIDTH = 160


@click.command(name="top", cls=Verb)
@click.argument("names", nargs=-1, metavar="[NAME]…", shell_complete=complete_running)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between updates.",
)
@click.option(
    "--once", is_flag=True, help="Print one table and end, as it does where the output is no terminal."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON array per update, each on a line of its own."
)
def command(names: tuple[str, ...], interval_s: float, once: bool, as_json: bool) -> None:
    """Show the running deployments of this machine, or those that are NAMEd, until q or Ctrl-C.

    \b
    pipeline top
    pipeline top tiny-cpu --once
    pipeline top --json --once | jq '.[].figures.ttft_p95_ms'

    Latencies and rates are those of the last ten seconds (with --once, of one interval), as the gateway measures them.
    A deployment without a gateway shows what its engine tells: streams, tokens, KV cache.
    """
    from pipeline.errors import UserError
    from pipeline.serving.status import LiveView

    view = LiveView(open_store().running, names)
    missing = sorted(set(names) - {deployment.name for deployment in view.look()})
    if missing:
        raise UserError(f"{', '.join(missing)}: not running here; pipeline top without a name shows what is")
    on_terminal = sys.stdout.isatty() and not as_json
    with contextlib.suppress(KeyboardInterrupt):
        if on_terminal and not once:
            _show(view, interval_s)
        while not on_terminal or once:
            time.sleep(interval_s)
            _print(view, as_json=as_json)
            if once or not as_json:
                break


def _print(view: LiveView, *, as_json: bool) -> None:
    from pipeline.cli.output import output_width, print_rich
    from pipeline.cli.render.top import top_table

    deployments = view.look()
    if as_json:
        click.echo(json_text([status.as_json() for status in deployments]))
    elif deployments:
        print_rich(top_table(deployments, output_width(_WIDTH)), width=_WIDTH)
    else:
        click.echo("nothing is running here; pipeline serve RECIPE starts a deployment")


def _show(view: LiveView, interval_s: float) -> None:
    """Draw the table again and again, on a screen of its own."""
    from rich.console import Console
    from rich.live import Live

    from pipeline.cli.render.top import top_table

    console = Console(highlight=False)
    with _keys() as quits, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(top_table(view.look(), console.width, hint="q ends"), refresh=True)
            if quits(interval_s):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits so many seconds for the key q, and returns whether it was pressed."""
    if not sys.stdin.isatty():
        yield _pause
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left_s)[0] and os.read(keyboard, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _pause(seconds: float) -> bool:
    """Wait without a keyboard, where nobody can press q."""
    time.sleep(seconds)
    return False

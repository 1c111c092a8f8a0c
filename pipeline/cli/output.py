"""Output that all commands share: notes, progress, JSON, columns, short paths.

Results go to standard output, all else to standard error. `-q` leaves out notes and progress, `-v` writes out paths and
what the parts log, `--no-color` (or $NO_COLOR, https://no-color.org) leaves out colours.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.printable import json_text, printable

if TYPE_CHECKING:
    from pipeline.progress import Progress

QUIET, VERBOSE = "pipeline.quiet", "pipeline.verbose"  # keys of click's `Context.meta`


def is_quiet() -> bool:
    """Whether `-q` was given to the command that runs."""
    return _has(QUIET)


def note(text: str) -> None:
    """Print a line to standard error, unless `-q` was given."""
    if not is_quiet():
        click.echo(printable(text), err=True)


def reporter(*, silent: bool = False) -> Progress:
    """Make the progress reporter of a command: live on a terminal, else plain lines; nothing if silent or with -q."""
    from pipeline import progress

    return progress.Silent() if silent or is_quiet() else progress.for_stream()


def short_path(path: Path, store: Path | None = None) -> str:
    """Shorten a path for people to read: `~` for the home folder; whole with `-v`.

    Args:
        store: the root of a store that the user named (`--store`); what lies in it is written relative to it.
    """
    if _has(VERBOSE):
        return str(path)
    if store is not None and path.is_relative_to(store):
        return str(path.relative_to(store))
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and home != Path("/") else str(path)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    click.echo(json_text(value, indent=2))


def print_values(values: Mapping[str, Any], *, as_json: bool, form: str = "{}: {}") -> None:
    """Print names and values, a line each, or as JSON."""
    if as_json:
        print_json(values)
    else:
        click.echo("\n".join(form.format(name, value) for name, value in values.items()))


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters; where it is cut, the last is an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length as aligned columns; on a terminal, lines that are too long end with an ellipsis."""
    for line in aligned(rows):
        print_cut(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each of some rows of equal length, their cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def print_cut(line: str) -> None:
    """Print a line; on a terminal, a line that is too long ends with an ellipsis."""
    click.echo(cut(printable(line, lines=False), output_width(sys.maxsize)))


def output_width(otherwise: int) -> int:
    """Return the width of the terminal in columns; `otherwise` if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def print_rich(*renderables: Any, width: int = 160) -> None:
    """Print tables of rich, without blanks at the ends of lines.

    Args:
        width: columns where standard output is no terminal.
    """
    from rich.console import Console

    console = Console(width=output_width(width), highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    text = printable(captured.get().strip("\n"), colours=True)
    click.echo("\n".join(line.rstrip() for line in text.split("\n")))


def print_answer(text: str) -> None:
    """Print a piece of a model's answer: as it is, but on a terminal without what would control that."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def _has(key: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(key))

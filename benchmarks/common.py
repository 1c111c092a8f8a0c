"""Parts of several benchmarks: environments of peers, programs beside this one, ways that take turns, tables."""

from __future__ import annotations

import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pipeline.serving.served import ServedDeployment
from pipeline.store import Store

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = Path.home() / ".cache" / "pipeline" / "benchmarks"

Way = TypeVar("Way")
Sample = TypeVar("Sample")


def peer_environment(kind: str, environments: Path = ENVIRONMENTS) -> Path:
    """Make the virtual environment of a peer, of benchmarks/peers/requirements-KIND.txt.

    Args:
        kind: Name of the peer.
        environments: Folder below which it is made, on the first run.

    Returns:
        The folder of its programs.
    """
    requirements, folder = HERE / "peers" / f"requirements-{kind}.txt", environments / kind
    made = folder / "ready"
    if not made.is_file() or made.read_text() != requirements.read_text():
        print(f"installing {kind} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        # Options that pip takes on its command line only; the file names them in its comment.
        flags = [flag for flag in ("--no-deps", "--no-cache-dir") if flag in requirements.read_text()]
        subprocess.run([folder / "bin" / "pip", "install", "-q", *flags, "-r", requirements], check=True)
        made.write_text(requirements.read_text())
    return folder / "bin"


@contextmanager
def running(program: str | Path, *arguments: object) -> Iterator[tuple[int, int]]:
    """Run a Python program beside this one, until the block ends.

    Args:
        program: Its text, or its file. It prints its port when it is ready.
        *arguments: Arguments of its command line.

    Yields:
        Its port and process id.
    """
    source = [str(program)] if isinstance(program, Path) else ["-c", program]
    command = [sys.executable, *source, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it was started with a pipe"
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


@contextmanager
def serving(argv: Sequence[str], name: str, store: Store, logs: Path) -> Iterator[ServedDeployment]:
    """Run `pipeline serve` until the block ends.

    Args:
        argv: Arguments: recipe, overrides, options.
        name: Name of the recipe.
        store: Store that has the package, or gets it.
        logs: Folder for its output.
    """
    served = ServedDeployment.start((*argv, *store.argv), name, store.running, logs, deadline_s=300)
    try:
        yield served
    finally:
        served.stop()


def in_turns(
    ways: Mapping[str, Way], measure: Callable[[Way], Sample], rounds: int, *, warm_up: int = 2
) -> dict[str, list[Sample]]:
    """Measure several ways round by round, so that other work on the machine meets all alike.

    Args:
        ways: Name -> way.
        measure: Takes one sample of a way.
        rounds: Samples of each.
        warm_up: Rounds before that, which do not count.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        # Forwards and backwards, so that no way always follows the same one.
        for name in ways if number % 2 == 0 else reversed(list(ways)):
            sample = measure(ways[name])
            if number >= 0:
                samples[name].append(sample)
    return samples


def paired(
    ours: Sequence[Sample], theirs: Sequence[Sample], compare: Callable[[Sample, Sample], float]
) -> float:
    """Median of a comparison over the pairs of samples of a round, which met the same load."""
    return statistics.median(compare(run, other) for run, other in zip(ours, theirs, strict=True))


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Render a Markdown table that can be read in a terminal, too: all columns but the first are flush right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"| {' | '.join((row[0].ljust(widths[0]), *padded))} |")
    rule = " | ".join(("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])))
    return "\n".join((lines[0], f"| {rule} |", *lines[1:]))


def or_empty(value: float | None, form: str) -> str:
    """Format a number; empty for None."""
    return "" if value is None else form.format(value)

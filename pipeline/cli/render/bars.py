"""Memory of a GPU as a bar: one letter a group, filled or not by what the terminal can show."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from pipeline.plan.memory import MemoryLine, RankMemory

# Group -> (colour, mark where there are no colours)
_LOOKS: Mapping[str, tuple[str, str]] = {
    "runtime": ("bright_black", "r"),
    "weights": ("blue", "w"),
    "draft": ("cyan", "d"),
    "activations": ("yellow", "a"),
    "communication": ("magenta", "c"),
    "kv_cache": ("green", "k"),
    "graphs": ("red", "g"),
}
_NAMES: Mapping[str, str] = {"kv_cache": "KV cache", "graphs": "CUDA graphs", "draft": "weights of the draft"}
_PLAIN_WIDTH = 100  # columns where the output is no terminal


@dataclass(frozen=True, slots=True)
class Look:
    """What the output can show."""

    width: int  # columns
    colour: bool
    cuts: bool = False  # whether lines that are longer than that end with an ellipsis

    @classmethod
    def of_output(cls) -> Look:
        """Of standard output: colours on a terminal, and its width."""
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else _PLAIN_WIDTH
        return cls(width, colour=is_terminal and not os.environ.get("NO_COLOR"), cuts=is_terminal)


def bar(rank: RankMemory, cells: int, look: Look) -> str:
    """`[rrwwwwwwkkkkkkkkkk..]`: a cell is an even share of the GPU; dots are free, `!` is what does not fit.

    Cells are rounded so that the bar as a whole is right; a group that is there has at least one.
    """
    scale = cells / max(rank.capacity, rank.used)
    drawn = ""
    done = 0.0
    for group, size in shares(rank.lines):
        done += size * scale
        count = max(1, round(done) - _length(drawn))
        drawn += _cells(group, count, look)
    free = max(0, cells - _length(drawn))
    full = round(rank.capacity * scale)
    return f"[{drawn}{'.' * free}]" if full >= cells else f"[{drawn}] !"


def shares(lines: Sequence[MemoryLine]) -> list[tuple[str, int]]:
    """Group -> bytes, in load order; weights of a draft are a group of their own."""
    found: dict[str, int] = {}
    for line in lines:
        group = "draft" if line.group == "weights" and line.role == "draft" else line.group
        found[group] = found.get(group, 0) + line.bytes
    return [(group, size) for group, size in found.items() if size]


def legend(ranks: Sequence[RankMemory], look: Look) -> str:
    """What the cells mean, of the groups that there are."""
    groups = dict.fromkeys(group for rank in ranks for group, _ in shares(rank.lines))
    return "  ".join(f"{_cells(group, 1, look)} {_NAMES.get(group, group)}" for group in groups)


def _cells(group: str, count: int, look: Look) -> str:
    colour, mark = _LOOKS[group]
    return click.style("█" * count, fg=colour) if look.colour else mark * count


def _length(drawn: str) -> int:
    return len(click.unstyle(drawn))

"""Memory of a plan: a table, a bar for each GPU, and a few sentences."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

from pipeline.cli.output import cut
from pipeline.cli.render.speed import wrapped
from pipeline.plan.memory import Alternative, MemoryLine, MemoryPlan, RankMemory

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
class OutputStyle:
    """Abilities of the output."""

    width: int  # columns
    colour: bool
    cuts: bool = False  # whether lines that are longer than that end with an ellipsis

    @classmethod
    def of_output(cls) -> OutputStyle:
        """Look at standard output: colours on a terminal, and its width."""
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else _PLAIN_WIDTH
        return cls(width, colour=is_terminal and not os.environ.get("NO_COLOR"), cuts=is_terminal)


def bar(rank: RankMemory, cells: int, look: OutputStyle) -> str:
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
    """List groups with their bytes, in load order; weights of a draft are a group of their own."""
    sizes: dict[str, int] = {}
    for line in lines:
        group = "draft" if line.group == "weights" and line.role == "draft" else line.group
        sizes[group] = sizes.get(group, 0) + line.bytes
    return [(group, size) for group, size in sizes.items() if size]


def legend(ranks: Sequence[RankMemory], look: OutputStyle) -> str:
    """Explain the cells of the groups that there are."""
    groups = dict.fromkeys(group for rank in ranks for group, _ in shares(rank.lines))
    return "  ".join(f"{_cells(group, 1, look)} {_NAMES.get(group, group)}" for group in groups)


def _cells(group: str, count: int, look: OutputStyle) -> str:
    colour, mark = _LOOKS[group]
    return click.style("█" * count, fg=colour) if look.colour else mark * count


def _length(drawn: str) -> int:
    return len(click.unstyle(drawn))


_GIB = 2**30
_LINE_NAMES = {"kv_cache": "KV cache", "runtime": "", "graphs": ""}


def memory_lines(memory: MemoryPlan, look: OutputStyle, doubts: Sequence[str] = ()) -> Iterator[str]:
    """Yield the whole plan; ranks that hold the same are shown once. `doubts` are about the models."""
    spec, kinds = memory.spec, distinct(memory.ranks)
    share = f", {spec.fraction:.0%} of what is left for KV caches" if spec.is_gpu else ""
    unit, name = _unit(memory)
    yield f"memory of {_devices(memory)}{share}, {name}"
    yield ""
    yield from _table(memory, kinds, look, unit)
    yield ""
    for rank, same in kinds:
        label = f"  {_label(rank, same, spec.is_gpu):<10}"
        figures = f" {rank.used / unit:.1f} of {rank.capacity / unit:.1f}"
        yield label + bar(rank, max(10, look.width - len(label) - len(figures) - 4), look) + figures
    yield f"  {'':<10}{legend(memory.ranks, look)}"
    yield ""
    yield from _capacity(memory)
    for warning in (*doubts, *memory.warnings):
        yield from wrapped(f"warning: {warning}", look.width)


def alternative_lines(alternatives: Sequence[Alternative]) -> Iterator[str]:
    """Yield changes that would hold more, each with its figures."""
    yield "what would hold more"
    yield ""
    width = max(len(alternative.command) for alternative in alternatives)
    for alternative in alternatives:
        plan = alternative.plan
        weights = max(rank.group("weights") for rank in plan.ranks) / _GIB
        yield (
            f"  {alternative.command:<{width}}  {plan.verdict}: {plan.sequences} x {plan.spec.sequence_tokens} tokens "
            f"on {_devices(plan)}, {weights:.1f} GiB of weights on each"
        )


def distinct(ranks: Sequence[RankMemory]) -> list[tuple[RankMemory, int]]:
    """List ranks that differ, each with the number of ranks that hold the same."""
    groups: list[tuple[RankMemory, int]] = []
    for rank in ranks:
        if groups and groups[-1][0].lines == rank.lines:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append((rank, 1))
    return groups


def _label(rank: RankMemory, same: int, is_gpu: bool) -> str:
    if not is_gpu:
        return "memory"
    return f"GPU {rank.index}" if same == 1 else f"GPU {rank.index}-{rank.index + same - 1}"


def _unit(memory: MemoryPlan) -> tuple[int, str]:
    """GiB, or MiB where all of it is small."""
    return (_GIB, "GiB") if max(rank.used for rank in memory.ranks) > _GIB else (_GIB >> 10, "MiB")


def _devices(memory: MemoryPlan) -> str:
    return f"{len(memory.ranks)} x {memory.spec.device}" if memory.spec.is_gpu else memory.spec.device


def _table(
    memory: MemoryPlan, kinds: Sequence[tuple[RankMemory, int]], look: OutputStyle, unit: int
) -> Iterator[str]:
    columns = "".join(f"{_label(rank, same, memory.spec.is_gpu):>9}" for rank, same in kinds)
    yield f"  {'':<22}{columns}"
    rows = dict.fromkeys(line.key for rank, _ in kinds for line in rank.lines)
    for key in rows:
        lines = [next((line for line in rank.lines if line.key == key), None) for rank, _ in kinds]
        first = next(line for line in lines if line is not None)
        cells = "".join(f"{line.bytes / unit:>9.2f}" if line is not None else f"{'-':>9}" for line in lines)
        yield _cut(f"  {_name(first):<22}{cells}  {first.formula}", look)
    cells = "".join(f"{rank.headroom / unit:>9.2f}" for rank, _ in kinds)
    yield _cut(f"  {'left':<22}{cells}  what nothing is planned for", look)


def _name(line: MemoryLine) -> str:
    """`target attention`"""
    group = _LINE_NAMES.get(line.group, line.group)
    return " ".join(part for part in (line.role, line.name or group) if part)


def _capacity(memory: MemoryPlan) -> Iterator[str]:
    spec = memory.spec
    costs = " + ".join(f"{size / 1024:g} KiB ({role})" for role, size in memory.token_bytes.items())
    caches = "each KV cache" if len(memory.token_bytes) > 1 else "the KV cache"
    caches += f" of each of {spec.request_groups} GPUs" if spec.request_groups > 1 else ""
    blocks = f"{memory.blocks:,} blocks of {memory.block_tokens}"
    yield f"  {caches} holds {memory.tokens:,} tokens: {blocks}, {costs} a token"
    yield (
        f"  whole sequences of {spec.sequence_tokens:,} tokens at a time: {memory.sequences:,}; "
        f"limits.max_concurrency is {spec.concurrency:,}"
    )
    if memory.fullest_named:
        yield f"  decided by the room on {memory.fullest_named}, the least"
    if spec.adapters is not None and spec.is_gpu:
        host = memory.adapter_host_bytes / _GIB
        yield (
            f"  adapters held at a time: {spec.adapters.device:,} on each GPU, {spec.adapters.host:,} in the host's "
            f"memory, which takes {host:.1f} GiB"
        )
    target = spec.models[0]
    windowed = sum(1 for window in target.sizes.windows if window)
    if windowed and spec.is_gpu and not target.windows:
        yield (
            f"  {windowed} of {target.sizes.layers} layers see a window only; pages beyond it are kept, as "
            "kv_cache_config.max_attention_window is not set"
        )


def _cut(line: str, look: OutputStyle) -> str:
    return cut(line, look.width) if look.cuts else line

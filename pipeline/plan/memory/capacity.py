"""From a demand to what fits: the memory of every rank, and the tokens and sequences that the KV caches hold.

All ranks of all models work on the same sequences, so the smallest rank decides how many tokens there are. Draft and
target share what weights and buffers of both leave (`planning.memory_fractions` turns that into fractions for engines
that load one after the other).

Estimates: capacities are those that drivers report; the constants of `contracts/data/engine_memory.yaml` were measured
by others on the PyTorch backend, and are too large rather than too small for engines. `accuracy` compares them with
published measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.plan.memory import kv
from pipeline.plan.memory.demand import Demand, ModelNeed
from pipeline.plan.memory.line import Line
from pipeline.plan.memory.rank import Loaded, cache_lines, load
from pipeline.plan.memory.weights import mxfp4_padding

Verdict = Literal["fits", "fits in part", "does not fit"]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One GPU, full."""

    index: int
    capacity: int
    lines: tuple[Line, ...]  # in load order

    @property
    def used(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def headroom(self) -> int:
        """What nothing is planned for; negative: so much is missing."""
        return self.capacity - self.used

    def group(self, name: str, role: str | None = None) -> int:
        """Bytes of a group of lines, such as "weights"."""
        return sum(line.bytes for line in self.lines if line.group == name and role in (None, line.role))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a demand comes to."""

    demand: Demand
    ranks: tuple[RankMemory, ...]
    tokens: int  # that the KV cache of each model holds
    block_tokens: int

    @property
    def blocks(self) -> int:
        return self.tokens // self.block_tokens

    @property
    def sequences(self) -> int:
        """Requests at the recipe's lengths that are held from beginning to end: the largest safe concurrency."""
        each = math.ceil(self.demand.sequence_tokens / self.block_tokens)
        return self.blocks // each

    @property
    def concurrency(self) -> int:
        """Of those, as many as the recipe lets run at a time."""
        return min(self.sequences, self.demand.concurrency)

    @property
    def verdict(self) -> Verdict:
        """In part: fewer whole sequences than the recipe's concurrency, so that long requests wait for each other."""
        if self.sequences < 1:
            return "does not fit"
        return "fits" if self.sequences >= self.demand.concurrency else "fits in part"

    @property
    def tightest(self) -> RankMemory:
        """The rank with the most on it besides KV caches."""
        return max(self.ranks, key=lambda rank: rank.used - rank.group("kv_cache"))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of these figures is counted, and was compared with no measurement."""
        return tuple(warning for need in self.demand.models for warning in _warnings(need))

    @property
    def token_bytes(self) -> dict[str, int]:
        """Role -> bytes of a token's keys and values on a rank of the first stage."""
        return {need.role: kv.token_bytes(need) for need in self.demand.models}


def _warnings(need: ModelNeed) -> Iterator[str]:
    if need.sizes.latent is not None:
        yield (
            f"{need.role}: the KV cache of multi-head latent attention is counted from its sizes; no measurement was "
            "at hand to compare it with"
        )
    if need.sizes.experts:
        yield (
            f"{need.role}: buffers of models with experts are estimated; no measurement was at hand to compare them "
            "with"
        )
    padding = mxfp4_padding(need)
    if padding:
        yield (
            f"{need.role}: kernels may round the sizes of experts in MXFP4 up, which takes up to "
            f"{padding / 2**30:.1f} GiB more on a GPU"
        )


def plan_memory(demand: Demand) -> MemoryPlan:
    """The answer to a demand."""
    loaded = [load(demand, index) for index in range(demand.ranks)]
    block = math.lcm(*(need.block_tokens for need in demand.models))
    holding = [
        rank for rank in loaded if any(rank.token_bytes.values())
    ]  # stages beyond the layers hold none
    tokens = max(0, min(_tokens(rank) for rank in holding)) // block * block
    ranks = tuple(
        RankMemory(rank.index, demand.capacity, (*rank.lines, *cache_lines(demand, rank, tokens)))
        for rank in loaded
    )
    return MemoryPlan(demand, ranks, tokens, block)


def _tokens(rank: Loaded) -> int:
    return rank.pool // sum(rank.token_bytes.values())

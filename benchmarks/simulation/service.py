"""Abilities of a replica: the seconds of a step of its engine, its slots, and the pages of its KV cache.

A step computes one token of each sequence that generates, and pieces of prompts beside them. Its cost is

    matrices, activations and exchange     a function of sequences and tokens of prompts
    attention                              an amount for each token that is read, and for each pair of tokens
    the host's own part                    added, or hidden behind the step before

as `pipeline plan` has it: nothing here is a second model of a GPU. Not in it: drafts, pipeline parallelism, host memory
for pages, and the way through the network, gateway and Triton (some milliseconds, see the page of measurements).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pipeline.contracts.models import known_model
from pipeline.plan.memory import deployment_spec, plan_memory
from pipeline.plan.performance.calibration import recipe_model
from pipeline.plan.performance.engine import EngineSpeed
from pipeline.plan.performance.roofline import EngineStep
from pipeline.plan.plan import TARGET
from pipeline.recipe import load_recipe

# Tokens of prompts are rounded up to this, so that the time of a step is computed once for each width.
_WIDTH = 32


class StepTimes:
    """Seconds of a step of an engine."""

    def __init__(
        self,
        work: Callable[[int, int], float],
        *,
        read_s: float = 0.0,
        pair_s: float = 0.0,
        host_s: float = 0.0,
        hides_host: bool = False,
        prompt_s: float = 0.0,
    ) -> None:
        """
        Args:
            work: Seconds of all but attention, from the sequences that generate and the tokens of prompts.
            read_s: Seconds for each token whose keys and values are read.
            pair_s: Seconds for each pair of a token with one before it.
            host_s: Seconds of the host for a step.
            hides_host: Whether the host works beside the step before, so that only what is longer shows.
            prompt_s: Seconds once for prompts that are begun together.
        """
        self._work, self._known = work, dict[tuple[int, int], float]()
        self._read_s, self._pair_s = read_s, pair_s
        self._added_s, self._least_s = (0.0, host_s) if hides_host else (host_s, 0.0)
        self.prompt_s = prompt_s

    @classmethod
    def of(cls, engine: EngineSpeed) -> StepTimes:
        """Take times from a model of `pipeline plan`; attention is linear there, and two steps give its constants."""
        constants = engine.efficiency
        bare = replace(engine, efficiency=replace(constants, step_s=0.0))

        def work(sequences: int, tokens: int) -> float:
            time = bare.step(EngineStep(sequences, 0, 1, tokens))
            return time.total - time.attention

        pair_s = bare.step(EngineStep(prompt=1000)).attention / 500_000
        read_s = bare.step(EngineStep(1, 1000)).attention / 1000 - pair_s
        return cls(
            work,
            read_s=read_s,
            pair_s=pair_s,
            host_s=constants.step_s,
            hides_host=constants.hides_step,
            prompt_s=constants.prompt_s,
        )

    @classmethod
    def measured(cls, tokens_per_s: Mapping[int, float], ttft_s: float) -> StepTimes:
        """Take times from measured streams, on a straight line between them.

        Args:
            tokens_per_s: Number of streams -> tokens a second of all together.
            ttft_s: TTFT of one stream with a short prompt.
        """
        points = sorted((streams, streams / rate) for streams, rate in tokens_per_s.items())
        lines, alone = list(pairwise(points)), points[0][1]

        def work(sequences: int, tokens: int) -> float:
            del tokens
            (fewer, short), (more, long) = next(
                (ends for ends in lines if sequences <= ends[1][0]), lines[-1]
            )
            return short + (sequences - fewer) / (more - fewer) * (long - short)

        return cls(work, prompt_s=max(0.0, ttft_s - alone))

    def decode(self, sequences: int, context: float) -> float:
        """Seconds of a step that only generates.

        Args:
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
        """
        return self.mixed(sequences, context, 0, 0.0, 0.0)

    def mixed(self, sequences: int, context: float, tokens: int, read: float, pairs: float) -> float:
        """Seconds of a step with pieces of prompts.

        Args:
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
            tokens: Tokens of the prompts' pieces.
            read: Tokens of these prompts that came before the pieces.
            pairs: Pairs of a token of a piece with one before it.
        """
        width = -(-tokens // _WIDTH) * _WIDTH
        base = self._known.get((sequences, width))
        if base is None:
            base = self._known[sequences, width] = self._work(sequences, width)
        device = base + self._read_s * (context + read) + self._pair_s * (context + pairs)
        return self._added_s + max(self._least_s, device)


@dataclass(frozen=True)
class Service:
    """One replica.

    Attributes:
        name: Name of the deployment.
        times: Times of its engine's steps.
        slots: Requests that it takes at a time.
        blocks: Pages of its KV cache.
        block_tokens: Tokens of a page.
        step_tokens: Most tokens of a step.
        max_prompt: Tokens of the longest prompt.
        gpus: GPUs of a replica.
        weight_bytes: Bytes of weights that it loads before it is ready.
        ttft_s: Target of the recipe's SLO, for the 95th percentile.
    """

    name: str
    times: StepTimes
    slots: int
    blocks: int
    block_tokens: int = 32
    step_tokens: int = 8192
    max_prompt: int = 8192
    gpus: int = 1
    weight_bytes: float = 0.0
    ttft_s: float = 1.0

    def prompt_s(self, tokens: int, cached: int = 0, sequences: int = 0, context: float = 0.0) -> float:
        """Seconds of a prompt that shares its steps with sequences that generate.

        Args:
            tokens: Tokens of the prompt.
            cached: Tokens of these that the KV cache has.
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
        """
        seconds, done = self.times.prompt_s, cached
        while done < tokens:
            piece = min(tokens - done, self.step_tokens - sequences)
            seconds += self.times.mixed(sequences, context, piece, done, piece * (done + piece / 2))
            done += piece
        return seconds

    def requests_per_s(self, prompt: float, answer: float, cached: float) -> float:
        """Requests a second of a replica whose slots are all taken all the time.

        Args:
            prompt: Mean tokens of a prompt.
            answer: Mean tokens of an answer.
            cached: Mean tokens of a prompt that the KV cache has.
        """
        context = self.slots * (prompt + answer / 2)
        steps = answer * self.times.decode(self.slots, context) / self.slots
        beside = self.prompt_s(round(prompt), round(cached), self.slots, context)
        return 1 / (steps + beside - self.times.decode(self.slots, context))


def recipe_service(name: str) -> Service:
    """Make the replica of a packaged recipe on a GPU by `pipeline plan`, without its draft.

    The sizes of its models are among the data, so that nothing is downloaded.
    """
    recipe = load_recipe(name)
    alone = recipe.model_copy(update={"draft": None})
    sizes = known_model(str(alone.model.source).removeprefix("hf:"))
    assert sizes is not None, f"the sizes of {alone.model.source} are among the data"
    spec = deployment_spec(alone, {TARGET: sizes})
    assert spec is not None, "it has all models"
    memory, (engine,) = plan_memory(spec), recipe_model(alone, spec, None).engines()
    return Service(
        name=name,
        times=StepTimes.of(engine),
        slots=min(alone.limits.max_concurrency, memory.blocks),
        blocks=memory.blocks,
        block_tokens=memory.block_tokens,
        step_tokens=engine.step_tokens,
        max_prompt=alone.limits.max_input_tokens,
        gpus=spec.ranks,
        weight_bytes=sum(rank.group("weights") for rank in memory.ranks),
        ttft_s=(alone.slo.ttft_p95_ms or 1000.0) / 1e3,
    )


def cpu_service(rows: Sequence[Mapping[str, Any]], *, leave_out: int | None = None) -> Service:
    """Make the replica of the `cpu` engine, from rows of `python benchmarks/cpu_engine.py` without a draft.

    Args:
        rows: Rows of its JSON.
        leave_out: Streams of the row that is not used, to be compared with.
    """
    taken = {int(row["streams"]): row for row in rows if row["way"] == "no draft"}
    rates = {streams: row["tokens_per_second"] for streams, row in taken.items() if streams != leave_out}
    return Service(
        name="tiny-cpu",
        times=StepTimes.measured(rates, taken[1]["ttft_ms"] / 1e3),
        slots=16,
        blocks=16 * 24,
        max_prompt=512,
        gpus=0,
        ttft_s=0.1,
    )

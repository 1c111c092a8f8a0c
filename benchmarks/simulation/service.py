"""Replicas of the simulated fleet: abilities of engines, by `pipeline plan` or as they were measured.

Steps cost what `pipeline plan` has for them, and its scheduler is the one that runs here: nothing here is a second
model of a GPU. Not in it: drafts, host memory for pages, and the way through the network, gateway and Triton (some
milliseconds, see the page of measurements).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeline.contracts.models import known_model
from pipeline.plan.memory import deployment_spec, plan_memory
from pipeline.plan.performance.calibration import recipe_model
from pipeline.plan.performance.served_engine import ServedEngine
from pipeline.plan.performance.step_times import StepTimes
from pipeline.plan.plan import TARGET
from pipeline.recipe import load_recipe


def measured_times(tokens_per_s: Mapping[int, float], ttft_s: float) -> StepTimes:
    """Take times of steps from measured streams, on a straight line between them.

    Args:
        tokens_per_s: Number of streams -> tokens a second of all together.
        ttft_s: TTFT of one stream with a short prompt.
    """
    points = sorted((streams, streams / rate) for streams, rate in tokens_per_s.items())
    lines, alone = list(pairwise(points)), points[0][1]

    def work(sequences: int, tokens: int, longest: int) -> float:
        del tokens, longest
        (fewer, short), (more, long) = next((ends for ends in lines if sequences <= ends[1][0]), lines[-1])
        return short + (sequences - fewer) / (more - fewer) * (long - short)

    return StepTimes(work, prompt_s=max(0.0, ttft_s - alone))


def recipe_service(name: str) -> ServedEngine:
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
    return ServedEngine(
        name=name,
        times=engine.times,
        slots=min(alone.limits.max_concurrency, memory.blocks),
        blocks=memory.blocks,
        block_tokens=memory.block_tokens,
        step_tokens=engine.step_tokens,
        max_prompt=alone.limits.max_input_tokens,
        gpus=spec.ranks,
        weight_bytes=sum(rank.group("weights") for rank in memory.ranks),
        ttft_s=(alone.slo.ttft_p95_ms or 1000.0) / 1e3,
    )


def cpu_service(rows: Sequence[Mapping[str, Any]], *, leave_out: int | None = None) -> ServedEngine:
    """Make the replica of the `cpu` engine, from rows of `python benchmarks/cpu_engine.py` without a draft.

    Args:
        rows: Rows of its JSON.
        leave_out: Streams of the row that is not used, to be compared with.
    """
    taken = {int(row["streams"]): row for row in rows if row["way"] == "no draft"}
    rates = {streams: row["tokens_per_second"] for streams, row in taken.items() if streams != leave_out}
    return ServedEngine(
        name="tiny-cpu",
        times=measured_times(rates, taken[1]["ttft_ms"] / 1e3),
        slots=16,
        blocks=16 * 24,
        max_prompt=512,
        gpus=0,
        ttft_s=0.1,
    )

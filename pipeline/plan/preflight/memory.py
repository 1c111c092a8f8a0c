"""Rules about the memory of GPUs: what the memory model says of a recipe, its models, and what will be written.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from pipeline.errors import UserError
from pipeline.plan.memory import MemoryPlan, StepLimits, demand_of, plan_memory
from pipeline.plan.preflight.context import Subject
from pipeline.plan.preflight.finding import Check, Said

GPU, TENSOR, CONCURRENCY = "runtime.gpu", "runtime.tensor_parallel", "limits.max_concurrency"


def _fits(subject: Subject) -> Iterator[Said]:
    memory = _planned(subject)
    if memory is None or memory.verdict != "does not fit":
        return
    short, longest = -memory.tightest.headroom, memory.demand.sequence_tokens
    if short > 0:
        problem = (
            f"lacks {short / 2**30:.1f} GiB for weights and buffers alone, on each of {len(memory.ranks)}"
        )
    else:
        problem = f"holds {memory.tokens} tokens in its KV cache, and one request may have {longest}"
    keys = (GPU, TENSOR, "quantization.format", "limits.max_input_tokens")
    yield Said(keys, problem, f"{_plan(subject)} names what would fit")


def _concurrency(subject: Subject) -> Iterator[Said]:
    memory = _planned(subject)
    if memory is not None and memory.verdict == "fits in part":
        held, longest = memory.sequences, memory.demand.sequence_tokens
        yield Said(
            (CONCURRENCY, GPU, TENSOR),
            f"is more than the {held} requests of {longest} tokens that the KV cache holds at a time",
            f"{held}, or what {_plan(subject)} names",
        )


def _plan(subject: Subject) -> str:
    return shlex.join(("pipeline", "plan", *subject.recipe.words))


def _planned(subject: Subject) -> MemoryPlan | None:
    """None: sizes, GPU or types are not known, which other rules say where it matters."""
    sizes = {model.role: model.sizes for model in subject.models if model.sizes is not None}
    emitted = subject.emitted
    steps: Mapping[str, StepLimits] = emitted.steps if emitted is not None else {}
    try:
        demand = demand_of(subject.recipe, sizes, steps)
    except UserError:
        return None
    return plan_memory(demand) if demand is not None else None


CHECKS: Mapping[str, Check] = {"memory.fits": _fits, "memory.concurrency": _concurrency}

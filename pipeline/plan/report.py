"""The forecast of a recipe before anything is made: the object that `pipeline plan` prints.

It holds the very `Plan` that `build` executes, and beside it what that would come to: memory, latency, findings. What
could not be known is None, with the reason in `unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.plan.memory import Alternative, MemoryPlan
from pipeline.plan.performance import Forecast
from pipeline.plan.plan import Plan
from pipeline.plan.preflight import Finding
from pipeline.recipe import Recipe


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Plan, memory, speed and findings of one recipe on one kind of GPU, or on this machine (`cpu`)."""

    recipe: Recipe
    findings: tuple[Finding, ...]  # of preflight, the gravest first
    plan: Plan | None = None
    memory: MemoryPlan | None = None
    alternatives: tuple[Alternative, ...] = ()  # where it does not fit, or not at its concurrency
    performance: Forecast | None = None
    seen: Mapping[str, str] = field(default_factory=dict)  # role -> where its sizes are from, and its weights
    doubts: tuple[str, ...] = ()  # about what is counted of the models
    # "plan", "memory", "performance" -> why it is not known
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on figures without a measurement to compare them with: memory first, then speed."""
        memory = self.memory.warnings if self.memory is not None else ()
        performance = self.performance.warnings if self.performance is not None else ()
        return (*self.doubts, *memory, *performance)

    @property
    def refused(self) -> bool:
        """Whether a build would be refused, or its result could not run."""
        no_room = self.memory is not None and self.memory.verdict == "does not fit"
        return no_room or any(finding.stops for finding in self.findings)

    @property
    def meets_slo(self) -> bool | None:
        """Whether the forecast meets the SLO; None if the recipe has none, or it cannot be told."""
        return self.performance.meets_slo if self.performance is not None else None

    @property
    def verdict(self) -> str:
        """One sentence on memory, SLO and preflight.

        "fits: 66 x 9221 tokens at a time, 64 wanted; meets the SLO"
        """
        words = [_memory_words(self.memory)]
        if self.meets_slo is not None:
            missed = "does not meet the SLO with so many requests of such lengths"
            words.append(f"meets the SLO{self._if_formula_holds}" if self.meets_slo else missed)
        errors = sum(finding.stops for finding in self.findings)
        if errors:
            words.append(f"refused by {errors} rule{'s' if errors > 1 else ''} of preflight")
        return "; ".join(words)

    @property
    def _if_formula_holds(self) -> str:
        late = self.recipe.slo.ttft_p95_ms is not None and self.recipe.limits.max_concurrency > 1
        return ", if the formula for first tokens under load holds" if late else ""


def _memory_words(memory: MemoryPlan | None) -> str:
    if memory is None:
        return "whether it fits is not known"
    spec = memory.spec
    held = f"{memory.sequences} x {spec.sequence_tokens} tokens at a time, {spec.concurrency} wanted"
    short = -memory.tightest.headroom
    if memory.verdict == "does not fit" and short > 0:
        place = "on a GPU" if spec.is_gpu else "for this machine's memory"
        return f"does not fit: {short / 2**30:.1f} GiB too much {place} before any KV cache"
    return f"{memory.verdict}: {held}"

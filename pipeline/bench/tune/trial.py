"""One trial of a search, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.bench.tune.search_space import Value

# planned    has no figures yet
# measured   all its loads, or those that were needed
# refused    by the recipe's rules, preflight or the plan's memory: nothing was built
# stopped    early, because it broke the SLO by far, or was behind the others
# failed     was built, and did not serve
# repeated   has the settings of a trial before, and is left out
Outcome = Literal["planned", "measured", "refused", "stopped", "failed", "repeated"]
COUNTED: frozenset[Outcome] = frozenset({"measured", "stopped", "failed"})


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial of a study.

    Attributes:
        number: Trial number, from 0, which is the recipe as it is.
        outcome: State, as in the list above.
        reason: Why it was refused or stopped, or has failed.
        origin: Why it was tried: `recipe`, `forecast`, `sweep` or `sampler`.
        values: One for each objective; empty without figures.
        load: Load that the values belong to.
        seconds: Seconds of `build`, `serve` and `measure`.
        compiled: Whether an engine was built for it.
    """

    number: int
    settings: Mapping[str, Value]
    outcome: Outcome
    reason: str = ""
    origin: str = "sampler"
    values: tuple[float, ...] = ()
    violations: Mapping[str, float] = field(default_factory=dict)
    load: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    compiled: bool = False

    @property
    def feasible(self) -> bool:
        """Whether it was measured within the SLO."""
        return self.outcome == "measured" and all(value <= 0 for value in self.violations.values())

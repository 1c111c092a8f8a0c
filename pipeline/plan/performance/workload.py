"""Traffic and what it may cost: lengths, GPUs, prices and the acceptance of a draft, completed by a recipe's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.contracts.gpus import gpus
from pipeline.plan.settings import ComparisonOptions
from pipeline.recipe import Limits


@dataclass(frozen=True)
class Workload:
    """Requests that are all alike."""

    prompt_tokens: int
    output_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence has behind it, on average over its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Which deployments are compared, under which traffic, at which prices."""

    work: Workload
    devices: tuple[str, ...]
    prices: Mapping[str, float] = field(default_factory=dict)  # GPU -> of an hour of one
    acceptance: float | None = None  # of the draft; None: without drafts

    @property
    def priced(self) -> bool:
        """Whether every GPU has a price, so that all can be ranked by money."""
        return bool(self.devices) and all(device in self.prices for device in self.devices)


def comparison_settings(options: ComparisonOptions, limits: Limits) -> ComparisonSettings:
    """Complete what a user asks by a recipe's limits: its longest prompt and answer, for lengths that are not given.

    Without devices, all GPUs are taken that have a price, or all that are known.
    """
    return ComparisonSettings(
        work=Workload(
            options.prompt_tokens or limits.max_input_tokens,
            options.output_tokens or limits.max_output_tokens,
        ),
        devices=options.devices or tuple(options.prices) or tuple(known.name for known in gpus()),
        prices=options.prices,
        acceptance=options.acceptance,
    )

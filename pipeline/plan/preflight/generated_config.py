"""What a runtime will write, before it does: flags of trtllm-build, arguments of the LLM API, settings of a package.

It is what the keys of the artifacts are made from (`Runtime.build_settings`, `Runtime.package_settings`), so that a
rule about upstream's files judges the very values that go into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.contracts import trtllm_build
from pipeline.errors import Fault
from pipeline.plan.memory import StepLimits
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What the model would be calibrated on."""

    problem: str = ""  # why it cannot be read
    conversations: bool = False  # whether its rows are messages, which a chat template makes text of


@dataclass(frozen=True, slots=True)
class Emission:
    """Settings as the runtime works them out."""

    build: Mapping[str, Mapping[str, Json]]  # role -> of its engine; without those that were refused
    package: Mapping[str, Json] = field(default_factory=dict)
    refusals: tuple[Fault, ...] = ()  # what kept the runtime from working them out
    dataset: DatasetFacts | None = None  # None: nothing is calibrated

    @property
    def engines(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Role -> values of all flags of trtllm-build, defaults included: "enable", 8, None for what is not said."""
        return tuple(
            (role, trtllm_build.parse(str(settings["version"]), _words(settings["flags"])))
            for role, settings in self.build.items()
            if "flags" in settings
        )

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the LLM API; empty for other runtimes."""
        found = self.build.get(TARGET, {}).get("arguments", {})
        assert isinstance(found, Mapping), "as the pytorch runtime writes them"
        return found

    @property
    def steps(self) -> dict[str, StepLimits]:
        """Role -> what the runtime asks of its engine, as far as memory depends on it."""
        found = {
            role: StepLimits(flags["max_num_tokens"], flags["tokens_per_block"] or StepLimits().block_tokens)
            for role, flags in self.engines
        }
        if self.arguments:
            both = StepLimits(int(self.arguments["max_num_tokens"]))
            found |= {TARGET: both, DRAFT: both}
        return found

    def of_package(self, section: str) -> Mapping[str, Any]:
        """A section of the package's settings; empty if it has none."""
        found = self.package.get(section, {})
        assert isinstance(found, Mapping), "sections are mappings"
        return found


def _words(flags: Json) -> list[str]:
    assert isinstance(flags, list), "a command line"
    return [str(word) for word in flags]

"""What a runtime will write, before it does: flags of trtllm-build, arguments of the LLM API, settings of a package.

It is what the keys of the artifacts are made from (`Runtime.build_settings`, `Runtime.package_settings`), so that a
rule about upstream's files judges the very values that go into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class Emission:
    """Settings as the runtime works them out."""

    build: Mapping[str, Mapping[str, Json]]  # role -> of its engine
    package: Mapping[str, Json]

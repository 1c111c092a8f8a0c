"""What an artifact is made from, and the name that follows from it.

Two artifacts with one digest are interchangeable: same stage, same settings, same inputs, same tools. What
does not change the result (where it was built, when, for which recipe) is no part of the key; it is in the
manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.store.canonical import Json, digest_of

SCHEMA = 1  # of keys and manifests together: a new layout never finds an old artifact

_STAGE = re.compile(r"[a-z][a-z0-9_.]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ArtifactKey:
    """
    >>> ArtifactKey("fetch", settings={"repo": "org/name"}).name
    'fetch-a0606687625223042420'
    """

    stage: str
    settings: Mapping[str, Json] = field(
        default_factory=dict
    )  # the slice of the recipe that this stage reads
    inputs: Mapping[str, str] = field(default_factory=dict)  # role -> digest of the artifact that plays it
    tools: Mapping[str, str] = field(
        default_factory=dict
    )  # package -> version, of those that change the result
    resumable: bool = field(default=False, compare=False)  # hand a killed make's leftover to the next one

    def __post_init__(self) -> None:
        if not _STAGE.fullmatch(self.stage):
            raise ValueError(f"stage {self.stage!r}: lower-case letters, digits, '_' and '.' only")
        for role, digest in self.inputs.items():
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"inputs[{role!r}] = {digest!r}: must be the 64-digit digest of an artifact")

    @property
    def digest(self) -> str:
        """SHA-256 over stage, settings, inputs, tools and the schema number, 64 hexadecimal digits."""
        return digest_of(
            {
                "schema": SCHEMA,
                "stage": self.stage,
                "settings": self.settings,
                "inputs": self.inputs,
                "tools": self.tools,
            }
        )

    @property
    def name(self) -> str:
        """The directory's name: the stage and the first 20 digits (80 bits) of the digest."""
        return f"{self.stage}-{self.digest[:20]}"

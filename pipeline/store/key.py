"""Identity of an artifact: everything that it is made from, and the name that follows.

Two artifacts with one digest are interchangeable: same stage, same settings, same inputs, same tools. What
does not change the result (where it was built, when, for which recipe) is no part of the key; it is in the
manifest.

The digest is that of canonical JSON, one text for one value: `canonical({"b": 1.0, "a": [True]})` is
`{"a":[true],"b":1}`. Numbers follow RFC 8785 in the one point that matters here: a float without a fraction is
written as the integer that it equals, so `1` and `1.0` (what two YAML writers may give for one setting) have one
digest, while `True` stays apart from `1`. Tuples are lists. What JSON cannot hold (NaN, infinity, keys that are not
text, any other type) is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

_EXACT = 2**53  # below it every integer has a float of its own

SCHEMA = 1  # of keys and manifests together: a new layout never finds an old artifact

_STAGE = re.compile(r"[a-z][a-z0-9_.]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ArtifactKey:
    """Everything that an artifact is made from.

    >>> ArtifactKey("fetch", settings={"repo": "org/name"}).name
    'fetch-a0606687625223042420'
    """

    stage: str
    # The slice of the recipe that this stage reads.
    settings: Mapping[str, Json] = field(default_factory=dict)
    # Role -> digest of the artifact that plays it.
    inputs: Mapping[str, str] = field(default_factory=dict)
    # Package -> version, of those that change the result.
    tools: Mapping[str, str] = field(default_factory=dict)
    # Whether what a killed make left is handed to the next make.
    resumable: bool = field(default=False, compare=False)

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


def canonical(value: Json) -> str:
    """Write a value as JSON with sorted keys, no blanks and ASCII only.

    Args:
        value: None, a truth value, a finite number, text, or lists and mappings of these; keys are text.

    Raises:
        ValueError: something in it is no JSON; the text names its place.
    """
    return json.dumps(_plain(value, "$"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: Json) -> str:
    """Return the SHA-256 of `canonical(value)`, 64 hexadecimal digits.

    Raises:
        ValueError: something in it is no JSON; the text names its place.
    """
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()


def _plain(value: Json, place: str) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum is its number
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{place}: {value} is not a JSON number")
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{place}: the key {key!r} is not text")
        return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{place}: {type(value).__name__} is not JSON")

"""Canonical JSON: one text for one value, so that a digest names it.

    canonical({"b": 1.0, "a": [True]}) -> '{"a":[true],"b":1}'

Numbers follow RFC 8785 in the one point that matters here: a float without a fraction is written as the
integer that it equals, so `1` and `1.0` (what two YAML writers may give for one setting) have one digest,
while `True` stays apart from `1`. Tuples are lists. What JSON cannot hold (NaN, infinity, keys that are not
text, any other type) is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

_EXACT = 2**53  # below it every integer has a float of its own


def canonical(value: Json) -> str:
    """`value` as JSON with sorted keys, no blanks and ASCII only; ValueError names what cannot be written."""
    return json.dumps(_plain(value, "$"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: Json) -> str:
    """SHA-256 of `canonical(value)`, 64 hexadecimal digits."""
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

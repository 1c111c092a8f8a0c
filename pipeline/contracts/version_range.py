"""Which entries of a contract hold in a version: those that say neither `since` a later one nor `until` one so old.

A release candidate (1.3.0rc4) and a repaired release (1.2.1.post1) have what their release has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import UserError


def entries_in(
    entries: Sequence[Mapping[str, Any]], version: str, versions: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that hold in a version; `versions` are all that the contract knows, oldest first.

    Raises:
        UserError: the contract does not know the version.

    >>> names = [{"name": "old", "until": "2.0"}, {"name": "new", "since": "2.0"}]
    >>> [entry["name"] for entry in entries_in(names, "2.0", ("1.0", "2.0"))]
    ['new']
    """
    require_known(version, versions)
    yield from (entry for entry in entries if holds(version, entry.get("since"), entry.get("until")))


def holds(version: str, since: str | None, until: str | None) -> bool:
    """Tell whether a version is of a range, from one release to before another; None: no end."""
    return (since is None or not precedes(version, since)) and (until is None or precedes(version, until))


def release_of(version: str) -> str:
    """Return the release that a candidate leads to, or that a post-release repairs.

    >>> release_of("1.3.0rc4"), release_of("1.2.1")
    ('1.3.0', '1.2.1')
    """
    return re.sub(r"(rc|\.post)\d+$", "", version)


def precedes(version: str, other: str) -> bool:
    """Tell whether a version is older than a release; a candidate of the release is not.

    >>> precedes("1.0.0", "1.1.0"), precedes("1.10.0", "1.2.0"), precedes("1.3.0rc4", "1.3.0")
    (True, False, False)
    """
    return _numbers(version) < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release_of(version.removesuffix("rcN"))))


def require_known(version: str, versions: Sequence[str]) -> None:
    """Raise UserError if a contract does not know a version; the text names its neighbours."""
    if release_of(version) not in versions:
        raise unknown_version(version, versions)


def unknown_version(version: str, versions: Sequence[str]) -> UserError:
    """Make the error for a version that is not one of `versions`, which are sorted; it names those next to it.

    >>> print(unknown_version("0.21.0", ("1.0.0", "1.1.0")), unknown_version("1.0.5", ("1.0.0", "1.1.0")), sep="; ")
    TensorRT-LLM 0.21.0 is not supported; the oldest is 1.0.0; TensorRT-LLM 1.0.5 is not known; known: 1.0.0, 1.1.0
    """
    own = _numbers(version)
    if own < _numbers(versions[0]):
        return UserError(f"TensorRT-LLM {version} is not supported; the oldest is {versions[0]}")
    before = [known for known in versions if _numbers(known) < own][-1:]
    after = [known for known in versions if _numbers(known) >= own][:1]
    return UserError(f"TensorRT-LLM {version} is not known; known: {', '.join(before + after)}")

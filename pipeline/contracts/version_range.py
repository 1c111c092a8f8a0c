"""Order of TensorRT-LLM's versions, and which entries of a contract hold in a version.

An entry holds from version `since` until before version `until`. A candidate
(1.4.0rc1) is older than its release; a repaired release (1.2.1.post1) is newer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pipeline.errors import UserError


def entries_in(
    entries: Sequence[Mapping[str, Any]], version: str, versions: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that hold in a version; `versions` are all that the contract knows, oldest first.

    >>> names = [{"name": "old", "until": "2.0"}, {"name": "new", "since": "2.0"}]
    >>> [entry["name"] for entry in entries_in(names, "2.0", ("1.0", "2.0"))]
    ['new']
    """
    require_known(version, versions)
    yield from (entry for entry in entries if holds(version, entry.get("since"), entry.get("until")))


def holds(version: str, since: str | None, until: str | None) -> bool:
    """Tell whether a version is of a range, from one release to before another; None: no end."""
    return (since is None or not precedes(version, since)) and (until is None or precedes(version, until))


def listed(versions: Sequence[str]) -> str:
    """Join versions as a sentence names them.

    >>> listed(("1.2.0", "1.2.1", "1.3.0rc29"))
    '1.2.0, 1.2.1 and 1.3.0rc29'
    """
    return " and ".join(filter(None, (", ".join(versions[:-1]), *versions[-1:])))


def is_candidate(version: str) -> bool:
    """Tell whether a version is a release candidate, such as 1.4.0rc1."""
    return "rc" in version


def precedes(version: str, other: str) -> bool:
    """Tell whether a version is older than another.

    >>> precedes("1.10.0", "1.2.0"), precedes("1.3.0rc4", "1.3.0rc29"), precedes("1.3.0rc29", "1.3.0")
    (False, True, True)
    """
    return _order(version) < _order(other)


@cache
def _order(version: str) -> tuple[tuple[int, ...], int, int]:
    """Numbers; -1 for a candidate, 1 for a repair, else 0; and the number of the candidate or repair."""
    numbers, kind, count = re.split(r"(rc|\.post|$)", version, maxsplit=1)
    stage = {"rc": -1, ".post": 1}.get(kind, 0)
    return tuple(map(int, numbers.split("."))), stage, int(count or 0)


def require_known(version: str, versions: Sequence[str]) -> None:
    """Raise UserError if a contract does not know a version; the text names its neighbours."""
    if version not in versions:
        raise unknown_version(version, versions)


def unknown_version(version: str, versions: Sequence[str]) -> UserError:
    """Make the error for a version that is not one of `versions`, which are sorted; it names those next to it.

    The version before is a stable release, with the candidates between it and the version.

    >>> print(unknown_version("0.21.0", ("1.0.0", "1.1.0")), unknown_version("1.0.5", ("1.0.0", "1.1.0")), sep="; ")
    TensorRT-LLM 0.21.0 is not supported; the oldest is 1.0.0; TensorRT-LLM 1.0.5 is not known; near: 1.0.0, 1.1.0
    >>> print(unknown_version("2.0.0", ("1.0.0", "1.1.0", "1.2.0rc3")))
    TensorRT-LLM 2.0.0 is not known; near: 1.1.0, 1.2.0rc3
    """
    before = [known for known in versions if precedes(known, version)]
    if not before:
        return UserError(f"TensorRT-LLM {version} is not supported; the oldest is {versions[0]}")
    stable = [number for number, known in enumerate(before) if not is_candidate(known)]
    near = before[stable[-1] if stable else -1 :]
    after = [known for known in versions if precedes(version, known)][:1]
    return UserError(f"TensorRT-LLM {version} is not known; near: {', '.join(near + after)}")

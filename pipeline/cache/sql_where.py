"""Some entries, as a condition of SQL."""

from __future__ import annotations

from pipeline.cache.backend import Which


def condition_of(which: Which, mark: str) -> tuple[str, list[bytes | float]]:
    """The text and its values; `mark` stands for a value.

    >>> condition_of(Which(tenant=b"t", before=1.5), "?")
    ('tenant = ? AND created < ?', [b't', 1.5])
    """
    ids = which.ids()
    terms = [f"{name} = {mark}" for name in ids]
    values: list[bytes | float] = list(ids.values())
    if which.before is not None:
        terms.append(f"created < {mark}")
        values.append(which.before)
    return " AND ".join(terms) or "true", values

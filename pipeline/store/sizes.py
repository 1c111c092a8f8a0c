"""Byte counts for people."""

from __future__ import annotations


def human(count: float) -> str:
    """
    >>> human(512), human(1536), human(16 * 1024**3)
    ('512 B', '1.5 KiB', '16.0 GiB')
    """
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1024
    return f"{count:.1f} TiB"

"""Byte counts for people."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(512), human_bytes(1536), human_bytes(16 * 1024**3)
    ('512 B', '1.5 KiB', '16.0 GiB')
    """
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1024
    return f"{count:.1f} TiB"

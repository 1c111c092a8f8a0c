"""A request that cannot be honoured."""

from __future__ import annotations


class Refused(ValueError):
    """What was asked for cannot be done; the text is one line that names the tensor and what would be right."""

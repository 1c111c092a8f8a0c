"""The page at /: talk to a deployment, and see TTFT, ITL and cache hits as they come. One file, all its own."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def page() -> str:
    """HTML."""
    return (resources.files("pipeline.gateway") / "page.html").read_text("utf-8")

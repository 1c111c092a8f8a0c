"""Which way of calling tools a packaged model has: data about families, chosen by what its chat template contains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from pipeline.client import ChatTemplate


class Dialect(BaseModel):
    """One entry of dialects.yaml, which tells what the fields mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    marks: tuple[str, ...]
    open: str | None = None
    close: str | None = None
    form: Literal["json", "xml", "named"]
    bare: str | None = None
    source: str


# What an answer is whose form the engine was made to keep: the call, and nothing else.
FORCED = Dialect(name="forced", marks=(), form="json", bare="{", source="pipeline.gateway.tools.choice")


@cache
def dialects() -> Sequence[Dialect]:
    """All that are known, the more particular before the more general."""
    text = (resources.files("pipeline.gateway.tools") / "dialects.yaml").read_text("utf-8")
    return tuple(Dialect(name=name, **fields) for name, fields in yaml.safe_load(text).items())


def dialect_of(template: ChatTemplate | None) -> Dialect | None:
    """That of a model by its chat template; None if the template takes no tools, or none that we know."""
    if template is None:
        return None
    source = template.sources.get("tool_use") or template.sources.get("default", "")
    if not takes_tools(template):
        return None
    return next((one for one in dialects() if all(mark in source for mark in one.marks)), None)


def takes_tools(template: ChatTemplate) -> bool:
    """Whether the template tells the model of tools at all."""
    return any("tools" in source for source in template.sources.values())

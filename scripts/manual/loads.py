"""The reference of loads, criteria and studies, from the models whose fields are their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.bench.accept.settings import AcceptLoad
from pipeline.bench.compare.settings import CompareCriteria
from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.tune.settings import StudySettings
from pipeline.settings import Settings

# Title, option, model.
SECTIONS: tuple[tuple[str, str, type[Settings]], ...] = (
    ("Load of `bench`, `compare` and `tune`", "--load", LoadSettings),
    ("Criteria of `compare`", "--criteria", CompareCriteria),
    ("Study of `tune`", "--study", StudySettings),
    ("Load of `accept`", "--load", AcceptLoad),
)


def page() -> str:
    """Markdown: each key with its default and its meaning."""
    lines = [
        "# Loads, criteria, studies",
        "",
        "Each is one option, which may be repeated: a YAML file with these keys, and `KEY=VALUE`, which replaces the",
        "file's. Values are YAML, as of `--set`; `1,8,32` is a list, too. Paths in a file are relative to its folder.",
    ]
    for title, option, model in SECTIONS:
        lines += ["", f"## {title}", "", f"`{option} FILE|KEY=VALUE`", "", *_rows(model)]
    return "\n".join(lines) + "\n"


def _rows(model: type[Settings]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    for name, field in model.model_fields.items():
        yield f"| `{name}` | {_default(field.default)} | {field.description} |"


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"

"""Output of `pipeline migrate`: one list of records as text, as JSON and as tables in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from pipeline.cli.output import aligned
from pipeline.cli.render.memory import OutputStyle
from pipeline.cli.render.speed import number
from pipeline.prepare.migration import Migration
from pipeline.prepare.migration_changes import Change, Figure, figures, written
from pipeline.printable import json_text
from pipeline.recipe import CpuRuntime, Recipe

SCHEMA = "pipeline.migrate/1"
_SIDES = ("engines", "LLM API")
# Title -> places and effects of its records.
_GROUPS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Recipe": (("recipe",), ("changed", "removed", "means")),
    "Settings of the engine, and the argument that says the same": (("engine", "triton"), ("carried over",)),
    "Settings of the engine without counterpart": (("engine", "triton"), ("no counterpart",)),
    "Requests that go to Triton itself": (("requests",), ("changed", "no counterpart")),
}


def migration_text(migration: Migration) -> str:
    """Write all records and both plans for people."""
    return "\n".join(line.rstrip() for line in _text(migration, OutputStyle.of_output().width))


def migration_markdown(migration: Migration) -> str:
    """Write the same as tables."""
    return "\n".join(_markdown(migration)) + "\n"


def migration_json(migration: Migration, file: Path | None) -> str:
    """Write the same as JSON.

    Args:
        file: File that the recipe was written to; None where nothing was.
    """
    document = {
        "schema": SCHEMA,
        "name": migration.after.name,
        "file": None if file is None else str(file.absolute()),
        "engines": _release(migration.before),
        "llm_api": _release(migration.after),
        "changes": [asdict(change) for change in migration.changes],
        "figures": [asdict(figure) for figure in figures(migration.reports)],
        "verdicts": [report.verdict for report in migration.reports],
        "refused": [report.refused for report in migration.reports],
        "recipe": migration.after.model_dump(mode="json"),
        "yaml": migration.text,
    }
    return json_text(document, indent=2) + "\n"


def _text(migration: Migration, width: int) -> Iterator[str]:
    yield _title(migration)
    for name, records in _groups(migration):
        yield ""
        yield name
        for reason, alike in groupby(records, key=lambda record: record.reason):
            yield from (f"  {_said(change)}" for change in alike)
            yield from (f"      {line}" for line in textwrap.wrap(reason, width - 6))
    yield ""
    rows = [
        (_label(figure), _value(figure.before), _value(figure.after)) for figure in figures(migration.reports)
    ]
    yield from aligned([("Plan", *_SIDES), *((f"  {name}", *values) for name, *values in rows)])
    yield ""
    for side, report in zip(_SIDES, migration.reports, strict=True):
        yield from textwrap.wrap(f"{side}: {report.verdict}", width)


def _markdown(migration: Migration) -> Iterator[str]:
    yield f"# {_title(migration)}"
    for name, records in _groups(migration):
        yield from ("", f"## {name}", "", "| before | now | why | source |", "| --- | --- | --- | --- |")
        for record in records:
            now = "–" if record.new_key is None else f"`{_pair(record.new_key, record.after)}`"
            cells = (
                f"`{_pair(record.key, record.before)}`",
                now,
                record.reason or "another name",
                "; ".join(record.sources),
            )
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
    yield from ("", "## Plan", "", f"| | {' | '.join(_SIDES)} |", "| --- | --- | --- |")
    for figure in figures(migration.reports):
        yield f"| {_label(figure)} | {_value(figure.before)} | {_value(figure.after)} |"
    before, after = (report.verdict for report in migration.reports)
    yield f"| verdict | {before} | {after} |"


def _title(migration: Migration) -> str:
    before, after = (_release(recipe) for recipe in (migration.before, migration.after))
    return f"{migration.after.name}: {before['runtime']} {before['version']} to {after['runtime']} {after['version']}"


def _release(recipe: Recipe) -> dict[str, str]:
    assert not isinstance(recipe.runtime, CpuRuntime), "both are of TensorRT-LLM"
    return {"runtime": recipe.runtime.kind, "version": recipe.runtime.version, "gpu": recipe.runtime.gpu}


def _groups(migration: Migration) -> Iterator[tuple[str, list[Change]]]:
    for name, (places, effects) in _GROUPS.items():
        records = [
            change for change in migration.changes if change.place in places and change.effect in effects
        ]
        if records:
            yield name, records


def _said(change: Change) -> str:
    now = "" if change.new_key is None else f" -> {_pair(change.new_key, change.after)}"
    return f"{_pair(change.key, change.before)}{' -> left out' if change.effect == 'removed' else now}"


def _pair(key: str, value: object) -> str:
    text = written(value)
    return key if text == key else f"{key} {text}"


def _label(figure: Figure) -> str:
    return f"{figure.name}, {figure.unit}" if figure.unit else figure.name


def _value(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else number(value)

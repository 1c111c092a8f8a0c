"""A copy of a recipe that works where it is put: `local:` paths become absolute, comments name the copy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml

from pipeline.errors import UserError
from pipeline.recipe.loading import load_recipe
from pipeline.recipe.source import parse_source

_KEYS = ("source", "dataset")  # whose values may be local: paths


def copy_recipe(file: Path, destination: str, *, force: bool = False) -> Path:
    """Copy to a file, or into a folder; returns the file written. The comments stay."""
    load_recipe(file)
    target = Path(destination).expanduser()
    if destination.endswith("/") or target.is_dir():
        target = target / file.name
    if target.exists() and target.samefile(file):
        raise UserError(f"{target} is the recipe itself; name another file")
    if target.exists() and not force:
        raise UserError(f"{target} exists; give --force to overwrite it, or name another file")
    try:
        target.write_text(_relocated(file.read_text(encoding="utf-8-sig"), file, target), encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{target.parent} does not exist; make the folder first") from error
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from error
    return target


def _relocated(text: str, file: Path, target: Path) -> str:
    for node in sorted(_local_values(yaml.compose(text)), key=lambda node: -int(node.start_mark.index)):
        absolute = json.dumps(str(parse_source(node.value, file.resolve().parent)), ensure_ascii=False)
        text = text[: node.start_mark.index] + absolute + text[node.end_mark.index :]
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.startswith("#"):
            break
        lines[number] = line.replace(f"recipes/{file.name}", shlex.quote(str(target)))
    return "".join(lines)


def _local_values(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(value, yaml.ScalarNode) and key.value in _KEYS and value.value.startswith("local:"):
                yield value
            else:
                yield from _local_values(value)

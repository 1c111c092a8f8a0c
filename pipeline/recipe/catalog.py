"""Files of recipes: list the packaged recipes, copy or write a recipe, write the JSON schema.

A copy works where it is put: `local:` paths become absolute, comments name the copy. The schema, for editors and other
tools, is checked in beside this file; it has every key, type, bound and description, but no rules that span fields.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from pipeline.documents import dump_yaml, read_document
from pipeline.errors import InvalidInput, UserError
from pipeline.overrides import apply_overrides
from pipeline.recipe.library import headline, packaged
from pipeline.recipe.loading import load_recipe
from pipeline.recipe.recipe import Recipe, RecipeProvenance
from pipeline.recipe.source import parse_source

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")
_KEYS = ("source", "dataset")  # whose values may be local: paths


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One packaged recipe; `recipe` is None where the file is not valid."""

    name: str
    file: Path
    purpose: str
    recipe: Recipe | None

    @property
    def runtime(self) -> str:
        return self.recipe.runtime.kind if self.recipe else "not valid"

    @property
    def quantization(self) -> str:
        return self.recipe.quantization.format if self.recipe else ""


def entries() -> list[CatalogEntry]:
    """List all packaged recipes, sorted by name."""
    recipes = []
    for name, file in packaged().items():
        try:
            recipe = load_recipe(file)
        except InvalidInput:
            recipe = None
        purpose = headline(file.read_text(encoding="utf-8", errors="replace"))
        recipes.append(CatalogEntry(name, file, purpose, recipe))
    return recipes


def write_recipe(text: str, file: Path, *, force: bool) -> None:
    """Write the YAML of a recipe that was made here.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    try:
        with file.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists; give --force to overwrite it, or name another --output") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error


def copy_recipe(file: Path, destination: str, *, force: bool = False) -> Path:
    """Copy a recipe to a file, or into a folder. The comments stay.

    Args:
        destination: a file, or a folder (which exists, or ends with "/").

    Raises:
        UserError: the destination exists, is the recipe itself, or cannot be written.
        InvalidInput: the recipe is not valid.
    """
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


def sibling_file(recipe: Recipe, suffix: str) -> Path:
    """Choose a file for a recipe that is made of another: beside it, or in this folder for a packaged recipe.

    Args:
        suffix: Word behind the name of its file, such as "tuned".
    """
    file = recipe.provenance.file
    name = f"{recipe.name if file is None else file.stem}-{suffix}.yaml"
    if file is None or packaged().get(file.stem) == file:
        return Path(name).absolute()
    return file.with_name(name)


# Keys whose values may be paths, relative to the recipe's folder.
_PATHS = (
    ("model", "source"),
    ("draft", "source"),
    ("quantization", "calibration", "dataset"),
    ("golden", "file"),
)


def written_values(
    provenance: RecipeProvenance, overrides: Sequence[str], whole: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return the values of a recipe's file with overrides, as they may be written in another folder.

    Args:
        provenance: File of the recipe.
        overrides: All overrides, those that the recipe was read with among them.
        whole: All values of the recipe with these overrides: those of paths are absolute, and those of a recipe that
            was read from no file are all that there are.
        folder: Folder of the file to be written; in that of the recipe, paths stay relative.
    """
    file = provenance.file
    if file is None:
        return dict(whole)
    document = read_document(file.read_bytes(), str(file))
    apply_overrides(document, overrides)
    if folder.resolve() != file.parent.resolve():
        for section, *path in _PATHS:
            _make_absolute(document.data.get(section), whole.get(section), path)
    return document.data


def _make_absolute(values: Any, whole: Any, path: Sequence[str]) -> None:
    if isinstance(values, dict) and path[0] in values:
        if len(path) == 1:
            values[path[0]] = whole[path[0]]
        else:
            _make_absolute(values[path[0]], whole[path[0]], path[1:])


def _relocated(text: str, file: Path, target: Path) -> str:
    for node in sorted(_local_values(yaml.compose(text)), key=lambda node: -int(node.start_mark.index)):
        folder = file.resolve().parent
        is_source = node.value.startswith("local:")
        path = parse_source(node.value, folder) if is_source else folder / node.value
        absolute = json.dumps(str(path), ensure_ascii=False)
        text = text[: node.start_mark.index] + absolute + text[node.end_mark.index :]
    return renamed_head(text, file, target)


def renamed_head(text: str, file: Path, target: Path) -> str:
    """Name another file in the comment that a packaged recipe begins with."""
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
            elif key.value == "golden" and isinstance(value, yaml.MappingNode):
                yield from (path for name, path in value.value if name.value == "file")
            else:
                yield from _local_values(value)


def annotated_yaml(head: Sequence[str], values: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Write values as a recipe file, with a comment above each key that has a reason.

    Args:
        head: lines of the comment that the file begins with.
        values: sections and their values; a key that is None is left out, and only its comment is written.
        reasons: dotted key -> why it has its value.

    >>> print(annotated_yaml(["Mine."], {"name": "x", "limits": {"max_concurrency": 4}},
    ...     {"limits.max_concurrency": "four fit"}), end="")
    # Mine.
    name: x
    limits:
      # four fit
      max_concurrency: 4
    """
    return "".join(f"# {line}\n" for line in head) + "".join(_annotated(values, reasons, ""))


def _annotated(values: Mapping[str, Any], reasons: Mapping[str, str], path: str) -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in values.items():
        place = f"{path}{key}"
        why = reasons.get(place, "")
        for line in textwrap.wrap(why if value is not None else f"{key}: {why}" if why else "", 100):
            yield f"{indent}# {line}\n"
        if isinstance(value, Mapping) and any(name.startswith(f"{place}.") for name in reasons):
            yield f"{indent}{key}:\n"
            yield from _annotated(value, reasons, f"{place}.")
        elif isinstance(value, Mapping):
            yield f"{indent}{key}: {dump_yaml(value, flow=True)}"
        elif value is not None:
            yield textwrap.indent(dump_yaml({key: value}), indent)


class _SchemaWithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002
        return False


def schema_text() -> str:
    """Return the JSON schema of the models as they are now."""
    schema = Recipe.model_json_schema(schema_generator=_SchemaWithoutTitles)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe of pipeline"}
    return (
        json.dumps(head | {key: value for key, value in schema.items() if key not in head}, indent=2) + "\n"
    )

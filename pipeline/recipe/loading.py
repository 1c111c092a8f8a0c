"""From a file and overrides to a recipe, or to every fault at once; and from problems found later back to the file.

Overrides of the command line (`--set a.b=c`) replace values before the recipe is validated: the same as editing the
file. Their values are YAML: numbers, `true`, `null`, lists and whole sections (`runtime={kind: cpu}`) can be given. A
later override wins over an earlier one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from pipeline import resources
from pipeline.document_faults import MOST_FAULTS, fault_at, field_at, located_errors
from pipeline.documents import Document, KeyPath, dotted, read_document
from pipeline.errors import Fault, InvalidInput
from pipeline.golden_questions import read_questions
from pipeline.overrides import apply_overrides
from pipeline.reading import UnreadableFile
from pipeline.recipe.library import find_recipe
from pipeline.recipe.recipe import Recipe, RecipeProvenance
from pipeline.recipe.sections import InvalidValue, RecipeSection, RecipeValues
from pipeline.recipe.validators import Problem, broken_rules

_MAX_BYTES = 1 << 20
_EXAMPLE = "start from an example: pipeline recipes copy tiny-cpu my.yaml"


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path_or_name: a file, or the name of a packaged recipe.
        overrides: values of `--set`, each `section.key=value`.

    Raises:
        InvalidInput: with all faults (of more than 50, their number), each with its file and line, or `--set`.
    """
    file, document = overridden_document(path_or_name, overrides)
    if not document.is_mapping:
        raise InvalidInput(str(file), document.faults)
    faults, more = document.faults, 0
    try:
        recipe = Recipe.model_validate(document.data, context=recipe_context(file))
    except ValidationError as error:
        located, more = _faults(error, document)
        faults = faults + located
    faults = faults + _golden_faults(document, file)
    if faults:
        faults = sorted(faults, key=lambda fault: (fault.where == "--set", fault.line or 0))
        raise InvalidInput(str(file), faults[:MOST_FAULTS], more + len(faults[MOST_FAULTS:]))
    return recipe.read_from(RecipeProvenance(file.resolve(), tuple(overrides)))


def overridden_document(path_or_name: str | Path, overrides: Sequence[str]) -> tuple[Path, Document]:
    """Read a recipe's file, and override its values; the file, and what it says.

    Raises:
        InvalidInput: there is no such file, or it cannot be read.
    """
    file = find_recipe(str(path_or_name))
    document = read_document(_read(file), str(file), example=_EXAMPLE)
    if document.is_mapping:
        apply_overrides(document, overrides)
    return file, document


def recipe_of_values(values: Mapping[str, Any], overrides: Sequence[str], where: str) -> Recipe:
    """Override and validate values that a recipe was written as: `recipe.model_dump(mode="json")`.

    Args:
        values: the recipe's, all paths in them absolute.
        where: name in messages, such as that of the deployment.

    Raises:
        InvalidInput: with all faults.
    """
    document = Document(where)
    document.is_mapping, document.data = True, copy.deepcopy(dict(values))
    apply_overrides(document, overrides)
    faults, more = document.faults, 0
    if not faults:
        try:
            return Recipe.model_validate(document.data, context=recipe_context(Path(where)))
        except ValidationError as error:
            faults, more = _faults(error, document)
    raise InvalidInput(where, faults, more)


def _faults(error: ValidationError, document: Document) -> tuple[list[Fault], int]:
    """Describe what is wrong with a document, rules across fields included.

    Returns:
        The faults that stand first in the file, and how many there are besides: describing one looks for near names.
    """
    broken: list[Problem] = []
    wrong = []
    for path, detail in located_errors(error, Recipe, document):
        if detail["type"] == "rule":
            broken.append(Problem(**detail["ctx"]))
        else:
            wrong.append((path, detail))
    if wrong:
        # Then pydantic did not get as far as the rules.
        broken = broken_rules(ValidValues(document.data, [path for path, _ in wrong]))
    faults = [fault_at(path, detail, Recipe, document) for path, detail in wrong[:MOST_FAULTS]]
    return [*faults, *(_fault_of(problem, document) for problem in broken)], len(wrong) - len(faults)


class ValidValues(RecipeValues):
    """The values of a document, without those that are at fault: reading one raises InvalidValue."""

    def __init__(self, data: Mapping[str, Any], wrong: Sequence[KeyPath]) -> None:
        super().__init__(data)
        self._wrong = set(wrong)

    def __getitem__(self, key: str) -> Any:
        path: KeyPath = tuple(key.split("."))
        if any(path[:depth] in self._wrong for depth in range(len(path) + 1)):
            raise InvalidValue(key)
        value = super().__getitem__(key)
        return self._default(path) if value is None else value

    def _default(self, path: KeyPath) -> Any:
        value: Any = self._data
        for depth, part in enumerate(path):
            if value is None:
                return None
            if part in value:
                value = value[part]
                continue
            info = field_at(Recipe, self._data, path[: depth + 1])
            default = info.get_default(call_default_factory=True, validated_data={}) if info else None
            if default is PydanticUndefined:
                raise InvalidValue(".".join(map(str, path)))
            value = default.model_dump(mode="json") if isinstance(default, RecipeSection) else default
        return list(value) if isinstance(value, tuple) else value


def _fault_of(problem: Problem, document: Document) -> Fault:
    """Make the fault of a problem, at the place where its first key was given."""
    path, *paths = [tuple(key.split(".")) for key in problem.keys]
    place = document.place(path)
    value = place.text if path in document.places else None
    overridden = [dotted(other) for other in paths if document.place(other).where == "--set" != place.where]
    text = problem.text + (f" [{', '.join(overridden)} given by --set]" if overridden else "")
    return Fault(text, place.where, place.line, dotted(path), value or None, problem.fix, problem.rule)


def _golden_faults(document: Document, file: Path) -> list[Fault]:
    """Faults of the recipe's golden questions, each with the line of their own file."""
    golden, limits = (document.data.get(key) for key in ("golden", "limits"))
    named = golden.get("file") if isinstance(golden, dict) else None
    if not isinstance(named, str) or not named:
        return []
    path, place = file.resolve().parent / named, document.place(("golden", "file"))
    try:
        questions, faults = read_questions(path, shown(path))
    except UnreadableFile as error:
        return [
            Fault(error.fault.problem, where=place.where, line=place.line, key="golden.file", value=str(path))
        ]
    most = limits.get("max_output_tokens") if isinstance(limits, dict) else None
    if isinstance(most, int) and any((question.max_tokens or 0) > most for question in questions):
        longest = max(question.max_tokens or 0 for question in questions)
        problem = f"asks for {longest} tokens, and limits.max_output_tokens is {most}"
        faults.append(Fault(problem, where=place.where, line=place.line, key="golden.file", value=str(path)))
    return faults


def recipe_context(file: Path) -> dict[str, object]:
    """Facts that validators of a recipe need besides its values."""
    datasets = sorted(path.stem for path in resources.folder("calibration").glob("*.yaml"))
    return {"folder": file.resolve().parent, "datasets": datasets}


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            str(file), [Fault(f"cannot be read: {error.strerror}", where=str(file))]
        ) from error
    if len(raw) > _MAX_BYTES:
        raise InvalidInput(str(file), [Fault("is larger than 1 MiB, so it is not a recipe", where=str(file))])
    return raw


def located(recipe: Recipe, problems: Sequence[Problem]) -> list[Fault]:
    """Turn problems of a recipe into faults that say where each key was given, in the order of the file.

    A recipe that was made in Python has no lines.
    """
    document = _document(recipe)
    if document is None:
        values = RecipeValues(recipe.model_dump(mode="json"))
        keyed = [(problem.keys[0], problem) for problem in problems]
        return [
            Fault(problem.text, key=key, value=values[key], fix=problem.fix, rule=problem.rule)
            for key, problem in keyed
        ]
    faults = [_fault_of(problem, document) for problem in problems]
    return sorted(faults, key=lambda fault: (fault.where == "--set", fault.line or 0))


def shown(file: Path) -> str:
    """Write a path relative to the current folder, if the file lies in it."""
    cwd = Path.cwd()
    return str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)


def _document(recipe: Recipe) -> Document | None:
    file = recipe.provenance.file
    if file is None:
        return None
    try:
        document = read_document(file.read_bytes(), shown(file))
    except OSError:
        return None
    apply_overrides(document, recipe.provenance.overrides)
    return document

"""From a file and overrides to a recipe, or to every fault at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from pipeline import resources
from pipeline.errors import Fault, InvalidInput
from pipeline.recipe.faults import faults_of
from pipeline.recipe.library import find_recipe
from pipeline.recipe.overrides import apply_overrides
from pipeline.recipe.provenance import Provenance
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.yaml_reader import read_document

_MAX_BYTES = 1 << 20


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    `overrides` are `a.b=c`. Raises InvalidInput with all faults, each with its file and line, or `--set`.
    """
    file = find_recipe(str(path_or_name))
    document = read_document(_read(file), str(file))
    if not document.is_mapping:
        raise InvalidInput(str(file), document.faults)
    apply_overrides(document, overrides)
    faults = document.faults
    try:
        recipe = Recipe.model_validate(document.data, context=_context(file))
    except ValidationError as error:
        faults = faults + faults_of(error, document)
    if faults:
        raise InvalidInput(str(file), sorted(faults, key=lambda f: (f.where == "--set", f.line or 0)))
    return recipe.read_from(Provenance(file.resolve(), tuple(overrides)))


def _context(file: Path) -> dict[str, object]:
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

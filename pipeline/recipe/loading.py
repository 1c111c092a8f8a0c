"""From a file and overrides to a recipe, or to every fault at once."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from pipeline import resources
from pipeline.errors import Fault, InvalidInput
from pipeline.recipe.document import Document, read_document
from pipeline.recipe.faults import faults_of
from pipeline.recipe.library import find_recipe
from pipeline.recipe.overrides import apply_overrides
from pipeline.recipe.provenance import Provenance
from pipeline.recipe.recipe import Recipe

_MAX_BYTES = 1 << 20
_DATASET = ("quantization", "calibration", "dataset")


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    `overrides` are `a.b=c`. Raises InvalidInput with all faults, each with its file and line, or `--set`.
    """
    file = find_recipe(str(path_or_name))
    document = read_document(_read(file), str(file))
    if not document.data:
        raise InvalidInput(str(file), document.faults)
    apply_overrides(document, overrides)
    faults = document.faults + _unknown_dataset(document)
    try:
        recipe = Recipe.model_validate(document.data, context={"folder": file.resolve().parent})
    except ValidationError as error:
        faults = faults + faults_of(error, document)
    if faults:
        raise InvalidInput(str(file), sorted(faults, key=lambda f: (f.where != document.where, f.line or 0)))
    return recipe.read_from(Provenance(file.resolve(), tuple(overrides)))


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


def _unknown_dataset(document: Document) -> list[Fault]:
    """A name of a calibration set that calibration/ does not define."""
    name: object = document.data
    for part in _DATASET:
        name = name.get(part) if isinstance(name, dict) else None
    known = sorted(path.stem for path in resources.folder("calibration").glob("*.yaml"))
    if not isinstance(name, str) or ":" in name or name in known:
        return []
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}? " if near else ""
    fix += f'known: {", ".join(known)}; a file of your own is "local:my-set.jsonl"'
    place = document.place(_DATASET)
    return [
        Fault("is not a known calibration set", where=place.where, line=place.line, key=".".join(_DATASET),
              value=name, fix=fix)
    ]  # fmt: skip

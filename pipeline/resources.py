"""The files that travel with the package: recipes, calibration sets, sources of the Triton models, facts in YAML.

In a checkout they are folders beside `pipeline/`; in an installed wheel they are under `pipeline/_data/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).resolve().parent
# libyaml is ten times faster than Python; PyYAML's wheels bring it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def folder(name: str) -> Path:
    """The folder `recipes`, `calibration` or `model_repo`."""
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{name}/ is missing from this installation of pipeline")


def checkout() -> Path | None:
    """The root of the checkout that this runs from; None for an installed wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def parse_yaml(text: str) -> Any:
    """Parse YAML that this project wrote: facts of the package. What users write is read by the room that takes it."""
    return yaml.load(text, Loader=_LOADER)

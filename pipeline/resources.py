"""Where the files that travel with the package lie: recipes, calibration sets, sources of the Triton models.

In a checkout they are folders beside `pipeline/`; in an installed wheel they are under `pipeline/_data/`.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


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

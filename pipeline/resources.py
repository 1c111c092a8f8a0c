"""The files that travel with the package: recipes, calibration sets, sources of the Triton models, facts in YAML.

In a checkout they are folders beside `pipeline/`; in an installed wheel they are under `pipeline/_data/`.
"""

from __future__ import annotations

from importlib import resources
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


def shell_script(package: str, template: str, **values: Any) -> str:
    """Fill in a template of a shell script that lies in a package's folder.

    Variables are written as @(name)@, and comments as @# … #@: shells and Docker have braces of their own.
    """
    import jinja2

    environment = jinja2.Environment(
        variable_start_string="@(",
        variable_end_string=")@",
        comment_start_string="@#",
        comment_end_string="#@",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = (resources.files(package) / template).read_text("utf-8")
    return environment.from_string(text).render(**values)


def write_script(file: Path, text: str) -> None:
    """Write a script that its owner can run, into a folder that is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)

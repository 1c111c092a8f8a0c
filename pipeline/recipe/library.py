"""The recipes that travel with the package, and how a recipe is found: by path or by packaged name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from pipeline import resources
from pipeline.errors import Fault, InvalidInput

_SUFFIXES = (".yaml", ".yml")


def packaged() -> dict[str, Path]:
    """Return name -> file of the packaged recipes, sorted by name."""
    return {path.stem: path for path in sorted(resources.folder("recipes").glob("*.yaml"))}


def find_recipe(path_or_name: str) -> Path:
    """Find the file of a recipe.

    Args:
        path_or_name: a path (with "/", .yaml or .yml), or the name of a packaged recipe.

    Raises:
        InvalidInput: there is none; the text has near names.
    """
    is_path = "/" in path_or_name or path_or_name.endswith(_SUFFIXES)
    path = Path(path_or_name).expanduser()
    if not is_path and path_or_name in packaged():
        return packaged()[path_or_name]
    if path.is_dir():
        raise _not_found(path_or_name, "is a folder", f"name a file in it: {_some(path)}")
    if path.exists():
        return path
    names = list(packaged())
    near = get_close_matches(path.stem, names, n=3)
    if is_path:
        beside = get_close_matches(
            path.name, [p.name for s in _SUFFIXES for p in path.parent.glob(f"*{s}")], n=3
        )
        fix = f"near: {', '.join(str(path.parent / name) for name in beside)}" if beside else ""
        fix = fix or (f"a packaged recipe is called {near[0]}" if near else "")
        raise _not_found(path_or_name, "there is no such file", fix)
    known = f"did you mean {' or '.join(near)}?" if near else "`pipeline recipes ls` lists the packaged ones"
    raise _not_found(path_or_name, "is neither a packaged recipe nor a file", known)


def headline(text: str) -> str:
    """Return what a recipe is for: the first line of its text without "#"; empty if that is no comment.

    >>> headline("# A small pair.\\nname: x\\n")
    'A small pair.'
    """
    first = text.lstrip("\ufeff").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _some(folder: Path) -> str:
    files = [path.name for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]
    return ", ".join(files[:5]) or "it holds no recipe"


def _not_found(path_or_name: str, problem: str, fix: str) -> InvalidInput:
    return InvalidInput(path_or_name, [Fault(problem, where=path_or_name, fix=fix)])

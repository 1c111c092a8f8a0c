"""A model repository as a server sees it: another folder, file by file, without touching the one in the store.

Python writes byte-code beside its sources (Triton's stub heeds no setting against that), which must not end up in the
store, and Triton hands paths to a shell unquoted, so that the name of the repository's own folder may not matter.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pipeline.errors import UserError

_TEXTS = (".pbtxt", ".yaml")  # files that name paths


def mirror(repository: Path, into: Path, *, root: tuple[str, Path] | None = None) -> None:
    """Fill `into` with folders, and links to the files.

    Args:
        root: what the paths in configurations begin with, and the folder that they mean here. Files that name it are
            copied with this one instead.

    Raises:
        UserError: the path of `into` is one that Triton cannot use.
    """
    if shlex.quote(str(into)) != str(into):
        raise UserError(f"{into}: Triton needs a temporary folder without spaces in its name: set TMPDIR")
    for folder, _, files in os.walk(repository):
        if "__pycache__" in folder:
            continue
        mirrored = into / Path(folder).relative_to(repository)
        mirrored.mkdir(parents=True)
        for name in files:
            _place(Path(folder, name), mirrored / name, root)


def _place(source: Path, target: Path, root: tuple[str, Path] | None) -> None:
    if root is not None and source.suffix in _TEXTS:
        named, here = root
        text = source.read_text(encoding="utf-8")
        if f"{named}/" in text:
            target.write_text(text.replace(f"{named}/", f"{here}/"), encoding="utf-8")
            return
    target.symlink_to(source.resolve())

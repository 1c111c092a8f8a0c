"""A checkpoint's folder on this machine, read without leaving it.

Files may be symbolic links to others in the folder. The one way out is that of huggingface_hub's cache, whose files are
links to blobs beside the snapshots:

    models--org--name/snapshots/<revision>/config.json -> ../../blobs/<hash>

Whatever else leads out, or is no file (a named pipe, a device), is refused before it is opened: what is read here may
be copied into the store, where others read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from pipeline.errors import Fault, InvalidInput
from pipeline.reading import UnreadableFile, kind_of, open_file, read_all

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "hf_quant_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_NAMES = (CONFIG, ADAPTER_CONFIG, *COMPANIONS)
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_SNAPSHOTS, _BLOBS, _REPOSITORY = "snapshots", "blobs", "models--"


class CheckpointFolder:
    """The files of one local checkpoint, which are judged when it is made.

    >>> CheckpointFolder(path).read("config.json")          # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        """Raises InvalidInput with everything that a checkpoint may not be made of."""
        self.path = path
        self._root = path.resolve()
        try:
            self.names = tuple(sorted(os.listdir(path)))
        except OSError as error:
            fault = Fault(f"cannot be read: {error.strerror}", where=str(path))
            raise InvalidInput(f"local:{path}", [fault]) from error
        # Names of files that a checkpoint may be made of.
        judged = [name for name in self.names if name in _NAMES or name.endswith(_WEIGHTS)]
        faults = [fault for name in judged for fault in self._faults(name)]
        if faults:
            raise InvalidInput(f"local:{path}", faults)

    def open(self, name: str) -> BufferedReader:
        """Open a file to read. Links are not followed any more: what was judged may be something else by now.

        Raises:
            UnreadableFile: it is not there, not a regular file, or may not be read.
        """
        file = self.path / name
        route = self._way(name)
        if route is None:
            raise UnreadableFile(file, "is a link out of the folder by now")
        try:
            folder = _open_folder(route[0])
            try:
                for part in route[1][:-1]:
                    inner = _open_folder(part, folder)
                    os.close(folder)
                    folder = inner
                return open_file(Path(route[1][-1]), folder=folder, follow=False)
            finally:
                os.close(folder)
        except OSError as error:
            raise UnreadableFile(file, f"cannot be read: {error.strerror}") from error
        except UnreadableFile as error:
            raise UnreadableFile(file, error.fault.problem) from error

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises UnreadableFile."""
        with self.open(name) as stream:
            return read_all(stream, self.path / name)

    def _way(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """A folder that a file may lie in, and the way from there, without links; None where it lies elsewhere."""
        try:
            real = Path(os.path.realpath(self._root / name, strict=True))
        except OSError as error:
            raise UnreadableFile(self.path / name, f"cannot be read: {error.strerror}") from error
        for base in (self._root, self._blobs()):
            if base is not None and base in real.parents:
                return str(base), real.relative_to(base).parts
        return None

    def _blobs(self) -> Path | None:
        """Where the files of this folder lie, if it is a snapshot in huggingface_hub's cache."""
        repository = self._root.parent.parent
        is_snapshot = self._root.parent.name == _SNAPSHOTS and repository.name.startswith(_REPOSITORY)
        return repository / _BLOBS if is_snapshot else None

    def _faults(self, name: str) -> Iterator[Fault]:
        where, fix = str(self.path / name), "copy the file into the folder"
        try:
            route = self._way(name)
        except UnreadableFile as error:
            yield error.fault
            return
        if route is None:
            yield Fault(
                f"is a link to {os.path.realpath(where)}, outside of the folder", where=where, fix=fix
            )
        elif kind := kind_of(os.lstat(os.path.join(route[0], *route[1]))):
            yield Fault(f"is {kind}, not a regular file", where=where, fix="remove it")


def _open_folder(path: str, within: int | None = None) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)

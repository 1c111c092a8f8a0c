"""Files that other people wrote, read without trust: only regular ones of a bounded size, and errors that say where.

A checkpoint's config.json may be a named pipe, half a file, or a thousand lists in each other. What is wrong with a
file comes as UnreadableFile, never as a hang or as an error of a library. Uses the standard library alone, and
`tokenizers` for a tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from pipeline.errors import Fault, UserError

MAX_BYTES = 16 << 20  # of a configuration
MAX_TOKENIZER_BYTES = 512 << 20
_KINDS: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
_SPECIAL = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISLNK: "a link",
}


class UnreadableFile(UserError):
    """A file is not there, not a regular file, or does not hold what it should."""

    def __init__(self, path: Path | str, problem: str, *, line: int | None = None, fix: str = "") -> None:
        self.fault = Fault(problem, where=str(path), line=line, fix=fix)
        super().__init__(str(self.fault))


def kind_of(info: os.stat_result) -> str:
    """Kind of a file that is not a regular one, such as "a named pipe"; empty for a regular file."""
    if stat.S_ISREG(info.st_mode):
        return ""
    return next((name for is_kind, name in _SPECIAL.items() if is_kind(info.st_mode)), "something special")


def open_file(path: Path, *, folder: int | None = None, follow: bool = True) -> BufferedReader:
    """Open a regular file to read; nothing else is opened at all, because opening a pipe or a device does something.

    Args:
        folder: descriptor of the folder that `path` is relative to.
        follow: whether the file may be a symbolic link.

    Raises:
        UnreadableFile: it is not there, not a regular file, or may not be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        if kind := kind_of(os.stat(path, dir_fd=folder, follow_symlinks=follow)):
            raise UnreadableFile(path, f"is {kind}, not a regular file")
        stream = os.fdopen(os.open(path, flags, dir_fd=folder), "rb")
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read: {error.strerror}") from error
    if kind := kind_of(os.fstat(stream.fileno())):
        stream.close()
        raise UnreadableFile(path, f"is {kind} by now, not a regular file")
    return stream


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises UnreadableFile, also for one of more than `most` bytes."""
    with open_file(path) as stream:
        return read_all(stream, path, most)


def read_all(stream: BufferedReader, path: Path, most: int = MAX_BYTES) -> bytes:
    """Read the rest of an open file, at most `most` bytes."""
    try:
        content = stream.read(most + 1)
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise UnreadableFile(path, f"is larger than {most >> 20} MiB")
    return content


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The content of a regular file of UTF-8. Raises UnreadableFile."""
    return decode(read_bytes(path, most), path)


def decode(content: bytes, where: Path | str) -> str:
    """Decode UTF-8. Raises UnreadableFile with the line of the first invalid byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8: byte {content[error.start]:#04x}"
        raise UnreadableFile(where, problem, line=line, fix="save it as UTF-8") from error


def read_json(path: Path, kind: type = dict, most: int = MAX_BYTES) -> Any:
    """The value in a file of JSON, which must be a `kind` (dict or list). Raises UnreadableFile."""
    return parse_json(read_bytes(path, most), path, kind)


def optional_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty where there is no such file. Raises UnreadableFile."""
    return dict(read_json(path)) if path.exists() else {}


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises UnreadableFile."""
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parse_json(content: bytes | str, where: Path | str, kind: type = dict) -> Any:
    """As `read_json`, of what was read already."""
    text = content if isinstance(content, str) else decode(content, where)
    try:
        return checked_json(text, kind)
    except json.JSONDecodeError as error:
        raise UnreadableFile(where, f"is not JSON: {error.msg}", line=error.lineno) from error
    except ValueError as error:
        raise UnreadableFile(where, str(error)) from error


def checked_json(text: str, kind: type = dict) -> Any:
    """Parse a JSON text. Raises ValueError if it is malformed, nested too deeply, or another kind of value."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, kind):
        actual = "null" if value is None else _KINDS.get(type(value), "a number")
        raise ValueError(f"is not {_KINDS[kind]}, but {actual}")
    if "\\u" in text or not text.isascii():
        check_text(value)
    return value


def check_line(line: str) -> str:
    """A line of a file that was opened with errors="surrogateescape". Raises ValueError if it was not UTF-8."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not UTF-8: byte {ord(line[error.start]) - 0xDC00:#04x}") from None
    return line


def check_text(value: Any) -> None:
    """Raises ValueError if a text in a value holds half of a surrogate pair, which UTF-8 cannot encode."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(part[error.start]):04x}"
                raise ValueError(
                    f"holds {half}, which is half of a character: write both halves, or none"
                ) from None
        elif isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, Sequence):
            waiting += part


def read_tokenizer(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json, tried on a word; it neither cuts nor pads.

    Raises:
        UnreadableFile: the library does not take the file. ImportError: the library is not installed.
    """
    from tokenizers import Tokenizer

    content = read_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        with _panics_unprinted():
            tokenizer = Tokenizer.from_buffer(content)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode("Hello")
    except BaseException as error:
        # The library raises bare Exceptions, and where it panics, what is no Exception at all.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        fix = "take the tokenizer.json that transformers' save_pretrained writes"
        raise UnreadableFile(path, f"is damaged: {str(error)[:200]}", fix=fix) from error
    return tokenizer


@contextlib.contextmanager
def _panics_unprinted() -> Iterator[None]:
    """Keeps Rust from printing a panic to standard error before it becomes an exception."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        try:
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)

"""The rows of a data set: plain text, or conversations. Read whole and checked before any is used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.reading import checked_json, open_file

_MOST_FAULTS = 20


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row of a data set: text, or messages."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


def read_rows(path: Path, column: str | None, any_kind: bool = False) -> list[DatasetRow]:
    """Read and check all rows of a file.

    Args:
        path: JSON lines, or Parquet (which needs pyarrow).
        column: Name of the column of text; None: rows are messages.
        any_kind: Each line may hold messages or "text".

    Raises:
        InvalidInput: With the first faults, each at its line.
        UserError: It is not Parquet, or has no such column.
    """
    if path.suffix == ".parquet":
        return [DatasetRow(text=value) for value in read_parquet_column(path, column or "text")]
    rows: list[DatasetRow] = []
    faults: list[Fault] = []
    with open_file(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _parse(line, column, any_kind)
            if isinstance(row, Fault):
                faults.append(Fault(row.problem, where=str(path), line=number, key=row.key, fix=row.fix))
            else:
                rows.append(row)
            if len(faults) == _MOST_FAULTS:
                faults.append(Fault("and possibly more: reading stopped here", where=str(path), line=number))
                break
    if faults:
        raise InvalidInput("data set", faults)
    return rows


def _parse(line: bytes, column: str | None, any_kind: bool) -> DatasetRow | Fault:
    try:
        entry = checked_json(line.decode())
    except UnicodeDecodeError as error:
        return Fault(f"is not UTF-8: byte {line[error.start]:#04x}")
    except json.JSONDecodeError as error:
        return Fault(f"is not JSON: {error}")
    except ValueError as error:
        return Fault(f"must be a JSON object: {error}")
    key = column or "messages"
    if any_kind:
        key = "messages" if "messages" in entry else "text"
    if key == "messages":
        problem = next(_message_problems(entry.get("messages")), None)
        return Fault(problem, key="messages") if problem else DatasetRow(messages=tuple(entry["messages"]))
    if not isinstance(entry.get(key), str):
        return Fault("must be text", key=key, fix='one {"text": …} or {"messages": […]} a line')
    return DatasetRow(text=entry[key])


def _message_problems(messages: Any) -> Iterator[str]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        yield "must be a list of messages"
        return
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            yield "every message needs a role"
        elif not isinstance(message.get("content"), str):
            yield "every message needs a content that is text"


def read_parquet_column(path: Path, column: str) -> list[str]:
    """Read one column of text of a local Parquet file.

    Raises:
        UserError: pyarrow is not installed, or the file has no such column of text.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path.name} is a Parquet file, and reading it needs pyarrow: pip install pyarrow; or give a file "
            'of JSON lines: dataset: "local:my-set.jsonl", one {"text": …} a line'
        ) from error
    from pyarrow.lib import ArrowException

    try:
        values: list[str] = parquet.read_table(path, columns=[column]).column(column).to_pylist()
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path}: is not a Parquet file with a column {column!r}: {error}") from error
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{path}: column {column!r} holds other values than texts")
    return values

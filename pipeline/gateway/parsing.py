"""Parses bodies, queries and forms of requests into pydantic models; what is wrong becomes one answer of status 400.

How many values a body may have, and how deep they may be nested, is in `pipeline.gateway.bounds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.gateway.bounds import MAX_FAULTS, MAX_SHOWN, check_json
from pipeline.gateway.errors import ApiError

_MAX_FAULT_CHARS = 300
_Kind = TypeVar("_Kind", bound=BaseModel)


def parse_request(kind: type[_Kind], body: bytes) -> _Kind:
    """Parse and validate the body of a request.

    Args:
        kind: model of the request.
        body: JSON.

    Raises:
        ApiError: 400, with the first faults of the body.
    """
    check_json(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_faults(error) from None


def validate_request(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """Validate the query of a URL, the fields of a form, or what a request of another API comes to.

    Args:
        kind: model of the request.
        values: by name.

    Raises:
        ApiError: 400, with the first faults.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _first_faults(error) from None


def _first_faults(error: ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_input=False)[:MAX_FAULTS]
    texts = [f"{_place(fault['loc'])}: {fault['msg'][:_MAX_FAULT_CHARS]}" for fault in faults]
    if error.error_count() > MAX_FAULTS:
        texts.append(f"and {error.error_count() - MAX_FAULTS} more")
    first = faults[0]["loc"]
    return ApiError(400, "; ".join(texts), param=str(first[0])[:MAX_SHOWN] if first else None)


def _place(parts: Sequence[int | str]) -> str:
    return ".".join(str(part)[:MAX_SHOWN] for part in parts) or "body"

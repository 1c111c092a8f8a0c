"""Parses bodies, queries and forms of requests into pydantic models; what is wrong becomes one answer of status 400.

A body has a limited number of values, so that parsing it does not halt the streams of others for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.gateway.errors import ApiError

MAX_FAULTS = 16  # in one message
# Each value becomes a Python object, which takes the interpreter's lock: 50,000 take about 50 ms. Numbers take less.
_MAX_VALUES = 50_000
_NUMBERS_PER_VALUE = 8
_Kind = TypeVar("_Kind", bound=BaseModel)


def parse_request(kind: type[_Kind], body: bytes) -> _Kind:
    """Parse and validate the body of a request.

    Args:
        kind: model of the request.
        body: JSON.

    Raises:
        ApiError: 400, with the first faults of the body.
    """
    check_value_count(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_faults(error) from None


def check_value_count(body: bytes) -> None:
    """Refuse JSON that would become too many Python objects.

    Raises:
        ApiError: 400, if there are too many values.
    """
    if len(body) > _MAX_VALUES and _values(body) > _MAX_VALUES:
        raise ApiError(400, f"body: has more than {_MAX_VALUES} values: texts, numbers, lists and objects")


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
    texts = [f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults]
    if error.error_count() > MAX_FAULTS:
        texts.append(f"and {error.error_count() - MAX_FAULTS} more")
    first = faults[0]["loc"]
    return ApiError(400, "; ".join(texts), param=str(first[0]) if first else None)


def _values(body: bytes) -> int:
    """Estimate how many values a JSON text has: strings, lists and objects, and what stands between commas."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    strings = plain.count(b'"') // 2
    if strings > _MAX_VALUES:
        return strings
    outside = plain.split(b'"')[::2]
    containers = sum(part.count(b"[") + part.count(b"{") for part in outside)
    return strings + containers + sum(part.count(b",") for part in outside) // _NUMBERS_PER_VALUE

"""GET /v1/models as Anthropic's clients read it: for requests with the header `anthropic-version`.

Written against anthropic-python 2.14 (`types.model_info`, `pagination.SyncPage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from pipeline.gateway.errors import ApiError
from pipeline.gateway.served_model import ServedModel


class AnthropicPageQuery(BaseModel):
    """Query of a list of Anthropic's API."""

    after_id: str | None = None
    before_id: str | None = None
    limit: int = Field(default=20, ge=1, le=1000)


def model_info(name: str, model: ServedModel) -> dict[str, Any]:
    """Return Anthropic's object of a model.

    Args:
        name: its own, or an alias.
        model: the model itself.
    """
    return {
        "type": "model", "id": name, "display_name": model.name, "created_at": rfc3339(model.created),
        "lifecycle": "active", "deprecated_at": None, "retires_at": None, "line": None, "capabilities": None,
        "max_input_tokens": model.prompt_limit.max_tokens, "max_tokens": model.max_output_tokens,
    }  # fmt: skip


def page(items: Sequence[dict[str, Any]], query: AnthropicPageQuery) -> dict[str, Any]:
    """Return one page of a list.

    Args:
        items: all of them, each with an `id`.
        query: which of them are wanted.

    Raises:
        ApiError: 400, if an id is none of theirs.
    """
    ids = [item["id"] for item in items]
    for name, id in (("after_id", query.after_id), ("before_id", query.before_id)):
        if id is not None and id not in ids:
            raise ApiError(400, f"{name}: {id[:64]!r} is not in this list", param=name)
    first = 0 if query.after_id is None else ids.index(query.after_id) + 1
    end = len(items) if query.before_id is None else ids.index(query.before_id)
    if query.after_id is None and query.before_id is not None:
        # The page that ends before the item.
        shown, has_more = items[max(0, end - query.limit) : end], end > query.limit
    else:
        shown, has_more = items[first:end][: query.limit], end - first > query.limit
    return {
        "data": list(shown), "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None,
    }  # fmt: skip


def rfc3339(seconds: float) -> str:
    """Write seconds since the epoch as Anthropic writes times.

    >>> rfc3339(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")

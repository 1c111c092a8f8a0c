"""An entry as points of Qdrant: ids made of keys, bytes in base64, and the account that the capacity is kept by."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipeline.cache.backend import Capacity, Vector
from pipeline.cache.codec import Packed

IDS = ("scope", "engine", "tenant")  # of a payload, in hex


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of an entry without its answer."""

    FIELDS = ("created", "expires", "used", "bytes", "embedded")

    id: str
    created: float
    expires: float
    used: float
    bytes: int
    embedded: bool

    @classmethod
    def of(cls, point: Any) -> Self | None:
        """The account of a point; None if the point is none of ours."""
        payload = point.payload or {}
        return (
            cls(point.id, *(payload[field] for field in cls.FIELDS))
            if all(field in payload for field in cls.FIELDS)
            else None
        )


def surplus(accounts: Sequence[Account], most: Capacity, now: float) -> list[Account]:
    """What has to go: what expired; then, while the rest is too much, what was used longest ago."""
    gone = [account for account in accounts if account.expires <= now]
    kept = [account for account in accounts if account.expires > now]
    entries, size = len(kept), sum(account.bytes for account in kept)
    for account in sorted(kept, key=lambda account: account.used):
        if entries <= most.entries and size <= most.bytes:
            break
        gone.append(account)
        entries, size = entries - 1, size - account.bytes
    return gone


def found_by(packed: Packed) -> dict[str, Any]:
    """What both points of an entry say of it."""
    return {
        "scope": packed.scope.hex(),
        "engine": packed.engine.hex(),
        "tenant": packed.tenant.hex(),
        "created": packed.created,
        "turn": base64.b64encode(packed.turn).decode(),
    }


def whole(packed: Packed, vector: Vector | None) -> dict[str, Any]:
    """What the point of the answer says."""
    return {
        **found_by(packed),
        "answer": base64.b64encode(packed.answer).decode(),
        "expires": packed.expires,
        "used": packed.created,
        "bytes": packed.size,
        "embedded": vector is not None,
    }


def id_of(key: bytes) -> str:
    """The point of a key."""
    return str(uuid.UUID(bytes=key))


def key_of(id: str) -> bytes:
    """The key of a point."""
    return uuid.UUID(id).bytes


def content(point: Any, field: str) -> bytes:
    """A field of a point; what is none of ours becomes bytes that cannot be opened."""
    try:
        return base64.b64decode(point.payload[field], validate=True)
    except (KeyError, TypeError, ValueError):
        return b""

"""Tenants by their API keys, and the YAML file that lists them.

What a tenant may use is enforced in `pipeline.gateway.limits`. No message quotes a key, nor anything that may be one.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.document_faults import faults_of
from pipeline.documents import Document, KeyPath, dotted, read_document
from pipeline.errors import Fault, InvalidInput
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.private_files import warn_if_readable

_KEY_HEADERS = ("authorization", "api-key", "x-api-key")
_EXAMPLE = "{shop: {keys: [sk-…], limits: {concurrency: 16}}}"
_MAX_VALUES = 1_000_000


class _TenantEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    # In the clear, or "sha256:…".
    keys: tuple[str, ...] = Field(min_length=1, examples=[["sk-…"]])
    limits: TenantLimits = TenantLimits()
    # Whether its keys read the figures of all tenants by name.
    metrics: bool = False


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    tenants: dict[str, _TenantEntry] = Field(min_length=1, examples=[_EXAMPLE])


class Tenants:
    """All tenants by their API keys. Without keys, every request belongs to one tenant without a name or limits."""

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        """`tenants`: SHA-256 (hex) of an API key -> tenant; None if requests need no key."""
        self._by_key = tenants
        self._everybody = Tenant("", TenantLimits())

    @classmethod
    def load(cls, path: Path) -> Tenants:
        """Read a YAML file of tenants. A warning is logged if every account of this machine may read it.

        Raises:
            InvalidInput: with every fault and its line.
        """
        document = _read(path)
        faults, file = list(document.faults), None
        if document.is_mapping:
            try:
                file = _KeysFile.model_validate(document.data)
            except ValidationError as error:
                faults += faults_of(error, _KeysFile, document)
            faults += _faults_of_keys(document)
        if faults or file is None:
            raise InvalidInput(str(path), sorted(faults, key=lambda fault: fault.line or 0))
        warn_if_readable(path, "every account of this machine may read the API keys", by=0o004)
        tenants = {
            name: Tenant(name, settings.limits, reads_metrics=settings.metrics)
            for name, settings in file.tenants.items()
        }
        return cls({_identity(key): tenants[name] for name, of in file.tenants.items() for key in of.keys})

    @property
    def limited(self) -> Sequence[Tenant]:
        """Tenants that have limits, in the order of the file."""
        tenants = dict.fromkeys((self._by_key or {}).values())
        return [tenant for tenant in tenants if tenant.limits != TenantLimits()]

    @property
    def require_keys(self) -> bool:
        """Whether requests need an API key."""
        return self._by_key is not None

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request bears an API key, of whatever worth."""
        return any(name in headers for name in _KEY_HEADERS)

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Find the tenant of a request by its headers.

        A key stands in `Authorization: Bearer …`, as OpenAI's clients send it, or in `api-key` (Azure's clients) or
        `x-api-key` (Anthropic's).

        Raises:
            ApiError: 401, if a key is needed and none that is known is given.
        """
        if self._by_key is None:
            return self._everybody
        authorization = headers.get("authorization")
        key = next(filter(None, (headers.get(name) for name in _KEY_HEADERS)), None)
        if not key:
            raise ApiError(401, "No API key provided: send Authorization: Bearer …", code="invalid_api_key")
        if authorization:
            scheme, _, key = authorization.partition(" ")
            key = key if scheme.lower() == "bearer" else ""
        digest = _digest(key.strip())
        matching = [tenant for known, tenant in self._by_key.items() if hmac.compare_digest(known, digest)]
        if not matching:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return matching[0]


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


_HASHED = "sha256:"


def _identity(key: str) -> str:
    """SHA-256 (hex) of a key that is written in the clear, or as "sha256:…"."""
    return key.removeprefix(_HASHED).lower() if key.startswith(_HASHED) else _digest(key)


def _read(path: Path) -> Document:
    """Read a file of keys, which may be a pipe. Raises InvalidInput if it cannot be read at all."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInput(str(path), [Fault(f"cannot be read: {error.strerror}", str(path))]) from None
    example = f"write tenants: {_EXAMPLE}"
    return read_document(raw, str(path), example=example, is_secret=True, most_values=_MAX_VALUES)


def _faults_of_keys(document: Document) -> list[Fault]:
    """Find tenants without a name, and keys that can never match, or that match another tenant."""
    faults: list[Fault] = []
    known: dict[str, KeyPath] = {}

    tenants = document.data.get("tenants")
    for name, settings in tenants.items() if isinstance(tenants, dict) else ():
        if not name.strip() or not name.isprintable():
            fault = "without a name" if not name.strip() else "whose name cannot be printed"
            place = document.place(("tenants", name))
            fix = "logs and the cache tell tenants by it"
            faults.append(Fault(f"a tenant {fault}", document.where, place.line, "tenants", fix=fix))
        keys = settings.get("keys") if isinstance(settings, dict) else None
        for index, key in enumerate(keys if isinstance(keys, list) else ()):
            if not isinstance(key, str):
                continue
            path = ("tenants", name, "keys", index)
            problem, fix = _fault_of_key(key)
            first = known.setdefault(_identity(key), path)
            if not problem and first != path:
                problem = f"is the same key as {dotted(first)} on line {document.place(first).line}"
                fix = "each key belongs to one tenant, and stands once"
            if problem:
                line = document.place(path).line
                faults.append(Fault(problem, document.where, line, dotted(path), fix=fix))
    return faults


def _fault_of_key(key: str) -> tuple[str, str]:
    """Say what is wrong with a key, and what would be right: two empty strings if nothing is."""
    if not key.strip() or _identity(key) == _digest(""):
        return "is empty", "everybody would have it; write a key, or sha256: and its digest"
    if key.startswith(_HASHED) and not re.fullmatch("[0-9a-fA-F]{64}", key.removeprefix(_HASHED)):
        fix = 'write the 64 hexadecimal digits that this prints: printf %s "$KEY" | sha256sum'
        return "begins with sha256: and is no SHA-256", fix
    if key != key.strip() or not (key.isascii() and key.isprintable()):
        return "cannot be sent in a header", "use printable ASCII characters, without spaces around them"
    return "", ""

"""Tenants by their API keys, and the YAML file that lists them.

What a tenant may use is enforced in `pipeline.gateway.limits`. No message quotes a key, nor anything that may be one.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import Fault, InvalidInput
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.shared_redis import RedisBuckets
from pipeline.private_files import warn_if_readable

_KEY_HEADERS = ("authorization", "api-key", "x-api-key")


class _TenantEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    keys: tuple[str, ...] = Field(min_length=1)  # in the clear, or "sha256:…"
    limits: TenantLimits = TenantLimits()
    metrics: bool = False  # whether its keys read the figures of all tenants by name


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    tenants: dict[str, _TenantEntry] = Field(min_length=1)


class Tenants:
    """All tenants by their API keys. Without keys, every request belongs to one tenant without a name or limits."""

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        """
        Args:
            tenants: SHA-256 (hex) of an API key -> tenant; None if requests need no key.
        """
        self._by_key = tenants
        self._everybody = Tenant("", TenantLimits())

    @classmethod
    def load(cls, path: Path) -> Tenants:
        """Read a YAML file of tenants. A warning is logged if every account of this machine may read it.

        Raises:
            InvalidInput: with every fault and its line.
        """
        found, lines, faults = _read(path)
        try:
            file = _KeysFile.model_validate(found)
        except ValidationError as error:
            faults += _faults_of_form(error, lines)
            file = None
        if isinstance(found, dict) and isinstance(found.get("tenants"), dict):
            faults += _faults_of_keys(found["tenants"], lines)
        if faults or file is None:
            placed = [
                Fault(fault.problem, str(path), fault.line, fault.key, fix=fault.fix) for fault in faults
            ]
            raise InvalidInput(str(path), sorted(placed, key=lambda fault: fault.line or 0))
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

    def share_buckets(self, shared: RedisBuckets) -> None:
        """Take what tenants may use in a minute from buckets that other gateways take from, too."""
        for tenant in self.limited:
            tenant.shared = shared

    @property
    def require_keys(self) -> bool:
        """Whether requests need an API key."""
        return self._by_key is not None

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request bears an API key, of whatever worth."""
        return any(name in headers for name in _KEY_HEADERS)

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Find the tenant of a request.

        Args:
            headers: of the request: a key stands in `Authorization: Bearer …`, as OpenAI's clients send it, or in
                `api-key` (Azure's clients) or `x-api-key` (Anthropic's).

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
        given = _digest(key.strip())
        found = [tenant for known, tenant in self._by_key.items() if hmac.compare_digest(known, given)]
        if not found:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return found[0]


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


_HASHED = "sha256:"
# Levels of the file: tenants, a tenant, its keys, one of them. What lies deeper is at fault anyway.
_LEVELS = 5
_Place = tuple[object, ...]
_EXAMPLE = "tenants: {shop: {keys: [sk-…], limits: {concurrency: 16}}}"
# Type of pydantic's error -> what is wrong, what would be right.
_FORMS = {
    "dict_type": ("is not a mapping of names", f"write {_EXAMPLE}"),
    "model_type": ("is not a mapping of names", f"write {_EXAMPLE}"),
    "tuple_type": ("is not a list", "write keys: [sk-…]"),
    "string_type": ("is not text", "put what looks like a number, a date or true in quotes"),
    "missing": ("is missing", f"write {_EXAMPLE}"),
    "too_short": ("is empty", "name at least one"),
    "extra_forbidden": ("has a name that is not known", ""),
}


def _identity(key: str) -> str:
    """SHA-256 (hex) of a key that is written in the clear, or as "sha256:…"."""
    return key.removeprefix(_HASHED).lower() if key.startswith(_HASHED) else _digest(key)


def _read(path: Path) -> tuple[Any, dict[_Place, int], list[Fault]]:
    """Read a file of keys.

    Returns:
        Its content, the line of each value, and names that stand twice.

    Raises:
        InvalidInput: it cannot be read at all. PyYAML's own words are left out: they quote the file.
    """
    lines: dict[_Place, int] = {(): 1}
    faults: list[Fault] = []
    try:
        loader = yaml.SafeLoader(path.read_bytes().decode("utf-8-sig"))
        try:
            node = loader.get_single_node()
            _note_lines(node, (), lines, faults)
            return None if node is None else loader.construct_document(node), lines, faults
        finally:
            loader.dispose()
    except OSError as error:
        fault = Fault(f"cannot be read: {error.strerror}", str(path))
    except (UnicodeDecodeError, yaml.reader.ReaderError):
        fault = Fault("is not a text in UTF-8", str(path), fix=f"write {_EXAMPLE}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        fix = "what stands there is not shown: it may be a key; quote keys that hold : # or other signs"
        fault = Fault("is not YAML", str(path), mark and mark.line + 1, fix=fix)
    raise InvalidInput(str(path), [fault]) from None


def _note_lines(node: yaml.Node | None, place: _Place, lines: dict[_Place, int], faults: list[Fault]) -> None:
    """Note the line of each value, and what YAML does not mind: a name that stands twice."""
    if node is None or len(place) > _LEVELS:
        return
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*place, index), lines, faults)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[object, int] = {}
        for key, value in node.value:
            name, line = key.value if isinstance(key, yaml.ScalarNode) else None, key.start_mark.line + 1
            if name in seen:
                twice = f"has the same name on lines {seen[name]} and {line}"
                faults.append(Fault(twice, line=line, key=_dotted(place), fix="put them together"))
                continue
            seen[name] = lines[*place, name] = line
            _note_lines(value, (*place, name), lines, faults)


def _faults_of_form(error: ValidationError, lines: Mapping[_Place, int]) -> list[Fault]:
    """Translate pydantic's errors, without the values that they concern."""
    faults = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        place: _Place = tuple(part for part in fault["loc"] if part != "[key]")
        line = next(lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in lines)
        problem, fix = _FORMS.get(fault["type"], (fault["msg"], ""))
        if fault["type"] == "extra_forbidden":
            # The name may be a key, and is not shown.
            known: type[BaseModel] = (
                _TenantEntry if len(place) == 3 else TenantLimits if len(place) > 3 else _KeysFile
            )
            place, fix = place[:-1], f"there are {', '.join(known.model_fields)}"
        faults.append(Fault(problem, line=line, key=_dotted(place), fix=fix))
    return faults


def _faults_of_keys(tenants: Mapping[Any, Any], lines: Mapping[_Place, int]) -> list[Fault]:
    """Find tenants without a name, and keys that can never match, or that match another tenant."""
    faults: list[Fault] = []
    known: dict[str, _Place] = {}
    for name, settings in tenants.items():
        line = lines.get(("tenants", name))
        if isinstance(name, str) and (not name.strip() or not name.isprintable()):
            problem = (
                "a tenant without a name" if not name.strip() else "a tenant whose name cannot be printed"
            )
            faults.append(
                Fault(problem, line=line, key="tenants", fix="logs and the cache tell tenants by it")
            )
        keys = settings.get("keys") if isinstance(settings, dict) else None
        for index, key in enumerate(keys if isinstance(keys, list) else ()):
            place = ("tenants", name, "keys", index)
            if not isinstance(key, str):
                continue
            problem, fix = _fault_of_key(key)
            first = known.setdefault(_identity(key), place)
            if not problem and first != place:
                problem = f"is the same key as {_dotted(first)} on line {lines.get(first)}"
                fix = "each key belongs to one tenant, and stands once"
            if problem:
                faults.append(Fault(problem, line=lines.get(place), key=_dotted(place), fix=fix))
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


def _dotted(place: _Place) -> str:
    return ".".join(map(str, place))

"""Who asks, and how much they may: API keys, requests and tokens a minute, requests at the same time."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import Fault, InvalidInput
from pipeline.gateway.errors import ApiError
from pipeline.private_files import warn_if_readable


class Limits(BaseModel):
    """Of one tenant; None is no limit.

    Each choice counts as a request of its own: two prompts with n=3 are six requests, a minute and at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)


class _Tenant(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    keys: tuple[str, ...] = Field(min_length=1)  # the keys themselves, or "sha256:…" of them
    limits: Limits = Limits()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    tenants: dict[str, _Tenant] = Field(min_length=1)


@dataclass(slots=True)
class _Bucket:
    """What may be used up: fills evenly, holds a minute's worth."""

    per_minute: float
    level: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0 if it is."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (min(amount, self.per_minute) - self.level) / self.per_minute * 60)

    def take(self, amount: float, least: float = -inf) -> None:
        self.level = max(self.level - amount, least)


class Tenant:
    """One tenant, and what it has used."""

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.limits, self._clock = name, limits, clock
        self.running = 0
        self._requests = self._bucket(limits.requests_per_minute)
        self._tokens = self._bucket(limits.tokens_per_minute)

    def admit(self) -> None:
        """Count a request, whatever becomes of it: before anything of it is read.

        Raises:
            ApiError: 429, if the requests of this minute are used up.
        """
        self._take(((self._requests, 1.0, "requests"),))

    def check(self, choices: int) -> None:
        """
        Raises:
            ApiError: 400, if one request has more choices than the tenant may ever have.
        """
        limits = self.limits
        for most, when in ((limits.concurrency, "at once"), (limits.requests_per_minute, "a minute")):
            if most is not None and choices > most:
                text = f"n: {choices} choices, each of which is a request of its own; this key may have {most} {when}"
                raise ApiError(400, text, param="n", code="too_many_choices")

    def charge(self, tokens: int) -> None:
        """Take the tokens of a prompt that was counted and refused, down to a minute's worth of debt."""
        if self._tokens is not None:
            self._tokens.take(tokens, least=-self._tokens.per_minute)

    @contextmanager
    def request(self, tokens: int, choices: int = 1) -> Iterator[None]:
        """An admitted request while it runs.

        Args:
            tokens: that it has at most, in all of its choices.

        Raises:
            ApiError: 429, if that is more than the tenant may now.
        """
        most = self.limits.concurrency
        if most is not None and self.running + choices > most:
            text = f"Limit of {most} requests at once reached"
            raise ApiError(429, text, code="concurrency_limit", retry_after_s=1)
        further = (self._requests, choices - 1.0, "requests")  # the first is counted by `admit`
        self._take((further, (self._tokens, float(tokens), "tokens")))
        self.running += choices
        try:
            yield
        finally:
            self.running -= choices

    def _take(self, wanted: Sequence[tuple[_Bucket | None, float, str]]) -> None:
        """All or nothing."""
        now = self._clock()
        for bucket, amount, what in wanted:
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                text = f"Limit of {bucket.per_minute:g} {what} a minute reached"
                raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)
        for bucket, amount, _ in wanted:
            if bucket is not None:
                bucket.take(amount)

    def _bucket(self, per_minute: int | None) -> _Bucket | None:
        return None if per_minute is None else _Bucket(per_minute, per_minute, self._clock())


class Tenants:
    """All tenants by their keys; without a file there is one without a name, whom everybody is."""

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        """`tenants`: SHA-256 (hex) of the key -> tenant."""
        self._by_key = tenants
        self._anybody = Tenant("", Limits())

    @classmethod
    def load(cls, path: Path) -> Tenants:
        """Read a YAML file of tenants. A warning is logged if every account of this machine may read it.

        Raises:
            InvalidInput: with all that is wrong, each fault with its line, and never with a key.
        """
        found, lines, faults = _read(path)
        try:
            file = _File.model_validate(found)
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
        tenants = {name: Tenant(name, settings.limits) for name, settings in file.tenants.items()}
        return cls({_identity(key): tenants[name] for name, of in file.tenants.items() for key in of.keys})

    @property
    def need_keys(self) -> bool:
        """Whether requests need an API key."""
        return self._by_key is not None

    def of(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header.

        Raises:
            ApiError: 401.
        """
        if self._by_key is None:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = [tenant for known, tenant in self._by_key.items() if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not found:
            what = (
                "Incorrect API key provided"
                if authorization
                else "No API key provided: send Authorization: Bearer …"
            )
            raise ApiError(401, what, code="invalid_api_key")
        return found[0]


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


_HASHED = "sha256:"
_LEVELS = 5  # of the file: tenants, a tenant, its keys, one of them; what lies deeper is at fault anyway
_Place = tuple[object, ...]
_EXAMPLE = "tenants: {shop: {keys: [sk-…], limits: {concurrency: 16}}}"
_FORMS = {  # of pydantic's errors: what is wrong, what would be right
    "dict_type": ("is not a mapping of names", f"write {_EXAMPLE}"),
    "model_type": ("is not a mapping of names", f"write {_EXAMPLE}"),
    "tuple_type": ("is not a list", "write keys: [sk-…]"),
    "string_type": ("is not text", "put what looks like a number, a date or true in quotes"),
    "missing": ("is missing", f"write {_EXAMPLE}"),
    "too_short": ("is empty", "name at least one"),
    "extra_forbidden": ("has a name that is not known", ""),
}


def _identity(key: str) -> str:
    """SHA-256 (hex) of a key that is written as itself, or as "sha256:…"."""
    return key.removeprefix(_HASHED).lower() if key.startswith(_HASHED) else _digest(key)


def _read(path: Path) -> tuple[Any, dict[_Place, int], list[Fault]]:
    """What a file of keys holds, the line of each value, and what is wrong with the YAML of it.

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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        fix = "what stands there is not shown: it may be a key; quote keys that hold : # or other signs"
        fault = Fault("is not YAML", str(path), mark and mark.line + 1, fix=fix)
    raise InvalidInput(str(path), [fault]) from None


def _note_lines(node: yaml.Node | None, place: _Place, lines: dict[_Place, int], faults: list[Fault]) -> None:
    """Note the line of each value, and what YAML would pass over: a name that stands twice."""
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
    """What pydantic says, without what it was said of."""
    faults = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        place: _Place = tuple(part for part in fault["loc"] if part != "[key]")
        line = next(lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in lines)
        problem, fix = _FORMS.get(fault["type"], (fault["msg"], ""))
        if fault["type"] == "extra_forbidden":  # that name may be a key: it is not shown
            known: type[BaseModel] = _Tenant if len(place) == 3 else Limits if len(place) > 3 else _File
            place, fix = place[:-1], f"there are {', '.join(known.model_fields)}"
        faults.append(Fault(problem, line=line, key=_dotted(place), fix=fix))
    return faults


def _faults_of_keys(tenants: Mapping[Any, Any], lines: Mapping[_Place, int]) -> list[Fault]:
    """Tenants without a name, and keys that let in nobody, or somebody else."""
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
    """What is wrong with a key by itself, and what would be right; "" if nothing is."""
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

"""Who asks, and how much they may: API keys, requests and tokens a minute, requests at the same time."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import Fault, InvalidInput
from pipeline.gateway.errors import ApiError


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
        """Read a YAML file of tenants.

        Raises:
            InvalidInput: with all that is wrong.
        """
        try:
            file = _File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InvalidInput(str(path), [Fault(str(error.strerror))]) from None
        except yaml.YAMLError as error:
            raise InvalidInput(str(path), [Fault(f"is not YAML: {error}")]) from None
        except ValidationError as error:
            faults = [Fault(fault["msg"], key=".".join(map(str, fault["loc"]))) for fault in error.errors()]
            raise InvalidInput(str(path), faults) from None
        by_key: dict[str, Tenant] = {}
        for name, settings in file.tenants.items():
            tenant = Tenant(name, settings.limits)
            for key in settings.keys:
                by_key[key.removeprefix("sha256:") if key.startswith("sha256:") else _digest(key)] = tenant
        return cls(by_key)

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

"""Where a Redis or Valkey server is, as a URL says it. A password is never part of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pipeline.cache.password import PASSWORD, without_password

_PORT = 6379
_TLS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
SCHEMES = tuple(_TLS)


@dataclass(frozen=True, slots=True)
class Address:
    """A server and one of its databases."""

    host: str
    port: int = _PORT
    database: int = 0
    tls: bool = False
    ca: str | None = None  # file of the authority that signed the server's certificate; the system's without
    user: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read redis://[user@]host[:port][/database], rediss:// for TLS, with ?ca=FILE; valkey:// is the same.

        Raises:
            ValueError: it is none; the text says what is wrong and never shows a password.

        >>> Address.parse("rediss://cache.internal/2?ca=/etc/ca.pem").database
        2
        """
        parts = urlsplit(without_password(url))
        faults = []
        if parts.scheme not in _TLS:
            faults.append(f"{parts.scheme}:// is none of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
        if not parts.hostname:
            faults.append("it names no host")
        database = parts.path.strip("/")
        if database and not database.isdecimal():
            faults.append(f"the database is a number, not {database}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        faults += [f"{name} is no option: only ca is" for name in options if name != "ca"]
        if "ca" in options and not _TLS.get(parts.scheme):
            faults.append("ca needs rediss:// or valkeys://")
        try:
            port = parts.port or _PORT
        except ValueError as error:
            port = 0
            faults.append(str(error))
        if faults:
            raise ValueError(f"{url}: {'; '.join(faults)}")
        return cls(
            parts.hostname or "",
            port,
            int(database or 0),
            _TLS[parts.scheme],
            options.get("ca"),
            parts.username,
        )

    def options(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """What a client is opened with; the password is that of the environment."""
        given: dict[str, Any] = {"host": self.host, "port": self.port, "db": self.database}
        if self.user:
            given["username"] = self.user
        if environ.get(PASSWORD):
            given["password"] = environ[PASSWORD]
        if self.tls:
            given |= {
                "ssl": True,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_ca_certs": self.ca,
            }
        return given

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.database}"

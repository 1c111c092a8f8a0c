"""The password of a cache server: of the environment, never of an address, which is written down and printed."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

PASSWORD = "PIPELINE_CACHE_PASSWORD"  # environment variable


def without_password(url: str) -> str:
    """The address, if it holds no password; else a ValueError that does not show it."""
    parts = urlsplit(url)
    options = {name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if parts.password is not None or options & {"password", "sslpassword"}:
        raise ValueError(f"the address of the cache holds a password: put it into {PASSWORD} instead")
    return url

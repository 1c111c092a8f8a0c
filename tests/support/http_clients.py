"""HTTP requests of tests to servers on this machine.

A new client of httpx reads all certificates of the world first, which takes longer than most tests.
"""

from __future__ import annotations

from typing import Any

import httpx
import openai

# Each request has a connection of its own.
http = httpx.Client(
    trust_env=False, verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
)


def http_client(**settings: Any) -> httpx.Client:
    """Make a client that keeps its connections."""
    return httpx.Client(trust_env=False, verify=False, **settings)


def openai_client(url: str, key: str = "none", *, timeout_s: float = 20) -> openai.OpenAI:
    """Make OpenAI's client of a server, which asks nothing twice."""
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        timeout=timeout_s,
        http_client=http_client(timeout=timeout_s),
    )

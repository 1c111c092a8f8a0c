"""Attacks on a deployment: one function each, in a module for each way in. `benchmarks/attack.py` runs and judges them.

@attack("json-depth", "a body of 3 MB of brackets")
async def json_depth(target: Target) -> None:
    await target.post("/v1/chat/completions", content=b"[" * 3_000_000)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from pipeline.triton.running import RunningServer


@dataclass(frozen=True, slots=True)
class Target:
    """The deployment under attack, as the attacker sees it.

    Attributes:
        record: Addresses of the deployment.
        model: Name of the model.
        key: API key of the attacker.
        sent: Status, or name of the error, of the attacker's requests so far -> their number.
    """

    record: RunningServer
    model: str
    key: str
    sent: Counter[str]

    def client(self, key: str | None, *, timeout_s: float = 120.0) -> httpx.AsyncClient:
        """Open a client of the gateway.

        Args:
            key: API key; None sends none.
            timeout_s: Longest wait for anything.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self.record.gateway_url, headers=headers, limits=limits, trust_env=False,
            timeout=httpx.Timeout(timeout_s, pool=None),
        )  # fmt: skip

    async def post(self, path: str, *, times: int = 1, **request: Any) -> list[str]:
        """Send a POST request as the attacker, and read the whole answer; count its status.

        Args:
            path: Path at the gateway.
            times: How many at once.
            request: Arguments of httpx, such as `json` or `content`.

        Returns:
            The text of each answer; of one without an answer, the name of the error.
        """
        if "content" in request:
            request = {"headers": {"Content-Type": "application/json"}, **request}
        async with self.client(self.key) as client:

            async def send() -> str:
                try:
                    answer = await client.post(path, **request)
                except httpx.HTTPError as error:
                    self.sent[type(error).__name__] += 1
                    return type(error).__name__
                self.sent[str(answer.status_code)] += 1
                return answer.text

            return await asyncio.gather(*(send() for _ in range(times)))

    async def complete(self, *, times: int = 1, **fields: Any) -> list[str]:
        """Ask /v1/completions for 8 greedy tokens, with further fields.

        Args:
            times: How many requests at once.
            fields: Fields of the body.
        """
        body = {
            "model": self.model,
            "prompt": "Hello",
            "max_tokens": 8,
            "temperature": 0,
            "cache": False,
            **fields,
        }
        return await self.post("/v1/completions", times=times, json=body)

    async def chat(self, content: str = "Hello", *, times: int = 1, **fields: Any) -> list[str]:
        """Ask /v1/chat/completions for 8 greedy tokens, with further fields."""
        body: Mapping[str, Any] = {
            "model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0,
            "cache": False, **fields,
        }  # fmt: skip
        return await self.post("/v1/chat/completions", times=times, json=body)


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: Its name, beginning with the way in.
        what: A line that says what is sent.
        run: Sends it, and returns when all is answered.
        limit_s: Longest time until all of the attacker's own requests are answered.
    """

    name: str
    what: str
    run: Callable[[Target], Awaitable[None]]
    limit_s: float


ATTACKS: list[Attack] = []
_Run = Callable[[Target], Awaitable[None]]


def attack(name: str, what: str, *, limit_s: float = 120.0) -> Callable[[_Run], _Run]:
    """Register an attack; see `Attack` for the arguments."""

    def register(run: _Run) -> _Run:
        ATTACKS.append(Attack(name, what, run, limit_s))
        return run

    return register

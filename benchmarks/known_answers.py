"""Clients that ask all the time for greedy answers that are known beforehand, and judge each; `drill.py` says how."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx

QUESTIONS, TOKENS = 24, 120
POLL_S, BETWEEN_S = 0.05, 1.0


class KnownAnswerLoad:
    """Clients that ask all the time, and count what becomes of each answer."""

    def __init__(self, url: str, model: str, *, streams: int, hung_s: float) -> None:
        self._model, self._streams = model, streams
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(hung_s, pool=None), limits=limits, trust_env=False
        )
        self._expected: dict[int, str] = {}
        self._done = [0] * streams
        self.answers: Counter[str] = Counter()
        # Outcomes, of "cut" and "refused", that the victim explains.
        self.may_be_cut: tuple[str, ...] = ()
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """Ask every question once, while nothing is wrong."""
        for question in range(QUESTIONS):
            answer = await self._client.post("/v1/completions", json=self._body(question, stream=False))
            answer.raise_for_status()
            self._expected[question] = answer.json()["choices"][0]["text"]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask in the background."""
        tasks = [asyncio.create_task(self._ask_for_ever(number)) for number in range(self._streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    async def settle(self) -> None:
        """Wait for the end of all answers that are under way now."""
        before = list(self._done)
        while any(done == earlier for done, earlier in zip(self._done, before, strict=True)):
            await asyncio.sleep(POLL_S)

    async def is_right(self) -> bool:
        """Ask once, and say whether the answer is right."""
        return await self._ask(0, stream=False) == "right"

    async def _ask_for_ever(self, client: int) -> None:
        for turn in itertools.count():
            question = (client + turn * self._streams) % QUESTIONS
            outcome = await self._ask(question, stream=(client + turn) % 4 != 0)
            self.answers[outcome] += 1
            self._done[client] += 1
            if outcome != "right":
                # Else clients would take the processors from a deployment that is being started.
                await asyncio.sleep(BETWEEN_S if outcome == "refused" else POLL_S)

    async def _ask(self, question: int, *, stream: bool) -> str:
        parts: list[str] = []
        try:
            outcome = await (self._read_stream if stream else self._read_whole)(question, parts)
        except httpx.TimeoutException:
            outcome = "hung"
        except httpx.ConnectError:
            outcome = "refused"
        except httpx.TransportError:
            outcome = "cut"
        text, expected = "".join(parts), self._expected[question]
        as_expected = text == expected if outcome == "right" else expected.startswith(text)
        if not as_expected or (outcome in ("cut", "refused") and outcome not in self.may_be_cut):
            self.wrong.append(f"{outcome}: {text!r} instead of {expected!r}")
            return "wrong"
        return outcome

    async def _read_whole(self, question: int, parts: list[str]) -> str:
        answer = await self._client.post("/v1/completions", json=self._body(question, stream=False))
        if answer.status_code != 200:
            return "error" if answer.json()["error"]["message"] else "wrong"
        parts.append(answer.json()["choices"][0]["text"])
        return "right"

    async def _read_stream(self, question: int, parts: list[str]) -> str:
        asked = self._body(question, stream=True)
        async with self._client.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                return "error" if json.loads(await answer.aread())["error"]["message"] else "wrong"
            ended = ""
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = "right"
                elif data and "error" in (event := json.loads(data)):
                    ended = "error"
                elif data:
                    parts.append(event["choices"][0]["text"])
            return ended or "cut"

    def _body(self, question: int, *, stream: bool) -> dict[str, Any]:
        # Long enough that many are under way at any time; of equal length, so that no two share an answer.
        return {
            "model": self._model, "prompt": f"Question {question}: where is parcel number {question * 37}?",
            "temperature": 0, "max_tokens": TOKENS, "min_tokens": TOKENS, "stream": stream, "cache": False,
        }  # fmt: skip

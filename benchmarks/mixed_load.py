"""Requests of all kinds that clients send to a deployment, different each time and the same in every run.

`Mix` is used by `soak.py`, whose page says what share each kind has.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from typing import Any

from pipeline.bench.accept.state import questions
from pipeline.triton.deployment import DeploymentLimits

LETTERS, LONGEST_ANSWER, POOL = string.ascii_lowercase + "  ", 32, 8
TENANTS = ("shop", "desk", "lab")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string"}},
                "required": ["order"],
            },
        },
    }
    for name, what in (
        ("track_order", "Find out where an order is."),
        ("send_invoice", "Send the invoice of an order again."),
    )
]
ORDERS = ("TP-174685", "TP-205873")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the mix.

    Attributes:
        path: Path at the gateway.
        body: JSON.
        tenant: Tenant that asks.
        leaves: The client leaves after some chunks.
        reads_slowly: The client pauses between chunks.
        repeats: Name of a greedy question that is asked again and again; each answer must be as the first.
        form: Expression that a complete answer must match as a whole.
    """

    path: str
    body: dict[str, Any]
    tenant: str
    leaves: bool = False
    reads_slowly: bool = False
    repeats: str | None = None
    form: str | None = None


class Mix:
    """Requests that are different each time, and the same in every run."""

    def __init__(self, model: str, limits: DeploymentLimits, *, guided: bool) -> None:
        self._model, self._limits, self._guided, self._random = model, limits, guided, random.Random(0)
        # Real questions, because the cache keeps answers that came to their end.
        self._pool = [str(turns[0]["content"]) for turns in questions(POOL)]

    def next(self) -> Request:
        chance, longest = self._random, self._limits.max_output_tokens
        path, tenant = "/v1/chat/completions", chance.choice(TENANTS)
        kind = chance.random()
        if kind < 0.2:
            number = chance.randrange(POOL)
            body = self._body(path, self._pool[number], temperature=0, max_tokens=min(128, longest))
            return Request(path, body, tenant, repeats=f"{tenant} {number}")
        if kind < 0.3:
            return self._with_tools(path, tenant)
        if kind < 0.4 and self._guided:
            return self._held_to_form(path, tenant)
        # Of letters at random a tokenizer makes nearly as many tokens, and never more; a template adds some.
        most = max(1, self._limits.max_input_tokens - 32)
        text = self._text(most if kind < 0.5 else chance.randint(1, most))
        if chance.random() < 0.4:
            path = "/v1/completions"
        leaves, reads_slowly = chance.random() < 0.15, chance.random() < 0.05
        more: dict[str, Any] = {
            "max_tokens": chance.randint(1, min(LONGEST_ANSWER, longest)),
            "temperature": 0,
        }
        if leaves or reads_slowly:
            more = {"max_tokens": longest, "min_tokens": longest, "temperature": 0}
        match chance.randrange(5):
            case 0:
                more |= {"temperature": 0.8, "top_p": 0.9, "seed": chance.randrange(1000)}
            case 1:
                more |= {"stop": self._text(3).strip() or "x"}
        body = self._body(path, text, **more)
        if leaves or reads_slowly:
            body["stream"] = True
        return Request(path, body, tenant, leaves, reads_slowly)

    def _with_tools(self, path: str, tenant: str) -> Request:
        """A question that the model calls a tool for; half of them leave it no choice."""
        order, choice = self._random.choice(ORDERS), self._random.choice(("auto", "required"))
        more = {"tools": TOOLS, "tool_choice": choice, "temperature": 0, "max_tokens": 64}
        body = self._body(path, f"Where is my order {order}?", **more)
        return Request(path, body, tenant, repeats=f"{order} {choice}")

    def _held_to_form(self, path: str, tenant: str) -> Request:
        """A form that no other request has, or one of a few."""
        number = self._random.randrange(10**6) if self._random.random() < 0.5 else self._random.randrange(4)
        schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4 + number % 5}}}
        schema |= {"required": ["a"], "description": str(number)}
        given, expected = self._random.choice(
            [
                ({"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}},
                 r'\{"a":".*"\}'),
                ({"guided_regex": f"{number}-[0-9]{{4}}"}, f"{number}-[0-9]{{4}}"),
                ({"guided_choice": [f"yes {number}", f"no {number}"]}, f"(yes|no) {number}"),
                ({"guided_grammar": f'root ::= "{number}" ("a" | "b")+ "c"'}, f"{number}[ab]+c"),
            ]
        )  # fmt: skip
        body = self._body(path, self._text(200), max_tokens=48, temperature=0, **given)
        return Request(path, body, tenant, form=expected)

    def _text(self, longest: int) -> str:
        return "".join(self._random.choices(LETTERS, k=longest)).strip() or "a"

    def _body(self, path: str, text: str, **more: Any) -> dict[str, Any]:
        asked = (
            {"prompt": text}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        return {"model": self._model, "stream": self._random.random() < 0.75, **asked, **more}


def text_of(event: dict[str, Any]) -> str:
    """The text of a part, or of a whole answer, with the names and arguments of calls.

    Raises:
        ValueError: It is an error within a stream.
    """
    if "error" in event:
        raise ValueError(json.dumps(event["error"]))
    parts = []
    for choice in event["choices"]:
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        parts.append(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            parts += [call["function"].get("name") or "", call["function"].get("arguments") or ""]
    return "".join(parts)


def reason_of(event: dict[str, Any]) -> str:
    """The finish reason of the only choice; empty where it has none yet."""
    return str((event["choices"][0].get("finish_reason") or "") if event.get("choices") else "")

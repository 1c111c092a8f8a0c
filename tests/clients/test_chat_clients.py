"""Chat clients: each has the words of the engine, whole and streamed.

`chat.py` or `chat.mjs` of a program's folder gets a question as its argument, asks it at temperature 0 twice, and
prints {"plain": the whole answer, "streamed": [its pieces, none of them empty]}.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import Program, scripts

QUESTION = "Hi, this is Zoë. Where is my order TP-174685?"


@pytest.fixture(scope="session")
def answer(variables: dict[str, str]) -> str:
    """What the gateway answers to a bare HTTP request."""
    body = {
        "model": variables["MODEL"],
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{variables['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    assert text.startswith("Hi Zoë! Order TP-174685 is on its way 📦")
    return text


@pytest.mark.parametrize("script", scripts("chat"), ids=lambda script: script.parent.name)
def test_chat(program: Callable[[str], Program], answer: str, script: Path) -> None:
    said = program(script.parent.name).script(script.name, QUESTION)
    assert said["plain"] == answer
    assert "".join(said["streamed"]) == answer
    assert len(said["streamed"]) > 3

"""Tools, as foreign programs use them, through the gateway of a model whose chat template takes none.

The model of `tiny-cpu` has learnt two tools, and is asked by each program. A second one is scripted: it calls
`send_invoice` for an order whose invoice is asked for, and `track_order` for each other one, in the way that the prompt
asks for, and then says what the tools returned. So the gateway and the program are judged: the section of the prompt,
calls that come in pieces, several calls at once, and results on their way back.

`tools.py` or `tools.mjs` of a program's folder gets questions as arguments, and results in $RESULTS: {name of a tool:
{its argument: result}}. It offers both tools at temperature 0, calls those that the model asks for, and prints a list
of {"calls": [[name, arguments], …], "answer": the last text}, one for each question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.client.testing import Received, Reply
from tests.gateway.conftest import starter
from tests.support.programs import Program, scripts

RESULTS = {
    "track_order": {"TP-174685": {"city": "Hamburg"}, "TP-205873": {"city": "Madrid"}},
    "send_invoice": {"TP-285190": {"name": "Mina"}},
}
FIRST = ["track_order", {"order": "TP-174685"}]
SECOND = ["track_order", {"order": "TP-205873"}]
INVOICE = ["send_invoice", {"order": "TP-285190"}]
BOTH_ORDERS = "Where are my orders TP-174685 and TP-205873?"
# Question -> the calls, and what the answer has of their results.
ASKED = {
    "Where is my order TP-174685?": ([FIRST], ["Hamburg"]),
    BOTH_ORDERS: ([FIRST, SECOND], ["Hamburg", "Madrid"]),
    "Where is my order TP-205873? And I need the invoice for order TP-285190.": (
        [SECOND, INVOICE],
        ["Madrid", "Mina"],
    ),
    "Is shipping free?": ([], ["no tool"]),
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def scripted(received: Received) -> Reply:
    """The answer of a model that has learnt to call the tools, in pieces of a few characters."""
    prompt = received.prompt
    question = prompt.rpartition("\nassistant: ")[2] if "<tool_response>" in prompt else prompt
    if results := re.findall(r"<tool_response>\n(.*?)\n</tool_response>", question, re.DOTALL):
        text = f"They say: {', '.join(results)}"
    elif not (calls := wanted(prompt)):
        text = "This needs no tool."
    elif prompt.endswith('"arguments": '):
        # The call is begun.
        text = json.dumps(calls[0]["arguments"])
    elif guide := received.tensors.get("guided_decoding_guide"):
        said = calls if json.loads(str(guide[0])).get("type") == "array" else calls[0]
        text = json.dumps(said, separators=(",", ":"))
    else:
        text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        stopped = "</tool_call>" in list(received.tensors.get("stop_words", ()))
        text = text.partition("\n</tool_call>")[0] if stopped else text
    return Reply([text[at : at + 5] for at in range(0, len(text), 5)])


def wanted(prompt: str) -> list[dict[str, object]]:
    """The calls that the last message asks for, of tools that stand in the prompt."""
    section, _, question = prompt.rpartition("answer in plain words.")
    calls = [
        {"name": "send_invoice" if of else "track_order", "arguments": {"order": order}}
        for of, order in re.findall(r"(invoice for order )?(TP-\d{6})", question)
    ]
    return [call for call in calls if f'"name": "{call["name"]}"' in section]


@pytest.fixture(scope="module")
def tool_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What programs know of the gateway."""
    with ExitStack() as stack:
        start = starter(tmp_path_factory.mktemp("gateway"), stack)
        running = start(scripted, template=TEMPLATE, tool_section=True)
        yield {
            "OPENAI_BASE_URL": f"{running.url}/v1",
            "OPENAI_API_KEY": "none",
            "GATEWAY_URL": running.url,
            "MODEL": "tiny",
            "RESULTS": json.dumps(RESULTS),
        }


@pytest.mark.parametrize("script", scripts("tools"), ids=lambda script: script.parent.name)
def test_tools(tool_variables: dict[str, str], script: Path) -> None:
    said = Program.install(script.parent.name, tool_variables).script(script.name, *ASKED)
    for (question, (calls, words)), answer in zip(ASKED.items(), said, strict=True):
        assert sorted(answer["calls"], key=str) == sorted(calls, key=str), question
        assert [word for word in words if word not in answer["answer"]] == [], answer


@pytest.mark.parametrize("script", scripts("tools"), ids=lambda script: script.parent.name)
def test_the_small_model_calls_tools(variables: dict[str, str], script: Path) -> None:
    learnt = {question: expected for question, expected in ASKED.items() if expected[0]}
    program = Program.install(script.parent.name, variables | {"RESULTS": json.dumps(RESULTS)})
    for (question, (calls, words)), answer in zip(
        learnt.items(), program.script(script.name, *learnt), strict=True
    ):
        assert sorted(answer["calls"], key=str) == sorted(calls, key=str), question
        assert [word for word in words if word not in answer["answer"]] == [], answer


def test_tool_choice_of_all_kinds(tool_variables: dict[str, str]) -> None:
    said = Program.install("openai_python", tool_variables).script("choices.py", BOTH_ORDERS)
    for kind in ("default", "auto", "allowed", "several", "several required"):
        assert said[kind] == [FIRST, SECOND], kind
    for kind in ("required", "named", "allowed and required", "one", "one required"):
        assert said[kind] == [FIRST], kind
    assert said["none"] == said["others allowed"] == []

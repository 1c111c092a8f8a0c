"""What requests may hold besides what is honoured, in every API that models answer."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.client.testing import Received, Reply
from pipeline.gateway.api.bounds import MAX_SHOWN
from pipeline.gateway.api.parsing import IGNORED_FIELDS, MAX_TOKENS
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http
from tests.support.scripted_model import TEMPLATE

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"id": {"type": "integer"}}}
FUNCTION = {"name": "track", "description": "Find a parcel.", "parameters": PARAMETERS}
# A request of each API, and the objects of it that fields are added to.
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "tiny",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "track", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "Oslo"},
            {"role": "user", "content": "Hi"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "track"}}
        ]}},
    },
    TEXT: {"model": "tiny", "temperature": 0, "prompt": "Once", "stream": True, "stream_options": {}},
    RESPONSES: {
        "model": "tiny",
        "temperature": 0,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "track", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "Oslo"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "track"}]},
    },
    MESSAGES: {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 20,
        "system": [{"type": "text", "text": "Be brief."}],
        "output_config": {"effort": "low"},
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "track", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "Oslo"}],
                    }
                ],
            },
        ],
        "tools": [{"name": "track", "description": "Find a parcel.", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
    },
}  # fmt: skip
PLACES = {
    CHAT: [
        "", "messages.0", "messages.0.content.0", "messages.1.tool_calls.0", "messages.1.tool_calls.0.function",
        "messages.3", "tools.0", "tools.0.function", "tool_choice", "tool_choice.allowed_tools", "stream_options",
        "response_format",
    ],
    TEXT: ["", "stream_options"],
    RESPONSES: [
        "", "input.0", "input.0.content.0", "input.1", "input.2", "tools.0", "tool_choice", "reasoning", "text",
        "text.format",
    ],
    MESSAGES: [
        "", "system.0", "messages.0", "messages.1.content.0", "messages.2.content.0.content.0", "tools.0",
        "tool_choice", "output_config",
    ],
}  # fmt: skip
# Hosted tools as their APIs write them, and choices that require them.
HOSTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    CHAT: ({"type": "web_search"}, {"type": "web_search"}),
    RESPONSES: ({"type": "mcp", "server_label": "docs"}, {"type": "mcp", "server_label": "docs"}),
    MESSAGES: ({"type": "web_search_20250305", "name": "web_search"}, {"type": "tool", "name": "web_search"}),
}
TOOL_APIS = sorted(HOSTED)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
# No API knows them: theirs are of one case.
names = st.builds("{}Xy{}".format, st.text(max_size=40), st.text(max_size=40)).filter(
    lambda name: not re.fullmatch(r"\w+", name) or name not in TEMPLATE
)


@pytest.fixture(scope="module")
def tolerant(shared_start: Start) -> Running:
    return shared_start(Reply(["On ", "its ", "way"]))


@pytest.fixture(scope="module")
def strict(shared_start: Start) -> Running:
    return shared_start(Reply(["On ", "its ", "way"]), strict=True)


def ask(running: Running, api: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(f"{running.url}{api}", json=body, timeout=20)


def asked(running: Running) -> tuple[str, dict[str, Any]]:
    """What the model got last."""
    received: Received = running.upstream.requests[-1]
    return received.prompt, {name: list(values) for name, values in received.tensors.items()}


def answer(api: str, response: httpx.Response) -> Any:
    """The texts of an answer, without ids and times."""
    assert response.status_code == 200, response.text
    pattern = {
        CHAT: r'"content": ?"(.*?)"', TEXT: r'"text": ?"(.*?)"', RESPONSES: r'"text": ?"(.*?)"',
        MESSAGES: r'"text": ?"(.*?)"',
    }[api]  # fmt: skip
    return re.findall(pattern, response.text)


def message(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    text: str = response.json()["error"]["message"]
    return text


def object_at(body: dict[str, Any], place: str) -> dict[str, Any]:
    found: Any = body
    for step in filter(None, place.split(".")):
        found = found[int(step) if step.isdecimal() else step]
    assert isinstance(found, dict)
    return found


def shown(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.$@:/-]", "?", name)


@pytest.mark.parametrize("api", REQUESTS)
def test_unknown_fields_change_no_answer_and_are_named(tolerant: Running, strict: Running, api: str) -> None:
    plain = answer(api, ask(tolerant, api, REQUESTS[api]))
    assert plain
    expected = asked(tolerant)
    additions = st.dictionaries(
        st.sampled_from(PLACES[api]), st.tuples(names, values), min_size=1, max_size=3
    )

    @settings(max_examples=12)
    @given(additions)
    def check(added: dict[str, tuple[str, Any]]) -> None:
        body = copy.deepcopy(REQUESTS[api])
        for place, (name, value) in added.items():
            object_at(body, place)[name] = value
        places = [f"{place}.{name[:MAX_SHOWN]}".removeprefix(".") for place, (name, _) in added.items()]
        response = ask(tolerant, api, body)
        assert answer(api, response) == plain
        assert asked(tolerant) == expected
        assert sorted(response.headers[IGNORED_FIELDS].split(", ")) == sorted(map(shown, places))
        refused = message(ask(strict, api, body))
        assert [place for place in places if place not in refused] == []
        assert "Unrecognized request argument supplied" in refused

    check()


@pytest.mark.parametrize("api", REQUESTS)
def test_strict_recipes_take_what_apis_have(strict: Running, api: str) -> None:
    response = ask(strict, api, {**REQUESTS[api], "metadata": {"user_id": "me"}, "service_tier": "auto"})
    assert answer(api, response)


def test_what_agents_send_by_default(tolerant: Running) -> None:
    """Fields of Claude Code 2.1 and Codex 0.171 that ask for nothing here; those that ask for nothing are not named."""
    claude = ask(tolerant, MESSAGES, {
        **REQUESTS[MESSAGES], "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}, "citations": None}],
        "mcp_servers": [],
    })  # fmt: skip
    assert claude.status_code == 200
    named = "metadata, context_management, system.0.cache_control, thinking"
    assert claude.headers[IGNORED_FIELDS] == named
    tools = [
        *REQUESTS[RESPONSES]["tools"],
        {"type": "namespace", "name": "agents", "tools": []},
        {"type": "web_search"},
    ]
    codex = ask(tolerant, RESPONSES, {
        **REQUESTS[RESPONSES], "client_metadata": {"turn": "1"}, "tools": tools, "tool_choice": "auto", "stream": True,
    })  # fmt: skip
    assert codex.status_code == 200
    assert codex.headers[IGNORED_FIELDS] == "client_metadata, tools.1, tools.2"


@pytest.mark.parametrize("api", TOOL_APIS)
def test_tools_of_the_server_are_left_out(tolerant: Running, strict: Running, api: str) -> None:
    request, (hosted, choice) = REQUESTS[api], HOSTED[api]
    plain = answer(api, ask(tolerant, api, request))
    expected = asked(tolerant)
    body = {**request, "tools": [hosted, *request["tools"]]}
    response = ask(tolerant, api, body)
    assert (answer(api, response), response.headers[IGNORED_FIELDS]) == (plain, "tools.0")
    assert asked(tolerant) == expected
    alone = {**request, "tools": [hosted], "tool_choice": {"type": "auto"} if api == MESSAGES else "auto"}
    assert answer(api, ask(tolerant, api, alone)) == plain
    kind = re.escape(hosted["type"])
    for tools in (alone["tools"], body["tools"]):
        refused = ask(tolerant, api, {**request, "tools": tools, "tool_choice": choice})
        assert re.search(rf"tool_choice: .*runs none of tools\.0 \({kind}\)", message(refused))
    required = {"type": "any"} if api == MESSAGES else "required"
    assert re.search(kind, message(ask(tolerant, api, {**alone, "tool_choice": required})))
    unlike = {"type": "tool", "name": "other"} if api == MESSAGES else {"type": "function", "name": "other"}
    assert "tool_choice: must be" in message(ask(tolerant, api, {**alone, "tool_choice": unlike}))
    assert f"tools.0.type: '{hosted['type']}' is not supported" in message(ask(strict, api, body))


def test_allowed_tools_without_those_of_the_server(tolerant: Running) -> None:
    request, (hosted, choice) = REQUESTS[RESPONSES], HOSTED[RESPONSES]
    own = {"type": "function", "name": "track"}
    body = {**request, "tools": [hosted, *request["tools"]]}

    def allow(mode: str, *tools: dict[str, Any]) -> httpx.Response:
        return ask(
            tolerant,
            RESPONSES,
            {**body, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}},
        )

    assert allow("auto", choice, own).status_code == 200
    assert FUNCTION["name"] in asked(tolerant)[0].rpartition("\n")[2]
    assert allow("auto", choice).status_code == 200
    assert not asked(tolerant)[0].rpartition("\n")[2], "no tool is allowed that the model could call"
    assert allow("required", choice, own).status_code == 200
    assert "runs none of tools.0 (mcp)" in message(allow("required", choice))


@pytest.mark.parametrize(
    ("api", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens"), (RESPONSES, "max_output_tokens"),
     (MESSAGES, "max_tokens")],
)  # fmt: skip
def test_limits_are_clamped(borrow: Start, strict: Running, api: str, field: str) -> None:
    """The model gives 40 tokens."""
    running = borrow(Reply(["a "] * 60))
    body = {**REQUESTS[api], field: 32_000, "stream": False}
    body.pop("stream_options", None)
    response = ask(running, api, body)
    assert (response.status_code, response.headers[MAX_TOKENS]) == (200, "40")
    assert asked(running)[1]["max_tokens"] == [40]
    assert re.search(r'"(length|max_tokens|max_output_tokens)"', response.text), "it says that it was cut off"
    assert MAX_TOKENS not in ask(running, api, {**body, field: 40}).headers
    assert re.search(
        rf"'{field}'.* is too large: 32000|{field}.* is too large: 32000", message(ask(strict, api, body))
    )


def test_what_would_change_the_answer_is_refused(tolerant: Running) -> None:
    for fields, said in [
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: Input should be"),
        ({"temperature": "warm"}, "temperature: Input should be a valid number"),
        ({"logits_processors": ["x"]}, "logits_processors is not supported"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "whitespace_pattern is not supported",
        ),
    ]:
        response = ask(tolerant, CHAT, {**REQUESTS[CHAT], **fields, "colour": "red"})
        assert said in message(response)


def test_the_header_is_short_and_one_line(tolerant: Running) -> None:
    body = {**REQUESTS[CHAT], "a\r\nx-evil: 1": 1, **{f"field{number}": 1 for number in range(500)}}
    named = ask(tolerant, CHAT, body).headers[IGNORED_FIELDS]
    assert named.startswith("a??x-evil:?1, field0, ")
    assert re.search(r", and \d+ more$", named)
    assert len(named) < 1200


def test_fields_that_the_template_reads_stay(borrow: Start) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }} {{ m.content }}\n{% endfor %}"
    running = borrow(template=template)
    messages = [{"role": "user", "content": "Hi", "reasoning_content": "Think.", "mood": "good"}]
    response = ask(running, CHAT, {"model": "tiny", "messages": messages})
    assert response.headers[IGNORED_FIELDS] == "messages.0.mood"
    assert asked(running)[0] == "user: Think. Hi\n"


@pytest.mark.parametrize(
    ("api", "counted"),
    [(f"{MESSAGES}/count_tokens", "input_tokens"), (f"{RESPONSES}/input_tokens", "input_tokens")],
)
def test_counting_tokens_is_as_tolerant(tolerant: Running, api: str, counted: str) -> None:
    response = ask(tolerant, api, {**REQUESTS[api.rpartition("/")[0]], "colour": "red"})
    assert (response.status_code, response.headers[IGNORED_FIELDS]) == (200, "colour")
    assert json.loads(response.text)[counted] > 0


@pytest.mark.parametrize(
    ("api", "body", "unknown"),
    [
        ("/tokenize", {"prompt": "one two"}, "colour"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi", "mood": "good"}]}, "messages.0.mood"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "web_search"}]}, "tools.0"),
        ("/detokenize", {"tokens": [1, 2]}, "colour"),
    ],
)  # fmt: skip
def test_tokenizers_are_as_tolerant(
    tolerant: Running, strict: Running, api: str, body: dict[str, Any], unknown: str
) -> None:
    plain = {name: value for name, value in body.items() if name != "tools"}
    if "messages" in body:
        plain["messages"] = [{"role": "user", "content": "Hi"}]
    further = body if unknown != "colour" else {**body, "colour": "red"}
    response = ask(tolerant, api, further)
    assert (response.status_code, response.headers[IGNORED_FIELDS]) == (200, unknown)
    assert response.json() == ask(tolerant, api, plain).json()
    assert unknown in message(ask(strict, api, further))


def test_a_template_of_the_request_is_refused_by_tokenizers(tolerant: Running) -> None:
    response = ask(tolerant, "/tokenize", {"prompt": "one", "chat_template": "{{ messages }}"})
    assert "chat_template is not supported" in message(response)

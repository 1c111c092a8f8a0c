"""Bounds of what requests hold: the same in every API, and each refusal names the field as its API does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.api.bounds import (
    MAX_ALL_WORD_CHARS,
    MAX_BODY_BYTES,
    MAX_DEPTH,
    MAX_GUIDE_BYTES,
    MAX_GUIDE_DEPTH,
    MAX_VALUES,
    MAX_WORD_CHARS,
    MAX_WORDS,
)
from pipeline.gateway.api.messages_request import CountTokensRequest
from pipeline.gateway.api.parsing import check_guide, check_json, parse_request
from pipeline.gateway.api.responses.request import ResponseRequest
from pipeline.gateway.api.schema import ChatRequest, CompletionRequest, ModelRequest
from pipeline.gateway.errors import ApiError
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http

HERMES = "{% for message in messages %}{{ message.content }}{% endfor %}<tool_call>{{ tools | tojson }}"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
# Body without more of each API, and the name of `stop` there.
APIS: Mapping[type[ModelRequest], tuple[dict[str, Any], str]] = {
    ChatRequest: (CHAT, "stop"),
    CompletionRequest: ({"prompt": "Hi"}, "stop"),
    ResponseRequest: ({"input": "Hi"}, "stop"),
    CountTokensRequest: (CHAT, "stop_sequences"),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[]{},: \n\N{SNOWMAN}', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\[{', max_size=3), inner, max_size=4)
    ),
)


def refusal_of(kind: type[ModelRequest], fields: Mapping[str, Any]) -> ApiError | None:
    try:
        parsed = parse_request(kind, json.dumps({"model": "m"} | APIS[kind][0] | dict(fields)).encode())
        if isinstance(parsed, ResponseRequest | CountTokensRequest):
            with parsed.own_names():
                parsed.chat(CHAT["messages"])
    except ApiError as error:
        return error
    return None


@given(
    st.lists(st.integers(1, MAX_WORD_CHARS + 20) | st.integers(1, 300), max_size=MAX_WORDS + 2),
    st.sampled_from(list(APIS)),
    st.booleans(),
)
def test_words_have_the_same_bounds_in_every_api(
    lengths: list[int], kind: type[ModelRequest], bad: bool
) -> None:
    refused = refusal_of(kind, {"bad_words" if bad else APIS[kind][1]: ["x" * length for length in lengths]})
    fits = len(lengths) <= MAX_WORDS and max(lengths, default=0) <= MAX_WORD_CHARS
    assert (refused is None) == (fits and sum(lengths) <= MAX_ALL_WORD_CHARS)
    if refused is not None:
        assert (refused.status, refused.param) == (400, "bad_words" if bad else APIS[kind][1])
        assert refused.message.startswith(f"{refused.param}: has ")


@given(JSON, st.integers(0, 2 * MAX_DEPTH))
def test_depth_is_that_of_the_parsed_json_whatever_its_texts_hold(value: Any, more: int) -> None:
    nested: Any = reduce(lambda inner, at: [inner] if at % 2 else {"[": inner}, range(more), value)
    text = json.dumps(nested).encode()
    if more + depth_of(value) > MAX_DEPTH:
        with pytest.raises(ApiError, match=f"body: is nested deeper than {MAX_DEPTH} levels"):
            check_json(text)
    else:
        check_json(text)


def depth_of(value: Any) -> int:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inner), default=0)
    return 0


@pytest.mark.parametrize("value", ["", '\\",[', {}, [], {"a": 1}, [7] * 8, -1e99], ids=str)
def test_whatever_is_repeated_has_too_many_values_at_last(value: Any) -> None:
    # Eight numbers count as one value.
    times = MAX_VALUES * (8 if value == -1e99 else 1)
    check_json(json.dumps([value] * (times // 10)).encode())
    with pytest.raises(ApiError, match="body: has more than"):
        check_json(json.dumps([value] * (times + 10)).encode())


@given(
    st.sampled_from(["json_schema", "regex", "ebnf_grammar"]), st.integers(1, 2 * MAX_GUIDE_DEPTH), st.text()
)
def test_guides_have_a_size_and_a_depth(kind: str, depth: int, literal: str) -> None:
    text = nested_guide(kind, depth, literal)
    if depth > MAX_GUIDE_DEPTH:
        with pytest.raises(ApiError, match=f"a.b: is nested {depth} levels deep, of at most 64"):
            check_guide(kind, text, "a.b", "a")
    else:
        check_guide(kind, text, "a.b", "a")
    with pytest.raises(ApiError, match=rf"a.b: has \d+ bytes, of at most {MAX_GUIDE_BYTES}"):
        check_guide(kind, text + " " * MAX_GUIDE_BYTES, "a.b", "a")


def test_many_faults_have_a_short_answer() -> None:
    for messages, said in (([1] * 20_000, "at most 4096 items"), ([1] * 100, "messages.0: .* and 84 more")):
        refused = refusal_of(ChatRequest, {"messages": messages})
        assert refused is not None
        assert re.search(said, refused.message)
        assert len(refused.message) < 2000


def nested_guide(kind: str, depth: int, literal: str) -> str:
    """A guide of a depth, with brackets and a text that are literal in it."""
    if kind == "json_schema":
        return json.dumps(
            reduce(lambda inner, _: {"(([": inner}, range(depth - 1), {"const": literal + "[{("})
        )
    if kind == "regex":
        return "(" * depth + r"\([[({]\\" * 70 + ")" * depth
    return "root ::= " + "(" * depth + r'"\"((([" [^\]((] ' * 30 + ")" * depth


FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "guided_regex": "a" * 70_000}, "guided_regex"),
    ("/v1/chat/completions", {**CHAT, "guided_choice": ["a" * 7000] * 10}, "guided_choice"),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"grammar": "(" * 65}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "Hi", "guided_json": {"description": "a" * 70_000}}, "guided_json"),
    ("/v1/completions", {"prompt": "Hi", "model": "a" * 1000}, "model"),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {
        "description": "a" * 70_000}}}}, "text.format"),
    ("/v1/responses", {"input": [{}] * 5000}, "input"),
    ("/v1/responses", {"input": "Hi", "stop": ["a"] * 65}, "stop"),
    ("/v1/messages", {**CHAT, "max_tokens": 4, "tools": [{"name": "f", "input_schema": {"description": "a" * 70_000}}]},
     "tools.0.input_schema"),
    ("/v1/messages", {**CHAT, "max_tokens": 4, "stop_sequences": ["a" * 1025]}, "stop_sequences"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bounded(shared_start: Start) -> Iterator[Running]:
    """A gateway that takes large bodies, and whose model must never be asked."""
    running = shared_start(max_body_bytes=MAX_BODY_BYTES, template=HERMES)
    yield running
    assert not running.upstream.requests


@pytest.mark.parametrize(("path", "fields", "place"), FORMS)
def test_what_is_beyond_a_bound_is_refused_by_name(
    bounded: Running, path: str, fields: dict[str, Any], place: str
) -> None:
    answer = http.post(f"{bounded.url}{path}", json={"model": "tiny", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    # Anthropic's errors have no param.
    assert error["message"].startswith(place) if path == "/v1/messages" else error["param"] == place

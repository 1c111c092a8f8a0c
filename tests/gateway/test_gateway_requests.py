"""What requests may ask for beyond one plain answer, as OpenAI's client sees it."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from pipeline.client.testing import Ending, Reply, bls, llmapi
from tests.gateway.conftest import Running, Start

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]
HERMES = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "track",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
    },
}
LISTED = {"id": "call_1", "type": "function", "function": {"name": "track", "arguments": [7]}}
CALLING = [
    "One mo",
    "ment.\n<tool_",
    'call>{"name": "track", "arg',
    'uments": {"id"',
    ": 7}}\n</tool",
    "_call>",
]


def test_calls_of_tools_in_a_stream(borrow: Start) -> None:
    client = borrow(Reply(CALLING), template=HERMES).client()
    chunks = list(client.chat.completions.create(model="tiny", messages=QUESTION, tools=[TOOL], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "One moment."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].id
    assert {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function and call.function.name] == ["track"]
    arguments = [call.function.arguments or "" for call in calls if call.function]
    assert json.loads("".join(arguments)) == {"id": 7}
    assert sum(map(bool, arguments)) > 1, "arguments come in pieces, as the model writes them"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_results_of_tools_reach_the_template(borrow: Start) -> None:
    running = borrow(template=HERMES)
    call = {"id": "call_1", "type": "function", "function": {"name": "track", "arguments": '{"id": 7}'}}
    running.client().chat.completions.create(
        model="tiny",
        tools=[TOOL],
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            },
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "At the border."},
        ],
    )
    prompt = running.upstream.requests[0].prompt
    assert prompt.startswith("system: Be brief.")
    assert '<tool_call>{"name": "track", "arguments": {"id": 7}}</tool_call>' in prompt
    assert "tool: At the border." in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "track"}}])
def test_a_call_that_must_come_is_guided(borrow: Start, choice: Any) -> None:
    running = borrow(Reply(['{"id"', ": 7}"]), template=HERMES)
    answer = running.client().chat.completions.create(
        model="tiny", messages=QUESTION, tools=[TOOL], tool_choice=choice
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert json.loads(call.function.arguments) == {"id": 7}
    (asked,) = running.upstream.requests
    # The model has begun the call, in its own way, and goes on with arguments that the schema holds.
    assert asked.prompt.endswith('<tool_call>\n{"name": "track", "arguments": ')
    assert asked.tensors["guided_decoding_guide_type"] == ["json_schema"]
    assert json.loads(asked.tensors["guided_decoding_guide"][0]) == TOOL["function"]["parameters"]


def test_structure_is_refused_where_the_engine_has_none(start: Start) -> None:
    model = bls()
    kept = [tensor for tensor in model.input if not tensor.name.startswith("guided_decoding")]
    del model.input[:]
    model.input.extend(kept)
    running = start(model=model, template=HERMES)
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}, "stream": True},
    ):
        with pytest.raises(openai.BadRequestError, match="this deployment has no guided decoding"):
            running.client().chat.completions.create(model="tiny", messages=QUESTION, **fields)
    assert not running.upstream.requests


def test_structure_reaches_the_engine(borrow: Start) -> None:
    running = borrow(Reply(["{}"]))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    running.client().chat.completions.create(model="tiny", messages=QUESTION, response_format=form)
    tensors = running.upstream.requests[0].tensors
    assert (tensors["guided_decoding_guide_type"], json.loads(tensors["guided_decoding_guide"][0])) == (
        ["json_schema"],
        schema,
    )


def test_several_prompts_have_choices_one_after_the_other(borrow: Start) -> None:
    running = borrow(Reply(["x", "y"]))
    answer = running.client().completions.create(
        model="tiny", prompt=["One", "Two"], n=2, max_tokens=5, seed=4
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(index, "xy") for index in range(4)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)
    asked = sorted((request.prompt, request.tensors["seed"][0]) for request in running.upstream.requests)
    assert [prompt for prompt, _ in asked] == ["One", "One", "Two", "Two"]
    assert [seed for _, seed in asked[:2]] == [seed for _, seed in asked[2:]]
    stream = running.client().completions.create(
        model="tiny", prompt=["One", "Two"], max_tokens=5, stream=True
    )
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["xy", "xy"]


def test_a_stream_of_many_choices(borrow: Start) -> None:
    """More than `n` allows, as several prompts have several each, and more than there are places."""
    running = borrow([Reply([f"{number} ", "and ", "on"]) for number in range(40)], places=30)
    stream = running.client().completions.create(model="tiny", prompt=["a", "b", "c"], n=13, stream=True)
    texts = ["" for _ in range(39)]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert sorted(texts) == sorted(f"{number} and on" for number in range(39))


def test_echo(borrow: Start) -> None:
    client = borrow(Reply([" upon", " a time"])).client()
    answer = client.completions.create(model="tiny", prompt="Once", echo=True, max_tokens=5)
    assert answer.choices[0].text == "Once upon a time"
    stream = client.completions.create(model="tiny", prompt="Once", echo=True, max_tokens=5, stream=True)
    assert [chunk.choices[0].text for chunk in stream if chunk.choices[0].text] == [
        "Once",
        " upon",
        " a time",
    ]


def test_one_failing_choice_fails_the_request(borrow: Start) -> None:
    replies = [Reply(["a"]), Reply(["a"], ending=Ending.ERROR, error="it broke")]
    with pytest.raises(openai.APIStatusError, match="it broke"):
        borrow(replies).client().completions.create(model="tiny", prompt=["One", "Two"], max_tokens=5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"best_of": 1, "n": 2}, "best_of: must be at least n = 2"),
        ({"best_of": 2, "stream": True}, "best_of: answers that are chosen among cannot be streamed"),
        ({"logprobs": 2}, "no log probabilities but those of the chosen tokens"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        (
            {"logprobs": 2, "presence_penalty": 1, "extra_body": {"bad_words": ["x"]}},
            "logprobs: cannot be told together with presence_penalty, bad_words",
        ),
        ({"prompt": [1, 2, 300]}, "prompt: token id 300 is out of vocabulary"),
        ({"prompt": [[1], [1] * 60]}, "at most 50 tokens; yours has 60"),
        ({"prompt": [[1], []]}, "prompt: must be a text, a list of token ids"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"suffix": "end", "prompt": [1]}, "suffix: needs a prompt that is a text"),
        ({"extra_body": {"allowed_token_ids": [1]}}, "allowed_token_ids is not supported"),
        (
            {"extra_body": {"stream_options": {"include_usage": True}}},
            "only allowed when 'stream' is enabled",
        ),
    ],
)
def test_completions_that_are_refused(refusing: Running, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        refusing.client().completions.create(**{"model": "tiny", "prompt": "Once", "max_tokens": 5, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0: must be"),
        ({"tool_choice": "required"}, "only allowed when 'tools' are specified"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice: must be",
        ),
        (
            {"messages": [{"role": "robot", "content": "Hi"}, {"role": "user"}]},
            "messages.0.role: .*messages.1.content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "this model takes text only"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [LISTED]}]},
            "function.arguments: must be a JSON object, as text",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages.0.tool_calls: must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id: is missing"),
        ({"top_logprobs": 0}, "needs logprobs to be true"),
    ],
)
def test_chats_that_are_refused(refusing: Running, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        refusing.client().chat.completions.create(**{"model": "tiny", "messages": QUESTION, **fields})


def test_tools_are_refused_where_the_template_would_drop_them(borrow: Start) -> None:
    running = borrow(template="{{ messages[0].content }}")
    ask = partial(running.client().chat.completions.create, model="tiny", messages=QUESTION, tools=[TOOL])
    with pytest.raises(openai.BadRequestError, match="the chat template of this model takes none"):
        ask()
    assert ask(tool_choice="none").choices[0].message.content == "Hello world"


def test_a_model_without_a_chat_template_completes_texts(borrow: Start) -> None:
    client = borrow(template=None).client()
    assert (
        client.completions.create(model="tiny", prompt="Once", max_tokens=5).choices[0].text == "Hello world"
    )
    with pytest.raises(openai.BadRequestError, match="This model has no chat template: ask /v1/completions"):
        client.chat.completions.create(model="tiny", messages=QUESTION)


def test_completions_tell_log_probabilities(borrow: Start) -> None:
    client = borrow(Reply(["a", "b"], log_probs=[-0.5, -0.25])).client()
    told = (
        client.completions.create(model="tiny", prompt="Once", max_tokens=5, logprobs=0).choices[0].logprobs
    )
    assert told is not None
    assert (told.tokens, told.token_logprobs, told.text_offset) == (["a", "b"], [-0.5, -0.25], [0, 1])


def test_the_likeliest_tokens_are_told(borrow: Start) -> None:
    """Of two tokens each, where the vocabulary has three: the numbers are those of the softmax."""
    logits = [[0.0, 2.0, 1.0], [5.0, 5.0, -5.0]]
    client = borrow(Reply(["a", "b"], log_probs=[-0.4, -0.7], logits=logits), returns_logits=True).client()
    asked: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.5,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole is not None
    content = whole.content or []
    assert [token for told in streamed if told for token in told.content or ()] == content
    tops = [[(candidate.token, candidate.logprob) for candidate in told.top_logprobs] for told in content]
    assert [[token.split()[-1] for token, _ in top] for top in tops] == [["1", "2"], ["0", "1"]]
    over = math.log(math.exp(0) + math.exp(4) + math.exp(2))  # the logits, divided by the temperature
    assert [value for _, value in tops[0]] == pytest.approx([4 - over, 2 - over], abs=1e-5)
    assert [value for _, value in tops[1]] == pytest.approx([math.log(0.5)] * 2, abs=1e-5)
    plain = client.completions.create(model="tiny", prompt="Once", max_tokens=5, logprobs=1, temperature=0)
    told = plain.choices[0].logprobs
    assert told is not None
    assert [len(top) for top in told.top_logprobs or ()] == [1, 1]


def test_the_llm_apis_model_tells_the_likeliest_tokens_itself(start: Start) -> None:
    """Each response repeats the tokens so far."""
    logits = [[0.0, 2.0, 1.0], [5.0, 5.0, -5.0]]
    reply = Reply(["a", "b"], log_probs=[-0.4, -0.7], logits=logits)
    client = start(reply, model=llmapi("tensorrt_llm_bls")).client()
    asked: Any = {"model": "tiny", "messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole is not None
    content = whole.content or []
    assert [token for told in streamed if told for token in told.content or ()] == content
    assert [told.logprob for told in content] == pytest.approx([-0.4, -0.7])
    over = math.log(1 + math.exp(2) + math.exp(1))
    assert [candidate.logprob for candidate in content[0].top_logprobs] == pytest.approx(
        [2 - over, 1 - over], abs=1e-5
    )


def test_the_likeliest_tokens_of_an_answer_that_is_held_to_a_form(borrow: Start) -> None:
    logits = [[-math.inf, 2.0, -math.inf]]
    running = borrow(Reply(["1"], log_probs=[0.0], logits=logits), returns_logits=True)
    asked: Any = {"model": "tiny", "logprobs": True, "top_logprobs": 2, "temperature": 0}
    form: Any = {"type": "json_object"}
    chat = running.client().chat.completions.create(messages=QUESTION, response_format=form, **asked)
    assert chat.choices[0].logprobs is not None
    response = running.client().responses.create(
        model="tiny", input="Hi", top_logprobs=2, text={"format": form}
    )
    (part,) = response.output[0].content  # type: ignore[union-attr]
    for content in (chat.choices[0].logprobs.content, part.logprobs):  # type: ignore[union-attr]
        assert [[candidate.logprob for candidate in token.top_logprobs] for token in content or ()] == [[0.0]]
    for received in running.upstream.requests:
        assert received.tensors["guided_decoding_guide_type"] == ["json"]


def test_answers_with_the_likeliest_tokens_are_not_kept(start: Start) -> None:
    running = start(Reply(["a"], log_probs=[-0.5], logits=[[0.0, 1.0]]), returns_logits=True, cached=True)
    for _ in range(2):
        answer = running.client().chat.completions.create(
            model="tiny", messages=QUESTION, logprobs=True, top_logprobs=1, temperature=0
        )
        told = answer.choices[0].logprobs
        assert told is not None
        assert [len(candidate.top_logprobs) for candidate in told.content or ()] == [1]
    assert len(running.upstream.requests) == 2

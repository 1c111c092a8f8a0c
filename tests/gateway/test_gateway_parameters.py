"""Fields that the users of vLLM and trtllm-serve send, prompts as token ids, and the log probabilities of prompts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from pipeline.client import PromptLogProbs
from pipeline.client.testing import Received, Reply, bls
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]
CONTINUED = [*QUESTION, {"role": "assistant", "content": "It is "}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Of the prompt [1, 2, 3]: the second token is the most probable one, the third is not among the two that are told.
PROMPT = PromptLogProbs(
    token_ids=(1, 2, 3),
    log_probs=(None, -0.5, -4.0),
    top_log_probs=((), ((2, -0.5), (7, -1.0)), ((5, -0.25), (6, -2.0))),
)


@pytest.fixture(scope="module")
def running(shared_start: Start) -> Running:
    def reply(received: Received) -> Reply:
        best = received.tensors.get("seed", [0])[0] % 3
        values = [[-3.0, -3.0], [-0.5, -1.5], [-2.0, -2.0]][best]
        return Reply(["x", str(best)], log_probs=values, logits=[[0.0, 1.0]] * 2, prompt_log_probs=PROMPT)

    return shared_start(reply, returns_logits=True)


def sent(running: Running) -> Received:
    return running.upstream.requests[-1]


def complete(running: Running, **fields: Any) -> Any:
    own = ("echo", "logprobs", "max_tokens", "prompt", "stream")
    known = {name: fields.pop(name) for name in own if name in fields}
    asked: Any = {"model": "tiny", "prompt": "Once", "max_tokens": 5, **known}
    return running.client().completions.create(**asked, extra_body=fields)


def chat(running: Running, **fields: Any) -> Any:
    messages = fields.pop("messages", QUESTION)
    return running.client().chat.completions.create(model="tiny", messages=messages, extra_body=fields)


def test_sampling_parameters_reach_the_engine(running: Running) -> None:
    complete(
        running, min_p=0.25, top_k=-1, stop_token_ids=[7, 8], include_stop_str_in_output=True,
        skip_special_tokens=False, logit_bias={"5": -100, "6": 2.5}, stop=list("abcdef"),
    )  # fmt: skip
    tensors = {name: list(values) for name, values in sent(running).tensors.items()}
    assert tensors["min_p"] == [0.25]
    assert tensors["stop_token_ids"] == [7, 8]
    assert (tensors["logit_bias_token_ids"], tensors["logit_bias_values"]) == ([5, 6], [-100, 2.5])
    assert (tensors["include_stop_str_in_output"], tensors["skip_special_tokens"]) == ([True], [False])
    assert tensors["stop_words"] == list("abcdef")
    assert tensors.get("top_k", [0]) == [0]


def test_ignored_end_tokens_and_a_top_p_of_zero(running: Running) -> None:
    complete(running, ignore_eos=True, top_p=0, seed=1)
    tensors = sent(running).tensors
    assert (tensors["end_id"], tensors["top_k"], tensors.get("top_p")) == ([-1], [1], None)


def test_values_that_ask_for_nothing_reach_no_engine(start: Start) -> None:
    """As programs send them that list every parameter of vLLM: a model without these inputs takes them."""
    running = start(model=bls(upstream=True))
    complete(
        running, min_p=0.0, top_k=-1, stop_token_ids=[], include_stop_str_in_output=False, skip_special_tokens=True,
        ignore_eos=False, logit_bias={}, best_of=1, suffix=None, prompt_logprobs=None, use_beam_search=False,
        length_penalty=1.0, spaces_between_special_tokens=True, guided_json=None, structured_outputs=None,
        early_stopping=False, priority=0, echo=False,
    )  # fmt: skip
    assert len(running.upstream.requests) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_p": 0.5}, "min_p: this deployment has no min_p"),
        ({"stop_token_ids": [5]}, "stop_token_ids: this deployment has no stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens: this deployment"),
        ({"logit_bias": {"5": 1}}, "logit_bias: this deployment"),
        (
            {"echo": True, "logprobs": 0},
            "echo with logprobs: this deployment has no log probabilities of prompts",
        ),
        ({"prompt": [1, 2]}, "token ids"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name(start: Start, fields: dict[str, Any], said: str) -> None:
    running = start(model=bls(upstream=True))
    with pytest.raises(openai.BadRequestError, match=said):
        complete(running, **fields)
    assert not running.upstream.requests


def test_prompts_of_token_ids(start: Start) -> None:
    running = start(Reply(["x"]), cached=True)
    for prompt in ([1, 2, 3], [1, 2, 3], [[1, 2, 3], [4]]):
        answer = complete(running, prompt=prompt, temperature=0)
        assert answer.usage.prompt_tokens == (3 if prompt == [1, 2, 3] else 4)
    asked = [list(request.tensors["prompt_token_ids"]) for request in running.upstream.requests]
    assert asked == [[1, 2, 3], [4]], "the second request, and a part of the third, are in the cache"
    complete(running, prompt="1 2 3", temperature=0)
    assert sent(running).prompt == "1 2 3", "a text is another question than token ids that it may have"
    assert complete(running, prompt=[1, 2], echo=True).choices[0].text == "1 2x"


def test_echo_with_log_probabilities(running: Running) -> None:
    """As lm-eval asks for the probability of a text."""
    choice = complete(running, prompt=[1, 2, 3], echo=True, logprobs=2, seed=0, temperature=0).choices[0]
    told = choice.logprobs
    assert choice.text.startswith("1 2 3x")
    assert told.token_logprobs[:3] == [None, -0.5, -4.0]
    assert told.top_logprobs[0] is None
    assert [max(top.values()) for top in told.top_logprobs[1:3]] == [-0.5, -0.25]
    assert told.top_logprobs[2][" 3"] == -4.0, "the prompt's own token is always among them"
    assert (
        len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(told.top_logprobs) == 5
    )
    assert told.text_offset[3] == len("1 2 3")
    streamed = complete(running, prompt=[1, 2, 3], echo=True, logprobs=2, seed=0, temperature=0, stream=True)
    parts = [chunk.choices[0] for chunk in streamed]
    assert "".join(part.text for part in parts) == choice.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
        assert joined == getattr(told, name)


def test_the_prompt_alone(running: Running) -> None:
    answer = complete(running, prompt=[1, 2, 3], echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, len(choice.logprobs.tokens)) == ("1 2 3", "length", 3)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


def test_prompt_logprobs(running: Running) -> None:
    first = complete(running, prompt=[1, 2, 3], prompt_logprobs=1).choices[0].prompt_logprobs
    assert first[0] is None
    assert first[1] == {"2": {"logprob": -0.5, "rank": 1, "decoded_token": " 2"}}
    assert first[2]["5"]["rank"] == 1
    assert (first[2]["3"]["logprob"], first[2]["3"]["rank"]) == (-4.0, None)
    assert list(chat(running, prompt_logprobs=0).prompt_logprobs[2]) == ["3"]
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs: are not available in a stream"):
        complete(running, prompt_logprobs=1, stream=True)


def test_the_best_of_several_answers(running: Running) -> None:
    """Seeds 0, 1 and 2 give three answers, of which the tokens of the second are the most probable."""
    step = 0x9E3779B97F4A7C15
    texts = {f"x{(7 + index * step) % 2**63 % 3}" for index in range(6)}
    answer = complete(running, best_of=6, seed=7, prompt=["a", "b"])
    assert texts == {"x0", "x1", "x2"}
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "x1"), (1, "x1")]
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 2 * 6 * 2, "all that was generated counts"


def test_a_suffix_where_the_vocabulary_has_tokens_for_it(running: Running, start: Start) -> None:
    complete(running, prompt="def f(", suffix="return 1")
    assert sent(running).prompt == "<fim_prefix>def f(<fim_suffix>return 1<fim_middle>"
    other = start()
    other.served.tokenizer.has_token = lambda _: False  # type: ignore[method-assign]
    with pytest.raises(openai.BadRequestError, match="suffix: this model's vocabulary has no tokens"):
        complete(other, suffix="end")


def test_fields_for_the_chat_template(start: Start) -> None:
    template = (
        "{% if not thinking %}plain {% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>"
        "{% endfor %}{% if documents %}{{ documents[0].text }}{% endif %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    running = start(Reply(["x"]), template=template, cached=True)
    asked: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {"thinking": True}},
        {"add_generation_prompt": False},
        {"documents": [{"title": "a", "text": "b"}]},
        {"messages": CONTINUED, "continue_final_message": True},
        {"messages": CONTINUED, "continue_final_message": True, "add_generation_prompt": False, "echo": True},
    ]
    answers = [chat(running, temperature=0, **fields) for fields in asked]
    question = "<user>Where is my parcel?</>"
    assert [request.prompt for request in running.upstream.requests] == [
        f"plain {question}<assistant>",
        f"{question}<assistant>",
        f"plain {question}",
        f"plain {question}b<assistant>",
        f"plain {question}<assistant>It is",
    ], "each is a question of its own to the cache, but for the last, which asks the same"
    assert [answer.choices[0].message.content for answer in answers][-2:] == ["x", "It is x"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "Cannot set both"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: is set by the request itself"),
        ({"chat_template": "{{ messages }}"}, "chat_template is not supported"),
        ({"add_special_tokens": True}, "add_special_tokens: Input should be False"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice and guided_regex: an answer can be held to one",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs: must name one form; it names 2",
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag is not supported",
        ),
        ({"guided_json": "no"}, "guided_json: must be a JSON schema"),
        ({"guided_json": {"type": "strnig"}}, "guided_json.type: 'strnig' is not allowed here"),
        ({"guided_regex": ""}, "guided_regex: must name one form"),
    ],
)
def test_fields_that_are_refused(refusing: Running, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        chat(refusing, **fields)


@pytest.mark.parametrize(
    ("fields", "kind", "guide"),
    [
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes", 'a "no"']}, "ebnf_grammar", 'root ::= "yes" | "a \\"no\\""'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json", None),
        ({"structured_outputs": {"choice": ["a"]}}, "ebnf_grammar", 'root ::= "a"'),
        ({"response_format": {"type": "json", "schema": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
    ],
)
def test_forms_as_vllm_names_them(running: Running, fields: Any, kind: str, guide: str | None) -> None:
    complete(running, **fields)
    tensors = sent(running).tensors
    assert tensors["guided_decoding_guide_type"] == [kind]
    assert tensors.get("guided_decoding_guide") == (None if guide is None else [guide])


def test_tokenize_and_detokenize(running: Running) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return http.post(running.url + path, json=body, timeout=10)

    words = post("/tokenize", prompt="one two", return_token_strs=True).json()
    assert (words["count"], words["tokens"], words["max_model_len"]) == (2, ["one", "two"], 90)
    assert post("/tokenize", model="tiny", messages=QUESTION).json()["count"] == 5
    assert post("/detokenize", model="tiny", tokens=[1, 2]).json() == {"prompt": "1 2"}
    for path, body, said in (
        ("/tokenize", {}, "prompt: must be given, or messages"),
        ("/tokenize", {"model": "other", "prompt": "a"}, "does not exist"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages.0.role"),
        ("/detokenize", {"tokens": [1, 100]}, "token id 100 is out of vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0: Input should be a valid integer"),
    ):
        answer = post(path, **body)
        assert answer.status_code in (400, 404)
        assert said in answer.json()["error"]["message"]
    info = http.get(f"{running.url}/tokenizer_info", timeout=10).json()
    assert info["eos_token"] is None
    assert "messages" in info["chat_template"]

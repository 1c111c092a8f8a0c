"""`pipeline gateway` in front of a recipe that a real Triton serves: OpenAI's client, the cache, and SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
import tokenizers
import yaml
from click.testing import CliRunner, Result

from pipeline.cli.gateway import command
from pipeline.errors import UserError
from pipeline.serving.launch import traces_endpoint
from pipeline.serving.server import TritonServer, local_launcher
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer
from tests.e2e.conftest import Build, answers, started_gateway
from tests.support import CHECKPOINTS
from tests.support.otlp import Receiver, receiving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "cached",
                "model": {"source": f"local:{CHECKPOINTS / 'support-target'}"},
                "runtime": {"kind": "cpu", "threads": 1},
                "limits": {"max_input_tokens": 768, "max_output_tokens": 128, "max_concurrency": 4},
                "cache": {"enabled": True, "backend": {"kind": "sqlite", "path": str(tmp_path / "cache.db")}},
            }
        )
    )
    return path


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Of spans, as the environment names it."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
        yield receiver


@pytest.fixture
def gateway(
    recipe: Path, build: Build, store: Path, receiver: Receiver
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of one that was started before the server that it waits for."""
    assert traces_endpoint() == f"{receiver.url}/v1/traces"
    package = Path(build(str(recipe))["artifact"])
    launcher = local_launcher(Deployment.load(package), package, traces_endpoint())
    with (
        started_gateway(str(recipe), store) as (url, process),
        TritonServer.of_package(package, launcher=launcher) as server,
    ):
        record = RunningServer.of(server.record_fields, package)
        try:
            assert process.poll() is None
            assert not answers(f"{url}/healthz")
            record.write(store / "running", "cached")
            wait_for(lambda: answers(f"{url}/readyz"), "readiness of the gateway", 120)
            yield url, process
        finally:
            record.remove(store / "running", "cached")


def dry_run(recipe: Path, store: Path, *options: str) -> Result:
    return CliRunner().invoke(command, [str(recipe), "--store", str(store), "--dry-run", *options])


def it_says_what_it_would_serve(recipe: Path, store: Path) -> None:
    asked = ("--json", "--endpoint", "cached=a:1", "--endpoint", "cached=b:2", "--set", "cache.enabled=false")
    (model,) = json.loads(dry_run(recipe, store, *asked).stdout)["models"]
    assert (model["model"], model["endpoints"], model["cache"]) == ("cached", ["a:1", "b:2"], None)
    assert (model["max_input_tokens"], model["max_concurrency"]) == (768, 4)
    refused = dry_run(recipe, store, str(recipe), "--endpoint", "other=a:1").exception
    assert isinstance(refused, UserError)
    assert "cached: is named twice" in str(refused)
    assert "--endpoint other=…: is none of the recipes (cached" in str(refused)


class Parcel(pydantic.BaseModel):
    """Where a parcel is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    place: Literal["depot", "van", "door"]
    days: Annotated[int, pydantic.Field(ge=0, le=30)]
    notes: Annotated[list[Annotated[str, pydantic.Field(max_length=6)]], pydantic.Field(max_length=2)]


def held_to_a_form(client: openai.OpenAI) -> None:
    """Structured output as OpenAI's client has it, at temperature 1: read by the client itself."""
    asked: Any = {"model": "cached", "messages": QUESTION, "temperature": 1, "seed": 5}
    whole = client.chat.completions.parse(**asked, response_format=Parcel)
    assert isinstance(whole.choices[0].message.parsed, Parcel)
    with client.chat.completions.stream(**asked, response_format=Parcel) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    # A model that has learnt no JSON would go on with its first key until it is cut off.
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json"))
    answer = client.chat.completions.create(
        model="cached",
        messages=QUESTION,
        temperature=0,
        response_format={"type": "json_object"},
        logit_bias={str(tokenizer.token_to_id("}")): 100},
    )
    assert json.loads(answer.choices[0].message.content or "") == {}
    unheld: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
    }
    with pytest.raises(openai.BadRequestError, match=r"schema: cannot be held to .*uniqueItems") as caught:
        client.chat.completions.create(model="cached", messages=QUESTION, response_format=unheld)
    assert caught.value.param == "response_format"


def the_likeliest_tokens_are_told(client: openai.OpenAI) -> None:
    """Where greedy, the first of them is the chosen one; they are those of the distribution that it was drawn from."""
    asked: Any = {"model": "cached", "messages": QUESTION, "logprobs": True, "top_logprobs": 5, "seed": 3}
    greedy = client.chat.completions.create(**asked, temperature=0).choices[0]
    assert greedy.logprobs is not None
    told = greedy.logprobs.content or []
    assert "".join(log_prob.token for log_prob in told) == greedy.message.content
    for log_prob in told:
        assert [len(log_prob.top_logprobs), log_prob.top_logprobs[0].token] == [5, log_prob.token]
        assert log_prob.top_logprobs[0].logprob == pytest.approx(log_prob.logprob, abs=1e-4)
    for temperature in (0.7, 1.5):
        sampled = client.chat.completions.create(**asked, temperature=temperature, stream=True)
        for chunk in sampled:
            if not (chunk.choices and (found := chunk.choices[0].logprobs)):
                continue
            for log_prob in found.content or ():
                of_it = [other.logprob for other in log_prob.top_logprobs if other.token == log_prob.token]
                assert of_it == pytest.approx([log_prob.logprob] * len(of_it), abs=1e-4)
                assert sum(map(exp, (other.logprob for other in log_prob.top_logprobs))) <= 1 + 1e-6
    plain = client.completions.create(model="cached", prompt="Where", logprobs=2, temperature=0, max_tokens=3)
    tops = plain.choices[0].logprobs and plain.choices[0].logprobs.top_logprobs
    assert [len(candidate) for candidate in tops or ()] == [2, 2, 2]


def two_tools_are_called(client: openai.OpenAI) -> None:
    """The small checkpoint has learnt to, both in one answer, and to answer from what they return."""
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"order": {"type": "string"}},
                    "required": ["order"],
                },
            },
        }
        for name in ("track_order", "send_invoice")
    ]
    results = {"track_order": {"city": "Hamburg"}, "send_invoice": {"name": "Mina"}}
    question = "Where is my order TP-174685? Also: I need the invoice for order TP-285190."
    messages: list[Any] = [{"role": "user", "content": question}]
    asked: Any = {"model": "cached", "tools": tools, "temperature": 0}
    with client.chat.completions.stream(messages=messages, **asked) as stream:
        message = stream.get_final_completion().choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    assert calls == [("track_order", {"order": "TP-174685"}), ("send_invoice", {"order": "TP-285190"})]
    messages.append(message.to_dict())
    for call in message.tool_calls or ():
        result = json.dumps(results[call.function.name])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(messages=messages, **asked).choices[0].message
    assert not answer.tool_calls
    assert all(word in (answer.content or "") for word in ("Hamburg", "Mina")), answer.content


def strict_calls_are_of_their_schema(client: openai.OpenAI) -> None:
    """The model would call with the order that it is asked for, which the schema does not have."""

    def tool(name: str, *, strict: bool) -> Any:
        properties = {"order": {"enum": ["TP-000001", "TP-000002"]}}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": ["order"],
            "additionalProperties": False,
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}

    def calls(strict: bool, **more: Any) -> list[tuple[str, str]]:
        tools = [tool("track_order", strict=strict), tool("send_invoice", strict=False)]
        answer = client.chat.completions.with_raw_response.create(
            model="cached", temperature=0, tools=tools,
            messages=[{"role": "user", "content": "Where is my order TP-174685?"}], **more,
        )  # fmt: skip
        assert "x-pipeline-ignored-fields" not in answer.headers
        called: Any = answer.parse().choices[0].message.tool_calls
        return [(call.function.name, json.loads(call.function.arguments)["order"]) for call in called or ()]

    assert calls(strict=False) == [("track_order", "TP-174685")]
    ((name, order),) = calls(strict=True)
    assert (name, order[:5]) == ("track_order", "TP-00")
    # Of several tools one must be called, though the question asks for none.
    ((name, order),) = calls(strict=False, tool_choice="required")
    assert (name in ("track_order", "send_invoice"), order[:5]) == (True, "TP-00")


def their_fault_is_told_as_theirs(client: openai.OpenAI) -> None:
    """What only the engine knows to be wrong: by status, by parameter, and by the engine being there for the next."""
    loops = {"ebnf": "root ::= root", "regex": r"[^\s\S]"}
    later = {"ebnf": 'root ::= "a" b\nb ::= b'}
    for fields, param in (
        *(({"repetition_penalty": value}, "repetition_penalty") for value in (1e308, 1e30, 1e-30, 1e-320)),
        ({"temperature": 1e-30}, "temperature"),
        *(
            ({"response_format": {"type": kind, kind: text}}, "response_format")
            for kind, text in loops.items()
        ),
        *(
            ({"response_format": {"type": kind, kind: text}}, "response_format")
            for kind, text in later.items()
        ),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="cached", messages=QUESTION, extra_body={"seed": 1} | fields)
        assert caught.value.param == param, caught.value.message
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=" + "x" * 20_000}
    client.chat.completions.create(model="cached", messages=QUESTION, max_tokens=2, extra_headers=headers)


def what_the_kv_cache_had_is_told_by_every_api(client: openai.OpenAI, url: str) -> None:
    """A prompt that was just computed: all whole blocks of it, but never its last token."""
    content = "Where is my parcel? " * 8
    conversation: Any = [{"role": "user", "content": content}]
    asked: Any = {"model": "cached", "temperature": 0, "extra_body": {"cache": False}}

    def chat(**more: Any) -> Any:
        return client.chat.completions.create(messages=conversation, max_tokens=2, **asked, **more)

    def messages() -> Any:
        body = {
            "model": "cached",
            "messages": conversation,
            "max_tokens": 2,
            "temperature": 0,
            "cache": False,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())["usage"]

    tokens = chat().usage.prompt_tokens
    reused = (tokens - 1) // 32 * 32
    assert reused >= 32
    assert chat().usage.prompt_tokens_details.cached_tokens == reused
    *_, last = chat(stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == reused
    response = client.responses.create(input=conversation, max_output_tokens=16, **asked)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == reused
    usage = messages()
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (reused, tokens - reused)
    plain: Any = {"prompt": content, "max_tokens": 2, **asked}
    first, again = (client.completions.create(**plain).usage for _ in range(2))
    assert first is not None
    assert again is not None
    assert again.prompt_tokens_details is not None
    assert again.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 32 * 32


def spans_go_down_into_triton(url: str, receiver: Receiver) -> None:
    """From the client's span over the gateway's to those of both models in Triton."""
    trace_id, parent = "3" * 32, "4" * 16
    receiver.spans.clear()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
        client.completions.create(model="cached", prompt="Who?", max_tokens=2, extra_headers=headers)

    def chain() -> list[str]:
        """Names of the spans from the client's down to the engine model's."""
        below = {span.span_id: span for span in receiver.spans if span.trace_id == trace_id}
        engine = [span for span in below.values() if span.name == "tensorrt_llm"]
        names, at = [], engine[0] if engine else None
        while at is not None:
            names.insert(0, at.name)
            if at.parent_id == parent:
                return names
            at = below.get(at.parent_id)
        return []

    expected = ["POST /v1/completions", "text_completion cached", "InferRequest", "tensorrt_llm_bls"]
    wait_for(lambda: chain() == [*expected, "InferRequest", "tensorrt_llm"], "spans of all of them", 120)


def test_openais_client_streams_from_triton(
    gateway: tuple[str, subprocess.Popen[bytes]], recipe: Path, store: Path, receiver: Receiver
) -> None:
    url, process = gateway
    it_says_what_it_would_serve(recipe, store)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        whole = client.chat.completions.create(model="cached", messages=QUESTION, temperature=0)
        text = whole.choices[0].message.content
        assert text
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(
            client.chat.completions.create(model="cached", messages=QUESTION, temperature=0, stream=True)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        uncached = client.chat.completions.create(
            model="cached", messages=QUESTION, temperature=0, stream=True, extra_body={"cache": False}
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in uncached) == text
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
            assert b'pipeline_cache_events_total{event="hit_exact",model="cached"} 1' in page.read()
        with pytest.raises(openai.BadRequestError, match="prompts of at most 768 tokens"):
            client.chat.completions.create(
                model="cached", messages=[{"role": "user", "content": "parcel " * 800}]
            )
        held_to_a_form(client)
        the_likeliest_tokens_are_told(client)
        two_tools_are_called(client)
        strict_calls_are_of_their_schema(client)
        their_fault_is_told_as_theirs(client)
        what_the_kv_cache_had_is_told_by_every_api(client, url)
        several = client.completions.create(
            model="cached", prompt=["Where", "When"], n=2, temperature=0, max_tokens=4
        )
        texts = [choice.text for choice in several.choices]
        assert texts[0] == texts[1]
        assert texts[2] == texts[3]
    spans_go_down_into_triton(url, receiver)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) in (0, -signal.SIGTERM)

"""Families whose checkpoints bring an encoder, not a chat template: prompts to the byte, and answers read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import ChatTemplate, TemplateError
from pipeline.client.testing import Received, Reply
from pipeline.gateway.api.tools.history import template_messages
from pipeline.gateway.api.tools.parser import AnswerParser
from pipeline.gateway.api.tools.prompt import answer_format, load_chat_template
from pipeline.models.chat_template import template_sources
from pipeline.plan.model_facts import read_model_facts
from pipeline.resources import parse_yaml
from pipeline.triton.repository import copy_tokenizer
from tests.gateway.conftest import Start
from tests.gateway.test_answer_parser import read
from tests.support.hub_configs import hub_configs

CASES: Sequence[Mapping[str, Any]] = parse_yaml(
    (Path(__file__).parent / "data/prompts.yaml").read_text("utf-8")
)["cases"]
V32, V4, K3 = "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration"
ENDS = ("<｜end▁of▁sentence｜>", "<|close|>message<|sep|><|end_of_msg|>")


def checkpoint(folder: Path, architecture: str) -> Path:
    """A checkpoint's folder, as far as templates go."""
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<｜begin▁of▁sentence｜>"}))
    return folder


@pytest.fixture(params=CASES, ids=lambda case: f"{case['architecture']}-{CASES.index(case)}")
def case(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A case with its template, and with its messages as the gateway hands them to one."""
    found = dict(request.param)
    found["template"] = ChatTemplate.from_directory(checkpoint(tmp_path, found["architecture"]))
    messages = json.loads(json.dumps(found["messages"]))
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    found["messages"] = template_messages(messages, found["template"], None)
    return found


def render(case: Mapping[str, Any], size: int | None = None, **variables: Any) -> str:
    """The prompt of the first messages of a case."""
    template: ChatTemplate = case["template"]
    return template.render(case["messages"][:size], tools=case.get("tools"), **case["variables"], **variables)


def test_prompts_are_those_of_the_encoders(case: Mapping[str, Any]) -> None:
    assert render(case) == case["prompt"]


def test_what_the_encoders_write_for_answers_is_read_back(case: Mapping[str, Any]) -> None:
    """An answer is what a prompt with it has more than the one before it."""
    tools = case.get("tools") or [tool for message in case["messages"] for tool in message.get("tools", ())]
    thinks = case["variables"].get("thinking", case["architecture"] != V32)
    for index, message in enumerate(case["messages"]):
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        if message["role"] != "assistant" or (calls and not tools):
            continue
        prompt, whole = render(case, index), render(case, index + 1, add_generation_prompt=False)
        assert whole.startswith(prompt)
        (end,) = (end for end in ENDS if whole.endswith(end))
        answer = whole.removeprefix(prompt).removesuffix(end)
        for pieces in ([answer], list(answer)):
            parser = AnswerParser(answer_format(case["template"], frozenset()), tools, prompt=prompt)
            found = read(parser, pieces)
            assert found.text == (message.get("content") or "")
            assert found.reasoning == (message.get("reasoning_content", "") if thinks else "")
            assert [(name, json.loads(packed)) for name, packed in found.calls] == calls


@pytest.mark.parametrize("architecture", [V32, V4])
def test_an_unfinished_answer_goes_on_and_no_turn_is_opened(tmp_path: Path, architecture: str) -> None:
    template = ChatTemplate.from_directory(checkpoint(tmp_path, architecture))
    question = {"role": "user", "content": "Hi"}
    begun = [question, {"role": "assistant", "content": "Hel", "reasoning_content": "A greeting."}]
    prompt = template.render(begun, continue_final_message=True, enable_thinking=True)
    assert prompt.endswith("<｜User｜>Hi<｜Assistant｜><think>A greeting.</think>Hel")
    assert template.render([question], add_generation_prompt=False).endswith("<｜User｜>Hi")
    text = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(TemplateError, match="have to be an object"):
        template.render([question, {"role": "assistant", "tool_calls": [text]}])
    with pytest.raises(TemplateError, match="no role is called critic"):
        template.render([{"role": "critic", "content": "Hi"}])


def test_published_checkpoints_lead_to_their_template(tmp_path: Path) -> None:
    """By their config.json alone, and one that a checkpoint brings wins; packages hold it as a file."""
    families = {V32: "<｜DSML｜function_calls>", V4: "<｜DSML｜tool_calls>", K3: "<|open|>tools<|sep|>"}
    for entry in hub_configs().values():
        (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
        mark = families.get(entry["config"]["architectures"][0])
        sources = template_sources(tmp_path)
        assert (mark in sources["default"]) if mark else sources == {}
        assert read_model_facts(tmp_path).has_template is bool(mark)
    checkpoint(tmp_path, V4)
    copy_tokenizer(tmp_path, tmp_path / "ours")
    assert template_sources(tmp_path / "ours") == template_sources(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("theirs")
    copy_tokenizer(tmp_path, tmp_path / "theirs")
    assert template_sources(tmp_path / "theirs") == template_sources(tmp_path) == {"default": "theirs"}


def test_thinking_by_default_and_on_request(start: Start, tmp_path: Path) -> None:
    """Each family as its publisher's API has it: V4 and K3 unless they are told not to, V3.2 when it is asked to."""
    deepseek, kimi = (
        ("<｜Assistant｜><think>", "</think>{}"),
        (
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|>",
        ),
    )
    for architecture, thinks, (opening, written) in (
        (V4, True, deepseek),
        (V32, False, deepseek),
        (K3, True, kimi),
    ):
        source = template_sources(checkpoint(tmp_path, architecture))["default"]
        thought = Reply(["So", *f".{written.format('Hi')}"])
        running = start(
            _answers(thought, opening), template=source, special=("<|open|>", "<|close|>", "<|sep|>")
        )
        for fields, expected in (
            ({}, thinks),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "high"}, True),
            ({"extra_body": {"thinking": {"type": "disabled"}}}, False),
            ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True),
        ):
            asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
            message: Any = running.same_client().chat.completions.create(**asked).choices[0].message
            assert message.content == "Hi"
            assert getattr(message, "reasoning_content", None) == ("So." if expected else None), fields


DECLARED = """# Tools

## functions
namespace functions {
// A place.
interface Place {
  name: string,
  // maximum: 90, minimum: -90
  lat?: number,
  nick?: string | null,
  [k: string]: never
}
// Find a way.

// By land.
type route = (_: {
  to: Place,
  // by
  by?: Array<
    // One of them.
    "car" | "train"
  >,
  // Default: True
  fast?: boolean,
  stops?: {}
}) => any;
type wait = (_: {}) => any;
}
"""


def test_kimi_k25_reads_tools_in_typescript(tmp_path: Path) -> None:
    """As tool_declaration_ts.py of its checkpoints writes them (the copy that pipeline/…/typescript.py names)."""
    place = {"type": "object", "description": "A place.", "additionalProperties": False, "required": ["name"],
             "properties": {"name": {"type": "string"}, "nick": {"type": ["string", "null"]},
                            "lat": {"type": "number", "minimum": -90, "maximum": 90}}}  # fmt: skip
    by = {
        "type": "array",
        "description": "by",
        "items": {"enum": ["car", "train"], "description": "One of them."},
    }
    parameters = {
        "type": "object",
        "properties": {
            "stops": {"type": "object"},
            "by": by,
            "fast": {"type": "boolean", "default": True},
            "to": {"$ref": "#/$defs/Place"},
        },
        "required": ["to"],
        "$defs": {"Place": place},
    }
    route = {"name": "route", "description": "Find a way.\n\nBy land.", "parameters": parameters}
    tools: list[Any] = [{"type": "function", "function": function} for function in (route, {"name": "wait"})]
    (tmp_path / "chat_template.jinja").write_text("{{ tools_ts_str or tools | tojson }}")
    template = load_chat_template(tmp_path, tool_section=True)
    assert template is not None
    ask = [{"role": "user", "content": "Hi"}]
    assert template.render(ask, tools=tools) == DECLARED
    # A schema that has no such form: the template's own way, with keys in order.
    place["properties"] = {"name": {"title": "any"}}
    assert json.loads(template.render(ask, tools=tools)) == tools
    assert template.render(ask) == "null"


def _answers(thought: Reply, opening: str) -> Callable[[Received], Reply]:
    return lambda asked: thought if asked.prompt.endswith(opening) else Reply(["Hi"])

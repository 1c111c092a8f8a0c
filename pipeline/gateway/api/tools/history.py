"""Messages as a chat template reads them, and the variables that tell it how the model is to think.

Templates differ in where they look for the reasoning of an earlier answer, whether arguments of calls are an object or
its JSON, and which ids calls have. The words of a template's source, and a trial, tell what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from pipeline.gateway.api.tools.dialects import ToolDialect
from pipeline.models.chat_template import ChatTemplate, TemplateError

_REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of messages
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates
# Field of a chat -> variables of templates that it sets.
REASONING_VARIABLES = {"thinking": _SWITCHES, "reasoning_effort": ("reasoning_effort", *_SWITCHES)}
# Efforts that some templates do not know -> the effort that they get instead.
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

Messages = Sequence[Mapping[str, Any]]


def template_messages(messages: Messages, template: ChatTemplate, dialect: ToolDialect | None) -> Messages:
    """Return the messages of a chat as a template takes them; the same ones if nothing has to be changed.

    Args:
        messages: messages as OpenAI's API has them, the arguments of calls as objects.
        template: the model's.
        dialect: how the model writes calls; None if that is not known.
    """
    if all(message.keys() <= {"role", "content"} for message in messages):
        return messages
    made = _in_order_of_calls([_with_reasoning(message, template) for message in messages])
    if dialect is not None and dialect.form == "channels" and "thinking" in template.words:
        made = list(_one_call_each(made))
    if dialect is not None and dialect.ids is not None:
        made = _with_ids(made, dialect.ids)
    if any("tool_calls" in message for message in made) and takes_text_arguments(template):
        made = [_with_text_arguments(message) for message in made]
    return made


def _with_reasoning(message: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """Move the reasoning of a message to the field that the template reads."""
    if message.get("role") != "assistant":
        return dict(message)
    reasonings = (message.get(name) for name in _REASONING)
    text = next((reasoning for reasoning in reasonings if isinstance(reasoning, str) and reasoning), None)
    made = {key: value for key, value in message.items() if key not in _REASONING}
    read = () if text is None else (name for name in _REASONING if name in template.words)
    return {**made, **dict.fromkeys(read, text)}


def _in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the results of an answer's calls into the order of the calls, as most templates expect."""
    made: list[dict[str, Any]] = []
    for are_results, run in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if are_results and made:
            order = {call.get("id"): index for index, call in enumerate(made[-1].get("tool_calls") or ())}
            made += sorted(run, key=lambda result: order.get(result.get("tool_call_id"), 0))
        else:
            made += run
    return made


def _one_call_each(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Split messages into one call each, followed by its result; text before the call becomes reasoning.

    The template of gpt-oss writes the first call alone, and takes no text beside reasoning.
    """
    results = {message.get("tool_call_id"): message for message in messages if message.get("role") == "tool"}
    written = set[int]()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if id(message) in written:
            continue
        if not calls:
            yield message
            continue
        before = "\n".join(text for text in (message.get("thinking"), message.get("content")) if text)
        for index, call in enumerate(calls):
            own = {**message, "content": "", "tool_calls": [call]}
            own.pop("thinking", None)
            yield own | ({"thinking": before} if before and not index else {})
            result = results.get(call.get("id")) if len(calls) > 1 else None
            if result is not None and id(result) not in written:
                written.add(id(result))
                yield result


def _with_ids(messages: Sequence[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """Number calls and their results through the conversation, with ids of the model's form."""
    ids: dict[Any, str] = {}
    made = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        named = []
        for call in calls:
            ids[call.get("id")] = new = form.format(name=call["function"]["name"], index=len(ids))
            named.append({**call, "id": new})
        own = ids.get(message.get("tool_call_id"))
        made.append(
            {**message, **({"tool_calls": named} if calls else {}), **({"tool_call_id": own} if own else {})}
        )
    return made


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    packed = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        packed.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": packed} if packed else message


@lru_cache(maxsize=64)
def takes_text_arguments(template: ChatTemplate) -> bool:
    """Whether a template writes the arguments of calls as they are, so that they have to be JSON (DeepSeek's do)."""

    def written(arguments: Any) -> str:
        call = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "look_up", "arguments": arguments},
        }
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "7"}
        try:
            return template.render([{"role": "user", "content": "Hi"}, answer, result])
        except TemplateError:
            return ""

    return '{"order": "7"}' not in written({"order": "7"}) and '{"order": "7"}' in written('{"order": "7"}')


def reasoning_variables(
    effort: str | None, thinking: bool | None, template: ChatTemplate
) -> Mapping[str, str | bool]:
    """Return the variables that tell a template how the model is to think; those that it does not read are left out.

    Args:
        effort: `reasoning_effort` of the request; none: not at all.
        thinking: whether it is to think; None: as the template has it.
        template: the model's.
    """
    variables: dict[str, str | bool] = {}
    if thinking is None and effort == "none":
        thinking = False
    if thinking is not None:
        variables |= dict.fromkeys((name for name in _SWITCHES if name in template.words), thinking)
    if effort is not None and "reasoning_effort" in template.words:
        known = any(
            f"{quote}{effort}{quote}" in text for text in template.sources.values() for quote in "'\""
        )
        variables["reasoning_effort"] = effort if known else _NEAREST.get(effort, effort)
    return variables

"""Input items of a response: what is kept of them, and the messages of a chat that they come to.

Messages, calls of functions and their results are taken; reasoning items, which other servers give, are left out, since
no template has a place for them; a reference is replaced by the item that it names. All else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.gateway.bounds import MAX_FAULTS
from pipeline.gateway.errors import ApiError
from pipeline.gateway.messages import read_arguments

Item = Mapping[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TAKEN = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item, which names its response.

    Args:
        kind: of the item, such as msg.
        response_id: of the response that it belongs to.
        index: of the item among all of the response, those of its input first.
    """
    return f"{kind}_{response_id.partition('_')[2]}{index:04x}"


def response_of_item(id: str) -> str:
    """Return the id of the response that an item of this server belongs to.

    >>> response_of_item(item_id("msg", "resp_" + "a" * 32, 7)) == "resp_" + "a" * 32
    True
    """
    return f"resp_{id.partition('_')[2][:32]}"


def read_items(
    given: str | Sequence[Mapping[str, Any]], response_id: str, find: Callable[[str], Item | None]
) -> list[Item]:
    """Check the input of a response, and bring it into the form in which it is kept and listed.

    Args:
        given: of the request.
        response_id: of the response.
        find: returns the item that an id names; None if there is none.

    Raises:
        ApiError: 400, with the first faults.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    faults: list[str] = []
    read = []
    for index, item in enumerate(given):
        where, kind = f"input.{index}", item.get("type", "message")
        if kind == "item_reference":
            id = item.get("id")
            if (found := find(id) if isinstance(id, str) else None) is None:
                faults.append(f"{where}.id: no item {id!r} of yours is remembered, or it stands twice")
                continue
            read.append(found)
        elif kind == "message":
            kept = _message(item, where, faults)
            read.append({"id": item_id("msg", response_id, index), **kept})
        elif kind == "function_call":
            kept = _function_call(item, where, faults)
            read.append({"id": item_id("fc", response_id, index), **kept})
        elif kind == "function_call_output":
            kept = _function_call_output(item, where, faults)
            read.append({"id": item_id("fco", response_id, index), **kept})
        elif kind != "reasoning":
            faults.append(f"{where}.type: {str(kind)[:64]!r} is not supported; there are {', '.join(_TAKEN)}")
    if faults:
        raise ApiError(400, "; ".join(faults[:MAX_FAULTS]), param="input")
    return read


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat, as templates take them.

    A call of a function joins the message of the assistant before it, and a result has the name of what was called.

    Args:
        instructions: of the request.
        items: of the conversation, as `read_items` returns them, and items of answers.

    Raises:
        ApiError: 400, if a result belongs to no call.

    >>> to_messages("Be brief.", read_items("Hi", "resp_1", lambda _: None))
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for item in items:
        if item["type"] == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            text = _text(item["content"])
            if role == "assistant" and messages and messages[-1].get("tool_calls"):
                # One answer: its text goes on after a call.
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
        elif item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": read_arguments(item["arguments"])}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            id = item["call_id"]
            if id not in names:
                text = f"No tool call found for function call output with call_id {id}."
                raise ApiError(400, text, param="input")
            messages.append(
                {"role": "tool", "tool_call_id": id, "name": names[id], "content": _text(item["output"])}
            )
    return messages


def _message(item: Item, where: str, faults: list[str]) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        faults.append(f"{where}.role: must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    content = _parts(item.get("content"), kind, f"{where}.content", faults)
    return {"type": "message", "role": role, "status": "completed", "content": content}


def _function_call(item: Item, where: str, faults: list[str]) -> Item:
    kept: dict[str, Any] = {"type": "function_call", "status": "completed"}
    for name in ("call_id", "name", "arguments"):
        given = item.get(name)
        if not isinstance(given, str) or not (given or name == "arguments"):
            faults.append(f"{where}.{name}: is missing")
        kept[name] = given
    return kept


def _function_call_output(item: Item, where: str, faults: list[str]) -> Item:
    if not isinstance(item.get("call_id"), str):
        faults.append(f"{where}.call_id: is missing")
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, "input_text", f"{where}.output", faults)
    return {
        "type": "function_call_output",
        "status": "completed",
        "call_id": item.get("call_id"),
        "output": output,
    }


def _parts(content: Any, kind: str, where: str, faults: list[str]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of parts")
        return []
    kept: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        name = part.get("type") if isinstance(part, dict) else None
        key = _TEXTS.get(name) if isinstance(name, str) else None
        if key is None or not isinstance(part.get(key), str):
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "{kind}", "text": …}}')
            continue
        kept.append({"type": name, key: part[key], **({"annotations": []} if name == "output_text" else {})})
    return kept


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part[_TEXTS[part["type"]]] for part in content)

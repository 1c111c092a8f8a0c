"""Items of a conversation: what is kept of those that a client sends, and the messages of a chat that they become.

Messages, reasoning, calls of functions and their results are taken; a reference is replaced by the item that it names.
All else is refused by name. Reasoning is in `content`, or packed in `encrypted_content` for clients that keep no more
than that (Codex); what other servers have encrypted is left out.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.gateway.api.parsing import raise_faults
from pipeline.gateway.api.prompts import read_arguments
from pipeline.gateway.api.responses.stored import Item
from pipeline.gateway.errors import ApiError

_ROLES = ("user", "assistant", "system", "developer")
_TAKEN = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SEAL = "plain:"


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item, which names its response.

    Args:
        kind: kind of the item, such as msg.
        index: number among all items of the response, those of its input first.
    """
    return f"{kind}_{response_id.partition('_')[2]}{index:04x}"


def response_of_item(id: str) -> str:
    """Return the id of the response that an item of this server belongs to.

    >>> response_of_item(item_id("msg", "resp_" + "a" * 32, 7)) == "resp_" + "a" * 32
    True
    """
    return f"resp_{id.partition('_')[2][:32]}"


def read_items(
    input: str | Sequence[Mapping[str, Any]], response_id: str, find: Callable[[str], Item | None]
) -> list[Item]:
    """Check the input of a response, and bring it into the form in which it is kept and listed.

    Args:
        find: returns the item that an id names; None if there is none.

    Raises:
        ApiError: 400, with the first faults.
    """
    if isinstance(input, str):
        input = [{"role": "user", "content": input}]
    faults: list[str] = []
    read = []
    for index, item in enumerate(input):
        where, kind = f"input.{index}", item.get("type", "message")
        if kind == "item_reference":
            id = item.get("id")
            if (referred := find(id) if isinstance(id, str) else None) is None:
                faults.append(f"{where}.id: no item {id!r} of yours is remembered, or it stands twice")
                continue
            read.append(referred)
        elif isinstance(kind, str) and kind in _READERS:
            prefix, keep = _READERS[kind]
            stored = keep(item, where, faults)
            if kind != "reasoning" or stored["content"]:
                read.append({"id": item_id(prefix, response_id, index), **stored})
        else:
            faults.append(f"{where}.type: {str(kind)[:64]!r} is not supported; there are {', '.join(_TAKEN)}")
    raise_faults(faults, "input")
    return read


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat, as templates take them.

    A call of a function joins the message of the assistant before it, and a result has the name of what was called.

    Args:
        items: items of the conversation, as `read_items` returns them, and items of answers.

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
            last = messages[-1] if messages else {}
            if role == "assistant" and (last.get("tool_calls") or _only_thinks(last)):
                # One answer: its text goes on after a call, or after reasoning.
                last["content"] += text
            else:
                messages.append({"role": role, "content": text})
        elif item["type"] == "reasoning":
            text = "".join(part["text"] for part in item["content"])
            if messages and _only_thinks(messages[-1]):
                messages[-1]["reasoning_content"] += f"\n{text}"
            elif text:
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
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


def _only_thinks(message: Mapping[str, Any]) -> bool:
    """Whether a message is the reasoning of an answer whose text or calls are still to come."""
    return not message.get("content") and "reasoning_content" in message and "tool_calls" not in message


def _message(item: Item, where: str, faults: list[str]) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        faults.append(f"{where}.role: must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    content = _parts(item.get("content"), kind, f"{where}.content", faults)
    return {"type": "message", "role": role, "status": "completed", "content": content}


def _function_call(item: Item, where: str, faults: list[str]) -> Item:
    call: dict[str, Any] = {"type": "function_call", "status": "completed"}
    for name in ("call_id", "name", "arguments"):
        value = item.get(name)
        if not isinstance(value, str) or not (value or name == "arguments"):
            faults.append(f"{where}.{name}: is missing")
        call[name] = value
    return call


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


def _reasoning(item: Item, where: str, faults: list[str]) -> Item:
    content, sealed = item.get("content") or [], item.get("encrypted_content")
    if not content and isinstance(sealed, str) and (text := unseal(sealed)):
        content = [{"text": text}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not isinstance(content, list) or not all(isinstance(text, str) for text in texts):
        faults.append(f'{where}.content: must be a list of {{"type": "reasoning_text", "text": …}}')
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "status": "completed", "summary": [], "content": parts}


def seal(text: str) -> str:
    """Pack reasoning for clients that send back `encrypted_content` alone; it is no secret of theirs.

    >>> unseal(seal("Hm."))
    'Hm.'
    """
    return _SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the reasoning that `seal` packed; "" for what another server has encrypted."""
    if not sealed.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return ""


# Type of an item -> prefix of its id, and what is kept of it.
_READERS: Mapping[str, tuple[str, Callable[[Item, str, list[str]], Item]]] = {
    "message": ("msg", _message), "function_call": ("fc", _function_call),
    "function_call_output": ("fco", _function_call_output), "reasoning": ("rs", _reasoning),
}  # fmt: skip


def _parts(content: Any, kind: str, where: str, faults: list[str]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of parts")
        return []
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        name = part.get("type") if isinstance(part, dict) else None
        key = _TEXTS.get(name) if isinstance(name, str) else None
        if key is None or not isinstance(part.get(key), str):
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "{kind}", "text": …}}')
            continue
        parts.append({"type": name, key: part[key], **({"annotations": []} if name == "output_text" else {})})
    return parts


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part[_TEXTS[part["type"]]] for part in content)

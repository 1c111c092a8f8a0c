"""The messages of a chat: from what OpenAI's clients send to what chat templates take.

Templates want one text a message, and the arguments of a call as an object. Pictures and sound are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.gateway.bounds import MAX_FAULTS, read_json
from pipeline.gateway.errors import ApiError

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn messages as OpenAI's clients send them into what chat templates take.

    Templates want one text a message, and the arguments of a call as an object. Everything else stays as it is.

    Raises:
        ApiError: 400, with the first faults.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    faults: list[str] = []
    read = [_read_message(message, f"messages.{index}", faults) for index, message in enumerate(messages)]
    if faults:
        raise ApiError(400, "; ".join(faults[:MAX_FAULTS]), param="messages")
    return read


def _read_message(message: Mapping[str, Any], where: str, faults: list[str]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        faults.append(f"{where}.role: must be one of {', '.join(_ROLES)}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        faults.append(f"{where}.tool_call_id: is missing")
    calls = message.get("tool_calls") if role == "assistant" else None
    read = {key: value for key, value in message.items() if value is not None}
    read["role"] = "system" if role == "developer" else role
    if message.get("content") is None:
        if not calls:
            faults.append(f"{where}.content: is missing")
        read["content"] = ""
    else:
        read["content"] = _read_content(message["content"], f"{where}.content", faults)
    if calls and not isinstance(calls, list):
        faults.append(f"{where}.tool_calls: must be a list of calls")
    elif calls:
        read["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls.{index}", faults) for index, call in enumerate(calls)
        ]
    return read


def _read_content(content: Any, where: str, faults: list[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of parts")
        return ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "text", "text": …}}')
    return "".join(texts)


def _read_call(call: Any, where: str, faults: list[str]) -> Any:
    """A call with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        faults.append(f"{where}.function.name: is missing")
        return call
    arguments = function.get("arguments", "{}")
    try:
        read = (
            read_json(arguments, f"{where}.function.arguments", "messages")
            if isinstance(arguments, str)
            else arguments
        )
    except ValueError:
        read = None
    if not isinstance(read, dict):
        faults.append(f"{where}.function.arguments: must be a JSON object, as text")
    return {**call, "function": {**function, "arguments": read}}

"""The messages of a chat: from what OpenAI's clients send to what chat templates take.

Templates want one text a message, and the arguments of a call as an object. Pictures and sound are refused. Whatever
this gateway answers is taken back as it was: also nothing, a refusal, and a call whose arguments were cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from pipeline.gateway.bounds import MAX_DEPTH, MAX_FAULTS, check_json
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
    if role == "assistant" and isinstance(refusal := read.pop("refusal", None), str):
        read.setdefault("content", refusal)
    if read.get("content") is None:
        # An assistant may have said nothing.
        if role != "assistant":
            faults.append(f"{where}.content: is missing")
        read["content"] = ""
    else:
        read["content"] = _read_content(read["content"], f"{where}.content", faults)
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
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            texts.append(part[kind])
        else:
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "text", "text": …}}')
    return "".join(texts)


def _read_call(call: Any, where: str, faults: list[str]) -> Any:
    """A call with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        faults.append(f"{where}.function.name: is missing")
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, dict):
        faults.append(f"{where}.function.arguments: must be a JSON object, as text")
    return {**call, "function": {**function, "arguments": arguments}}


def read_arguments(text: str) -> dict[str, Any]:
    """Read the arguments of a call, of which a limit of tokens may have cut off the end.

    Returns:
        The object, as far as it came; an empty one for what is no JSON object, or nested too deep.

    >>> read_arguments('{"city": "Par'), read_arguments("")
    ({'city': 'Par'}, {})
    """
    read: Any = None
    with suppress(ApiError, ValueError):
        # With some levels left for what stands around them in a request.
        check_json(text.encode(errors="replace"), max_depth=MAX_DEPTH - 16)
        try:
            read = json.loads(text)
        except ValueError:
            read = from_json(text, allow_partial="trailing-strings")
    return read if isinstance(read, dict) else {}

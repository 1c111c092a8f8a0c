"""`tools` and `tool_choice`: which tools stand in the prompt, and whether the model must call one.

`required` and a named function are enforced by guided decoding: the answer is one call. Where the engine has no guided
decoding they are refused, because a prompt alone enforces nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.client import ChatTemplate, Sampling
from pipeline.gateway.errors import ApiError
from pipeline.gateway.response_format import check_json_schema
from pipeline.gateway.schema import ChatRequest
from pipeline.gateway.tools.dialects import FORCED, ToolDialect, dialect_of, takes_tools
from pipeline.gateway.tools.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class RequestTools:
    """Tools of one request."""

    tools: Sequence[Mapping[str, Any]] = ()
    dialect: ToolDialect | None = None  # None: answers are not parsed for calls
    guide: str | None = None  # JSON schema of the call that the model must make
    max_calls: int | None = None  # in one answer

    def parser(self) -> ToolCallParser | None:
        """Make the parser of one answer; None if answers are not parsed for calls."""
        if self.dialect is None or not self.tools:
            return None
        return ToolCallParser(self.dialect, self.tools, max_calls=self.max_calls)

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters that enforce the call, if one must be made."""
        return {} if self.guide is None else {"guide_type": "json_schema", "guide": self.guide}


def resolve_tools(request: ChatRequest, template: ChatTemplate | None) -> RequestTools:
    """Check the tools of a request, and how they may be called.

    Args:
        request: with `tools`, `tool_choice` and `parallel_tool_calls`.
        template: of the model, which has to take tools if the request has some.

    Raises:
        ApiError: 400, for a malformed tool or choice, or if the model's template takes no tools.
    """
    tools = request.tools or []
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if not tools:
        if choice not in ("auto", "none"):
            raise _refused("'tool_choice' is only allowed when 'tools' are specified", "tool_choice")
        return RequestTools()
    names = [_name(tool, index) for index, tool in enumerate(tools)]
    if choice == "none":
        return RequestTools()
    if template is not None and not takes_tools(template):
        raise _refused("tools: the chat template of this model takes none", "tools")
    max_calls = 1 if request.parallel_tool_calls is False else None
    if choice == "auto":
        return RequestTools(tools, dialect_of(template), max_calls=max_calls)
    wanted = range(len(tools)) if choice == "required" else [names.index(_chosen(choice, names))]
    for index in wanted:
        check_json_schema(
            tools[index]["function"].get("parameters") or {}, f"tools.{index}.function.parameters", "tools"
        )
    schemas = [_call_schema(tools[index]["function"], f"#/anyOf/{at}") for at, index in enumerate(wanted)]
    return RequestTools(tools, FORCED, guide=json.dumps({"anyOf": schemas}), max_calls=max_calls)


def _name(tool: Mapping[str, Any], index: int) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise _refused(f'tools.{index}: must be {{"type": "function", "function": {{"name": …}}}}', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _refused(f"tools.{index}.function.name: is missing", "tools")
    return name


def _chosen(choice: str | Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        right = 'none, auto, required, or {"type": "function", "function": {"name": …}} of one of tools'
        raise _refused(f"tool_choice: must be {right}", "tool_choice")
    return str(name)


def _call_schema(function: Mapping[str, Any], at: str) -> dict[str, Any]:
    """JSON schema of a call, whose place in the whole schema is the JSON pointer `at`."""
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _with_moved_references(parameters, f"{at}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _with_moved_references(schema: Any, to: str) -> Any:
    """Move a schema into a larger one, to the JSON pointer `to`: its references into itself are rewritten."""
    if isinstance(schema, list):
        return [_with_moved_references(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _with_moved_references(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _refused(text: str, param: str) -> ApiError:
    return ApiError(400, text, param=param)

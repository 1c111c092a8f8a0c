"""`tool_choice`: which tools the model is told of, and whether it must call one.

`required` and a named function are kept by the engine itself: its answer is guided to be one call. Where it has no
guided decoding they are refused, because asking nicely is not the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.client import ChatTemplate, Sampling
from pipeline.gateway.errors import ApiError
from pipeline.gateway.response_format import checked
from pipeline.gateway.schema import ChatRequest
from pipeline.gateway.tools.dialect import FORCED, Dialect, dialect_of, takes_tools
from pipeline.gateway.tools.reader import CallReader


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request."""

    tools: Sequence[Mapping[str, Any]] = ()
    dialect: Dialect | None = None  # None: the answer is not read for calls
    guide: str | None = None  # JSON schema of the call that has to come
    most: int | None = None  # calls in one answer

    def reader(self) -> CallReader | None:
        """For one answer."""
        if self.dialect is None or not self.tools:
            return None
        return CallReader(self.dialect, self.tools, most=self.most)

    @property
    def sampling(self) -> Sampling:
        """What the engine has to keep to."""
        return {} if self.guide is None else {"guide_type": "json_schema", "guide": self.guide}


def toolbox(request: ChatRequest, template: ChatTemplate | None) -> Toolbox:
    """
    Raises:
        ApiError: 400, for tools that are none, or that the model's template does not know of.
    """
    tools = request.tools or []
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if not tools:
        if choice not in ("auto", "none"):
            raise _refused("'tool_choice' is only allowed when 'tools' are specified", "tool_choice")
        return Toolbox()
    names = [_name(tool, index) for index, tool in enumerate(tools)]
    if choice == "none":
        return Toolbox()
    if template is not None and not takes_tools(template):
        raise _refused("tools: the chat template of this model takes none", "tools")
    most = 1 if request.parallel_tool_calls is False else None
    if choice == "auto":
        return Toolbox(tools, dialect_of(template), most=most)
    wanted = range(len(tools)) if choice == "required" else [names.index(_chosen(choice, names))]
    for index in wanted:
        checked(
            tools[index]["function"].get("parameters") or {}, f"tools.{index}.function.parameters", "tools"
        )
    schemas = [_schema(tools[index]["function"], f"#/anyOf/{at}") for at, index in enumerate(wanted)]
    return Toolbox(tools, FORCED, guide=json.dumps({"anyOf": schemas}), most=most)


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


def _schema(function: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Of a call; `at`: where it lies in the whole schema, as a JSON pointer."""
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _moved(parameters, f"{at}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references into itself hold at another place of a larger one."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _refused(text: str, param: str) -> ApiError:
    return ApiError(400, text, param=param)

"""`tools`, `tool_choice` and `parallel_tool_calls`: which tools stand in the prompt, and how the model may call them.

`required` and a named function are enforced by guided decoding: the answer is one call, or with `required` and
`parallel_tool_calls: true` one or more. A call of the only tool that may be called is begun in the prompt, in the way
of the model, which goes on with its arguments. Where there are several, the engine holds them to the way of the model
if it takes structural tags, else to a form in JSON. Where the engine has no guided decoding they are refused, because a
prompt alone enforces nothing. With `auto`, calls of tools that are `strict` are held by structural tags; where that
cannot be, `strict` is ignored, and named. `allowed_tools` leaves all other tools out. Tools that are no functions of
the client are left out, and refused where one of them must be called. With `parallel_tool_calls: false` the answer ends
with its first call.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.client import ChatTemplate
from pipeline.gateway.api.bounds import MAX_FAULTS, MAX_SHOWN, MAX_TOOLS
from pipeline.gateway.api.parsing import check_guide, hosted_tools, unsupported
from pipeline.gateway.api.response_format import SchemaFaults, check_json_schema
from pipeline.gateway.api.schema import ChatRequest
from pipeline.gateway.api.tools.dialects import FORCED, FORCED_LIST, AnswerFormat, ToolDialect
from pipeline.gateway.api.tools.prompt import dialect_of, takes_tools
from pipeline.gateway.api.tools.structural_tags import can_guide, structural_tag, with_moved_references
from pipeline.gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class RequestTools:
    """Tools of one request."""

    tools: Sequence[Mapping[str, Any]] = ()
    dialect: ToolDialect | None = None  # None: answers are not parsed for calls
    guide: str | None = None  # JSON schema of the call, or the list of calls, that the model must make
    tag: str | None = None  # structural tag that guides calls; they may stand in free text
    must: bool = False  # whether the answer begins with a call by the tag
    unguided: Sequence[int] = ()  # strict tools that no guide holds to their schemas
    max_calls: int | None = None  # in one answer
    begun: str = ""  # beginning of the call that the model must make, which stands in the prompt

    def stop(self, format: AnswerFormat) -> Sequence[str]:
        """Text that ends the answer after the only call that it may have, so that no others are generated in vain.

        A model that reasons may write it before it calls.
        """
        free = self.guide is None and self.tag is None and self.max_calls == 1 and not format.reasons
        stop = self.dialect.stop if free and self.dialect is not None else None
        return () if stop is None else (stop,)


def resolve_tools(
    request: ChatRequest,
    template: ChatTemplate | None,
    schema_faults: SchemaFaults,
    *,
    structural_tags: bool = False,
) -> RequestTools:
    """Check the tools of a request, and how they may be called.

    Args:
        request: request with `tools`, `tool_choice` and `parallel_tool_calls`.
        template: the model's, which has to take tools if the request has some.
        schema_faults: finds the faults of the parameters of tools that must be called, or are strict.
        structural_tags: whether the engine takes structural tags.

    Raises:
        ApiError: 400, for a malformed tool or choice, or if the model's template takes no tools.
    """
    tools = request.tools or []
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if not tools:
        if choice not in ("auto", "none"):
            raise _refused("'tool_choice' is only allowed when 'tools' are specified", "tool_choice")
        return RequestTools()
    hosted = hosted_tools(tools, request.function_types)
    names: dict[str, int] = {}  # name of a tool that may be called -> index
    for index, tool in enumerate(tools):
        if index not in hosted:
            names.setdefault(_name(tool, index), index)
    _check_callable(choice, tools, names, hosted)
    if choice == "none":
        return RequestTools()
    if names and template is not None and not takes_tools(template):
        text = "tools: the chat template of this model takes none, and its recipe adds none to the prompt (tool_prompt)"
        raise _refused(text, "tools")
    indices: Sequence[int] = [index for index in range(len(tools)) if index not in hosted]
    functions = [tools[index] for index in indices]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, indices = _allowed(choice, names, set(hosted.values()))
    elif choice not in ("auto", "required"):
        choice, indices = "named", [names[_chosen(choice, names)]]
    if not indices:
        return RequestTools()
    several = request.parallel_tool_calls
    offered = [tools[index] for index in indices] if choice != "named" else functions
    own = dialect_of(template)
    strict = [index for index in indices if tools[index]["function"].get("strict") is True]
    for index in strict if choice == "auto" else indices:
        parameters = json.dumps(tools[index]["function"].get("parameters") or {}, ensure_ascii=False)
        check_json_schema(parameters, f"tools.{index}.function.parameters", "tools", schema_faults)
    called = [tools[index]["function"] for index in indices]
    guided = [index for index in strict if structural_tags and can_guide(own, tools[index]["function"])]
    if choice == "auto":
        most = 1 if several is False else None
        # An answer that is held to another form has no calls.
        if not strict or request.form_fields:
            return RequestTools(offered, own, max_calls=most)
        unguided = [index for index in strict if index not in guided]
        if own is None or not guided:
            return RequestTools(offered, own, max_calls=most, unguided=unguided)
        tag = _tag(own, called, [tools[index]["function"]["name"] for index in guided], single_call=most == 1)
        return RequestTools(offered, own.as_guided(), tag=tag, max_calls=most, unguided=unguided)
    if len(indices) == 1 and not (choice == "required" and several) and own is not None and own.begin:
        function = tools[indices[0]]["function"]
        guide = json.dumps(function.get("parameters") or {"type": "object"})
        check_guide("json_schema", guide, "tools", "tools")
        earlier = sum(len(message.get("tool_calls") or ()) for message in request.messages)
        begun = own.begin.replace("{name}", function["name"]).replace("{index}", str(earlier))
        return RequestTools(offered, own, guide, max_calls=1, begun=begun)
    as_list = choice == "required" and several is True
    if structural_tags and own is not None and all(can_guide(own, function) for function in called):
        tag = _tag(own, called, [function["name"] for function in called], must=True, single_call=not as_list)
        return RequestTools(offered, own.as_guided(), tag=tag, must=True, max_calls=None if as_list else 1)
    place = "#/items/anyOf" if as_list else "#/anyOf"
    calls = {
        "anyOf": [_call_schema(tools[index]["function"], f"{place}/{at}") for at, index in enumerate(indices)]
    }
    guide = json.dumps({"type": "array", "minItems": 1, "items": calls} if as_list else calls)
    check_guide("json_schema", guide, "tools", "tools")
    if as_list:
        return RequestTools(offered, FORCED_LIST, guide)
    return RequestTools(offered, FORCED, guide, max_calls=1)


def _tag(
    dialect: ToolDialect,
    functions: Sequence[Mapping[str, Any]],
    strict: Sequence[str],
    *,
    single_call: bool,
    must: bool = False,
) -> str:
    tag = structural_tag(dialect, functions, strict, single_call=single_call, must=must)
    check_guide("structural_tag", tag, "tools", "tools")
    return tag


def _name(tool: Mapping[str, Any], index: int) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise _refused(f'tools.{index}: must be {{"type": "function", "function": {{"name": …}}}}', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _refused(f"tools.{index}.function.name: is missing", "tools")
    if parameters := function.get("parameters"):
        check_guide("json_schema", json.dumps(parameters), f"tools.{index}.function.parameters", "tools")
    return name


def _check_callable(
    choice: Any, tools: Sequence[Mapping[str, Any]], names: Mapping[str, int], hosted: Mapping[int, str]
) -> None:
    """Refuse a choice that requires tools which the server would have to run, or any where there are no others."""
    if isinstance(choice, Mapping):
        allowed = choice.get("allowed_tools")
        wanted = (
            allowed.get("tools") if isinstance(allowed, dict) and allowed.get("mode") == "required" else None
        )
        required = wanted if isinstance(wanted, list) else [choice]
        if not required or not all(_is_hosted(tool, tools, names, hosted) for tool in required):
            return
    elif choice != "required" or names:
        return
    listed = ", ".join(
        f"tools.{index} ({kind[:MAX_SHOWN]})" for index, kind in list(hosted.items())[:MAX_FAULTS]
    )
    text = f"tool_choice: requires a tool that this server does not run; it runs none of {listed}"
    raise unsupported("tool_choice", text)


def _is_hosted(
    choice: Any, tools: Sequence[Mapping[str, Any]], names: Mapping[str, int], hosted: Mapping[int, str]
) -> bool:
    """Whether a choice is one of the tools that the server would have to run, by its type or its name."""
    if not isinstance(choice, Mapping):
        return False
    if choice.get("type") != "function":
        return choice.get("type") in hosted.values()
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return (
        name is not None and name not in names and any(tools[index].get("name") == name for index in hosted)
    )


def _chosen(choice: Any, names: Container[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        right = (
            'none, auto, required, {"type": "function", "function": {"name": …}} of one of tools, '
            'or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}} of some'
        )
        raise _refused(f"tool_choice: must be {right}", "tool_choice")
    return name


def _allowed(
    choice: Mapping[str, Any], names: Mapping[str, int], hosted: Container[str]
) -> tuple[str, Sequence[int]]:
    """Mode, and indices of the tools, of an `allowed_tools` choice, without those of types in `hosted`."""
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise _refused("tool_choice.allowed_tools.mode: must be auto or required", "tool_choice")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        text = f"tool_choice.allowed_tools.tools: must name 1 to {MAX_TOOLS} of tools"
        raise _refused(text, "tool_choice")
    runnable = [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") in hosted)]
    return allowed["mode"], sorted({names[_chosen(tool, names)] for tool in runnable})


def _call_schema(function: Mapping[str, Any], at: str) -> dict[str, Any]:
    """JSON schema of a call, whose place in the whole schema is the JSON pointer `at`."""
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": with_moved_references(parameters, f"{at}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _refused(text: str, param: str) -> ApiError:
    return ApiError(400, text, param=param)

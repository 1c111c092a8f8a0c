"""Tools in the prompt: by the model's chat template, or by a section in plain text if the template takes no tools.

The section is a `ChatTemplate` of its own around the model's: it puts the tools, and how to call one, before the
conversation, writes earlier calls as the model is asked to write them, and their results as a turn of the user. So any
template that takes users and assistants will do. Calls are those of the dialect `hermes`, which many models have been
trained on and which is unlikely to be met in plain text. A model that was never trained to call tools may do it badly;
`tool_choice: required` holds it to the form. A template that writes calls all the same, as DeepSeek's do, goes on to
write them and their results, and the section is the one that the model was trained on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.gateway.api.tools.dialects import AnswerFormat, ToolDialect, reasoning_of, written_dialect
from pipeline.gateway.api.tools.typescript import typescript_tools, with_sorted_keys
from pipeline.models.chat_template import ChatTemplate, TemplateError

_log = logging.getLogger("pipeline.gateway")

_SECTION = """\
You can call these tools:
<tools>
{tools}
</tools>
To call one, answer only with its name and arguments as JSON, once for each call:
<tool_call>
{{"name": "tool", "arguments": {{"key": "value"}}}}
</tool_call>
Results come in a <tool_response>. If you need no tool, answer in plain words."""
_TYPESCRIPT = "tools_ts_str"  # variable of templates
_DESCRIBED = ("name", "description", "parameters")  # keys of a function that the model is told
# Keys of a JSON schema that tell a model nothing, and that it would read in each request.
_SILENT = ("$schema", "additionalProperties", "title")


class ToolSectionTemplate(ChatTemplate):
    """A chat template that takes no tools, with a section of the prompt that tells the model of them."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template.sources, template.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render messages and tools; see `ChatTemplate.render` and `with_tool_section`."""
        if (own := written_dialect(self.sources.get("default", ""))) is not None and own.section is not None:
            written = [dict(message) for message in messages]
            if tools:
                _insert(written, _own_section(own, own.section, _functions(tools)))
            return super().render(written, **variables)
        if tools or any(message.get("role") == "tool" or message.get("tool_calls") for message in messages):
            messages = with_tool_section(messages, tools or ())
        return super().render(messages, **variables)


class TypeScriptToolsTemplate(ChatTemplate):
    """A chat template that takes tools in TypeScript, which its tokenizer's own code makes (Kimi K2.5 to K2.7)."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template.sources, template.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render messages and tools; see `ChatTemplate.render` and `typescript_tools`."""
        if tools:
            tools = with_sorted_keys(list(tools))
            variables = {_TYPESCRIPT: typescript_tools(tools), **variables}
        return super().render(messages, tools=tools, **variables)


def with_tool_section(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Write tools, calls and results as texts of a conversation without tools.

    Args:
        messages: messages as OpenAI's API has them, the arguments of calls as objects.
        tools: tools of the request; none if the model is to call none any more.

    Returns:
        Messages of systems, users and assistants. The section stands in the system message, or where there is none,
        before the first message of the user: many templates have a system message of their own, or take none.

    Raises:
        TemplateError: a tool has no name.
    """
    written: list[dict[str, Any]] = []
    results = False  # whether the last message holds results, with which a message of the user is joined
    for message in messages:
        role, text = message["role"], str(message.get("content") or "")
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if role in ("tool", "user") and results:
            written[-1]["content"] += f"\n{text}"
        elif role == "tool":
            written.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            written.append(
                {"role": role, "content": "\n".join([*([text] if text else []), *map(_call, calls)])}
            )
        else:
            written.append(dict(message))
        results = role == "tool"
    if tools:
        described = (
            {key: _short(function[key]) for key in _DESCRIBED if function.get(key)}
            for function in _functions(tools)
        )
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in described)
        _insert(written, _SECTION.format(tools=listed))
    return written


def _own_section(dialect: ToolDialect, section: str, functions: Iterable[Mapping[str, Any]]) -> str:
    """Section that a family was trained on, in its way of writing calls."""
    listed = "\n\n".join(
        f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}"
        for function in functions
    )
    before, after = dialect.head
    call = f"{before}tool_call_name{after}tool_call_arguments{dialect.ends[0]}"
    return section.format(tools=listed, call=call)


def _functions(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    functions = [
        function
        for tool in tools
        if isinstance(function := tool.get("function"), Mapping) and function.get("name")
    ]
    if len(functions) < len(tools):
        raise TemplateError('each tool must be {"type": "function", "function": {"name": …}}')
    return functions


def _insert(messages: list[dict[str, Any]], section: str) -> None:
    """Put a section into the system message, or before the first message of the user."""
    first = messages[0]
    if first["role"] == "system":
        first["content"] = f"{first['content']}\n\n{section}"
        return
    user = next((message for message in messages if message["role"] == "user"), None)
    if user is None:
        messages.insert(0, {"role": "user", "content": section})
    else:
        user["content"] = f"{section}\n\n{user['content']}"


def _short(schema: Any, *, named: bool = False) -> Any:
    """A JSON schema without silent keys; `named`: a mapping of names, which may be called as these keys are."""
    if isinstance(schema, list):
        return [_short(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _short(value, named=not named and key in ("properties", "$defs"))
        for key, value in schema.items()
        if named or key not in _SILENT or (key == "additionalProperties" and isinstance(value, dict))
    }


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


def load_chat_template(tokenizer: Path, *, tool_section: bool) -> ChatTemplate | None:
    """Load the chat template beside a packaged tokenizer.

    Args:
        tokenizer: folder of the tokenizer.
        tool_section: whether tools stand in a section of the prompt where the template takes none.

    Returns:
        The template; None, with a warning in the log, if there is none that works: the model then completes texts only.
    """
    try:
        template = ChatTemplate.from_directory(tokenizer).compile()
    except TemplateError as error:
        _log.warning("no chats: %s", error)
        return None
    if _TYPESCRIPT in template.words:
        return TypeScriptToolsTemplate(template)
    return ToolSectionTemplate(template) if tool_section and not takes_tools(template) else template


def takes_tools(template: ChatTemplate) -> bool:
    """Whether a template puts tools into the prompt."""
    return isinstance(template, ToolSectionTemplate) or any(
        "tools" in source for source in template.sources.values()
    )


def dialect_of(template: ChatTemplate | None) -> ToolDialect | None:
    """Return the dialect in which a model writes calls, by its chat template.

    None if it has none of dialects.yaml, or takes no tools, unless all that it writes is in channels.
    """
    if template is None:
        return None
    source = template.sources.get("tool_use") or template.sources.get("default", "")
    dialect = written_dialect(source)
    if isinstance(template, ToolSectionTemplate) and (dialect is None or dialect.section is None):
        return written_dialect(_SECTION)
    return dialect if takes_tools(template) or (dialect and dialect.form == "channels") else None


def answer_format(template: ChatTemplate | None, special: frozenset[str]) -> AnswerFormat:
    """Return the format of a model's answers, with its special tokens if they are parsed by some."""
    if template is None:
        return AnswerFormat()
    dialect = dialect_of(template)
    channels = dialect is not None and dialect.form == "channels"
    made = AnswerFormat(dialect, None if channels else reasoning_of(template))
    return replace(made, special=special) if made.needs_special_tokens(special) else made

"""From messages to the prompt that the model was trained on, with the chat template that its tokenizer brings.

Renders the same text as `apply_chat_template` of transformers 5, without needing it: Jinja in a sandbox, with
`raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` tag, and the tokenizer's special tokens
as variables. It counts and cuts nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pipeline.client.errors import Refused

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}


class ChatTemplate:
    """One or more named templates of a tokenizer; "tool_use", where there is one, serves requests with tools.

    >>> template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<s>Hi'
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, tokenizer: Path | str) -> Self:
        """From a tokenizer's files: chat_template.jinja, or tokenizer_config.json where older ones keep it."""
        folder = Path(tokenizer)
        config = _json(folder / "tokenizer_config.json")
        sources = _templates(folder, config)
        if not sources:
            raise Refused(
                f"{folder}: no chat template here (chat_template.jinja or tokenizer_config.json); send plain text"
            )
        return cls(sources, _special_tokens(folder, config))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt, up to where the answer begins. Refused if the template does not take these messages."""
        import jinja2

        if not messages:
            raise Refused("a conversation needs at least one message")
        settings = {**self.special_tokens, **variables}
        try:
            return _compile(self._source(with_tools=tools is not None)).render(  # type: ignore[no-any-return]
                messages=[dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None if documents is None else list(documents),
                add_generation_prompt=add_generation_prompt,
                **settings,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise Refused(f"the chat template does not take these messages: {error}") from error

    def compile(self) -> Self:
        """Do now what the first rendering would have to wait for: 50 to 100 ms. Refused if a template is none."""
        import jinja2

        try:
            for source in self.sources.values():
                _compile(source)
        except jinja2.TemplateError as error:
            raise Refused(f"the chat template cannot be read: {error}") from error
        return self

    def _source(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise Refused(
                f"there are several chat templates and none is the default: {', '.join(self.sources)}"
            )
        return self.sources[name]


def as_prompt(
    prompt: str | Sequence[Message], template: ChatTemplate | None, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Text as it is; messages, and the tools that the model may call, through the template."""
    if isinstance(prompt, str):
        if tools:
            raise Refused("tools need messages: a plain prompt holds all that the model is told")
        if not prompt:
            raise Refused("the prompt is empty")
        return prompt
    if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        raise Refused('a prompt is a text, or a list of messages such as {"role": "user", "content": "Hi"}')
    if template is None:
        raise Refused(
            "messages need a chat template: Client(…, template=ChatTemplate.from_directory(tokenizer))"
        )
    return template.render(prompt, tools=tools or None)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; files win over tokenizer_config.json."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    inside = config.get("chat_template") or {}
    if isinstance(inside, list):
        return {entry["name"]: entry["template"] for entry in inside}
    return {"default": inside} if isinstance(inside, str) else dict(inside)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like. The older special_tokens_map.json counts only beside an older config."""
    older = {} if "added_tokens_decoder" in config else _json(folder / "special_tokens_map.json")
    merged = {**config, **older}
    extra = merged.get("extra_special_tokens")
    named = {**merged, **extra} if isinstance(extra, dict) else merged
    contents = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in named.items()
        if name.endswith("_token")
    }
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise Refused(f"{path}: not JSON: {error}") from error


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> Any:
    template = _environment().from_string(source)
    template.globals = dict(template.globals)  # each rendering copies them: slow from Jinja's ChainMap
    return template


@functools.cache
def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model said; the text within is rendered as it is, in a scope of its own."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

        def _as_it_is(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment

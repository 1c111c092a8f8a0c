"""Renders messages to the prompt that the model was trained on, with the chat template that its tokenizer brings.

Families that publish code in place of a template (DeepSeek V3.2 and V4, Kimi K3) have one of ours, in
`data/chat_templates`, by the class that config.json names.

Renders the same text as `apply_chat_template` of transformers 5, without needing it, with the tokenizer's special
tokens as variables. Jinja's immutable sandbox keeps a template from Python. It bounds neither time nor memory:
`pipeline.models.template_trial` tries what a template takes when a checkpoint is fetched.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipeline.errors import UserError
from pipeline.reading import UnreadableFile, optional_json, read_text

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# {"role": "user", "content": "…"}
Message = Mapping[str, Any]
# Characters of a message.
_MAX_REASON = 300


class TemplateError(UserError):
    """A chat template is missing, cannot be read, or does not take these messages."""


class ChatTemplate:
    """Chat template of a tokenizer: Jinja source that renders messages to the prompt that the model was trained on.

    A tokenizer may have several named templates: "tool_use" serves requests with tools, "default" all others.

    Attributes:
        sources: Jinja source by name.
        special_tokens: variables of the templates: `bos_token`, `eos_token`, …

    >>> template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<s>Hi'
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """Make a template of a source, or of several by name; compiled with its first rendering, or by `compile`."""
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens or {})

    @property
    def words(self) -> frozenset[str]:
        """All words in the sources; a variable, or a field of messages, that is not among them is not read."""
        return _words(tuple(self.sources.values()))

    @classmethod
    def from_directory(cls, tokenizer: Path | str) -> Self:
        """Read the chat template of a tokenizer.

        Args:
            tokenizer: folder, see `template_sources`.

        Raises:
            TemplateError: there is no template, or a file cannot be read.
        """
        folder = Path(tokenizer)
        try:
            sources, tokens = template_sources(folder), _special_tokens(folder)
        except UnreadableFile as error:
            raise TemplateError(str(error)) from error
        if not sources:
            raise TemplateError(
                f"{folder}: no chat template here (chat_template.jinja or tokenizer_config.json); send plain text"
            )
        return cls(sources, tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render messages to a prompt, up to where the answer begins.

        Args:
            messages: a chat, oldest first, as OpenAI's API has it: `role`, `content`, …
            tools: functions that the model may call, as OpenAI's API describes them.
            documents: texts for retrieval-augmented generation, as the template takes them.
            add_generation_prompt: open the assistant's turn at the end.
            continue_final_message: end where the text of the last message does, so that the model goes on with it; no
                turn is opened.
            **variables: more variables of the template; they win over special tokens.

        Raises:
            TemplateError: the template does not take these messages.
        """
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        if continue_final_message:
            open_ended = [*messages[:-1], _with_mark(messages[-1])]
            settings = {**variables, "add_generation_prompt": False}
            return _until_mark(self.render(open_ended, tools=tools, documents=documents, **settings))
        source = self._source(with_tools=tools is not None)
        settings = {**self.special_tokens, **variables}
        try:
            return _compile(source).render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None if documents is None else list(documents),
                add_generation_prompt=add_generation_prompt,
                **settings,
            )
        except Exception as error:
            # Any exception: a template is code from a stranger.
            raise TemplateError(
                f"the chat template does not take these messages: {_reason(error)}"
            ) from error

    def compile(self) -> Self:
        """Compile the templates now (50 to 100 ms) instead of with the first rendering.

        Raises:
            TemplateError: a template is not valid Jinja.
        """
        for source in self.sources.values():
            try:
                _compile(source)
            except Exception as error:
                # Jinja's own, and what Python makes of code that is too large or too deep.
                raise TemplateError(f"the chat template cannot be read: {_reason(error)}") from error
        return self

    def _source(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(
                f"there are several chat templates and none is the default: {', '.join(self.sources)}"
            )
        return self.sources[name]


@functools.lru_cache(maxsize=32)
def _words(sources: tuple[str, ...]) -> frozenset[str]:
    return frozenset(word for source in sources for word in re.findall(r"\w+", source))


# Written after the text at which a prompt is to end. The space tells whether the template strips what it is given.
_MARK = "{the model goes on here}"


def _with_mark(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not content:
        raise TemplateError("continue_final_message: the last message has no text to go on with")
    return {**message, "content": f"{content}{_MARK} "}


def _until_mark(text: str) -> str:
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise TemplateError("continue_final_message: the chat template leaves the last message out")
    return before if after.startswith(" ") else before.rstrip()


def template_sources(folder: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name; {} if it has none.

    Args:
        folder: holds chat_template.jinja or, as older tokenizers have it, tokenizer_config.json; or neither, beside
            the config.json of a family whose template is ours.

    Raises:
        UnreadableFile: a file that may hold one.
    """
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path) for name, path in files.items()}
    inside = optional_json(folder / "tokenizer_config.json").get("chat_template") or {}
    if isinstance(inside, list):
        inside = {entry.get("name"): entry.get("template") for entry in inside if isinstance(entry, dict)}
    named = inside if isinstance(inside, dict) else {"default": inside}
    if not all(isinstance(part, str) for pair in named.items() for part in pair):
        problem = "chat_template is neither a text nor a list of names and templates"
        raise UnreadableFile(folder / "tokenizer_config.json", problem)
    if not named and (own := _family_template(optional_json(folder / "config.json").get("architectures"))):
        return {"default": own}
    return named


def _family_template(architectures: Any) -> str | None:
    """Template of ours for the classes that a config.json names."""
    names = (
        {name for name in architectures if isinstance(name, str)}
        if isinstance(architectures, list)
        else set()
    )
    files = (resources.files("pipeline.models") / "data" / "chat_templates").iterdir()
    return next(
        (file.read_text("utf-8") for file in files if file.name.removesuffix(".jinja") in names), None
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and the like. The older special_tokens_map.json counts only beside an older config."""
    config = optional_json(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else optional_json(folder / "special_tokens_map.json")
    merged = {**config, **older}
    extra = merged.get("extra_special_tokens")
    named = {**merged, **extra} if isinstance(extra, dict) else merged
    contents = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in named.items()
        if name.endswith("_token")
    }
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _reason(error: Exception) -> str:
    """Say what is wrong with a template, and in which line of it."""
    from jinja2 import TemplateError

    if isinstance(error, RecursionError | SyntaxError):
        return "it is nested too deeply, or calls itself without end"
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    text = (error.message if isinstance(error, TemplateError) else str(error)) or type(error).__name__
    text = text[:_MAX_REASON]
    # Without a line where the template itself says what it does not take.
    line = None if type(error) is TemplateError else _line(error)
    return f"{text} (line {line})" if line else text


def _line(error: Exception) -> int | None:
    """Line of the source, which Jinja gives the frames of a template."""
    line: int | None = getattr(error, "lineno", None)
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> Environment:
    """Jinja as transformers 5 sets it up, without `lipsum`."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model said; the text within is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

        def _as_it_is(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: Any) -> None:
        raise TemplateError(message if isinstance(message, str) else type(message).__name__)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: not escaped for HTML."""
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    # Its length is not bounded, as that of `range` is.
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment

"""From messages to the text that the model was trained on, with the checkpoint's own chat template.

The template is Jinja run in a sandbox, with the functions that transformers 5.14 gives it (`raise_exception`,
`strftime_now`, `tojson`, `{% generation %}`). "Now" is whatever the caller says, so that a template that
writes the date gives the same text every day.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError, UserError

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}


class TemplateRefusal(UserError):
    """The template does not take these messages (roles that do not alternate, say)."""


class ChatTemplate:
    """The chat template of one checkpoint."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source, now)

    @classmethod
    def read(cls, directory: Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """From chat_template.jinja, or tokenizer_config.json where older checkpoints keep it."""
        source = template_source(directory)
        if source is None:
            raise SourceError(
                f"{directory} has no chat template, which samples of messages need: "
                "give a data set of plain text, or add chat_template.jinja to the checkpoint"
            )
        return cls(source, special_tokens(directory), now)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the model's answer begins."""
        import jinja2

        try:
            text: str = self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.exceptions.TemplateError as error:
            raise TemplateRefusal(f"the chat template refuses the messages: {error}") from error
        return text


def template_source(directory: Path) -> str | None:
    """The text of a checkpoint's chat template; None if it has none."""
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    source = _json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return source if isinstance(source, str) else None


def special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, … as the tokenizer's files name them."""
    merged = _json(directory / "special_tokens_map.json") | _json(directory / "tokenizer_config.json")
    found = {key: value for key, value in merged.items() if key.endswith("_token") and value}
    return {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _compile(source: str, now: Callable[[], datetime]) -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the model said; for the text it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        raise SourceError(f"the chat template cannot be read: {error}") from error

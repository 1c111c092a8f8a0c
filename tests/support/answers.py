"""Answers as families of models write them."""

from __future__ import annotations

import json

from pipeline.gateway.api.tools.dialects import ToolDialect

_QUOTED = ("name=", "tool=", "key=")  # attributes of elements


def write_call(dialect: ToolDialect, name: str, arguments: str) -> str:
    """A call in a dialect, with all that stands around it; `arguments` are JSON, or what a model takes for it."""
    if dialect.form == "channels":
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    before, after = dialect.head[:2] if dialect.head != ("", "{") else ("", "[ARGS]")
    end = next(iter(dialect.ends), "")
    written = f'{{"name": "{name}", "arguments": {arguments}}}'
    if dialect.form == "named":
        own = f"functions.{name}:0" if dialect.ids and "functions" in dialect.ids else name
        written = f"{before}{own}{after}{arguments}{end}"
    elif dialect.form == "unquoted":
        written = f"{before}{name}{_unquoted(arguments, dialect.value[0])}{end}"
    elif dialect.form != "json":
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = {"city": arguments}
        values = values if isinstance(values, dict) else {}
        if dialect.form == "python":
            written = f"[{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})]"
        else:
            own = f'"{name}"' if before.endswith(_QUOTED) else name
            own += ' index="1"' if before.endswith("tool=") else ""
            written = (
                f"{before}{own}{after}{''.join(_element(dialect, *item) for item in values.items())}{end}"
            )
    return f"{next(iter(dialect.opens), '')}{written}{next(iter(dialect.closes), '')}"


def _unquoted(arguments: str, quote: str) -> str:
    """JSON with keys without quotation marks, and marks of their own around texts."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments

    def written(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(value_)}" for key, value_ in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    return written(values)


def _element(dialect: ToolDialect, key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    line = "\n" if dialect.trim else ""
    own = f'"{key}"' if dialect.key[0].endswith(_QUOTED) else key
    own += f' type="{"string" if isinstance(value, str) else "other"}"' if "key=" in dialect.key[0] else ""
    own += f' string="{str(isinstance(value, str)).lower()}"' if "DSML" in dialect.key[0] else ""
    return f"{dialect.key[0]}{own}{dialect.key[1]}{dialect.value[0]}{line}{text}{line}{dialect.value[1]}\n"

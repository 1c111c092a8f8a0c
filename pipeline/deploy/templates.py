"""Fills in the files of templates/: YAML, shell and systemd, written with Jinja.

A value is written as one scalar of the file's language, whatever it holds: `name: {{ name }}` needs no quotes in the
template, and no value can add a key. Expressions that make a part of a scalar are put together first
(`{{ name ~ "-tls" }}`).

In templates/monitoring, PromQL, Prometheus' own `{{ }}` and Grafana's `$` stay as they are: there expressions stand
between `@(` and `)@`, and are inserted as they are. All of them are names that the recipe and the cluster have checked.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from pipeline import __version__
from pipeline.errors import UserError
from pipeline.resources import parse_yaml

_FOLDER = Path(__file__).parent / "templates"
GIB, MIB = 2**30, 2**20
# Names, paths and addresses that need no quotes if they are not read as another type.
_PLAIN = re.compile(r"[A-Za-z/][\w./@+:-]*[\w/]")
# Logs that the kubelet keeps of a container (five files of 10 MiB by default), and what a container writes besides.
_LOGS = GIB


def render(template: str, /, **values: Any) -> str:
    """Fill in a template.

    Args:
        template: Path below templates/, without .j2.

    Raises:
        UserError: A value has characters that the file cannot hold.
    """
    return _environment(template).get_template(f"{template}.j2").render(values)


def render_promql(template: str, /, **values: Any) -> Any:
    """Fill in a template of templates/monitoring whose expressions stand between `@(` and `)@`, and read its YAML."""
    return parse_yaml(_promql_environment().get_template(f"monitoring/{template}.j2").render(values))


def yaml_scalar(value: Any) -> str:
    """Write a value on one line of YAML, as it may stand anywhere, also between braces.

    >>> yaml_scalar("a: {b"), yaml_scalar("8080"), yaml_scalar(8080), yaml_scalar("two\\nlines")
    ("'a: {b'", "'8080'", '8080', '"two\\\\nlines"')
    """
    return _scalar(value) if value is None or isinstance(value, bool | int | float | str) else _flow(value)


@functools.lru_cache(maxsize=4096, typed=True)  # a deployment says the same names many times
def _scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_yaml(value) == value:
        return value
    return _flow(value)


def _flow(value: Any) -> str:
    text = yaml.dump(
        [value],
        Dumper=_LineDumper,
        default_flow_style=True,
        allow_unicode=True,
        sort_keys=False,
        width=math.inf,
    )
    return str(text).strip()[1:-1]


def yaml_block(value: Any) -> str:
    """Write a value over several lines of YAML: lists indented, texts of several lines as literal blocks."""
    text: str = yaml.dump(value, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def quantity(size: float) -> str:
    """Write a number of bytes as Kubernetes does, rounded up.

    >>> quantity(3 * 2**30 - 1), quantity(64 * 2**20)
    ('3Gi', '64Mi')
    """
    unit, scale = ("Gi", GIB) if size >= GIB else ("Mi", MIB)
    return f"{math.ceil(size / scale)}{unit}"


def reserved(folders: Mapping[str, int]) -> str:
    """Sum what a pod may write to its node's disk: the request and the limit of `ephemeral-storage`.

    A kubelet evicts a pod when an emptyDir exceeds its `sizeLimit`, or when the writable layers, logs and emptyDirs on
    disk of all its containers together exceed the sum of the containers' limits of `ephemeral-storage`; an emptyDir in
    memory counts to the memory of the containers that write it (pkg/kubelet/eviction/eviction_manager.go,
    localStorageEviction; https://kubernetes.io/docs/concepts/storage/ephemeral-storage/).

    Args:
        folders: Bytes of each emptyDir on disk.
    """
    return quantity(sum(folders.values()) + _LOGS)


def exec_argument(argument: str) -> str:
    """Quote an argument of ExecStart= as systemd.service(5) reads it: its own quotes, and % and $ doubled."""
    escaped = argument.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./\\$-]+", escaped) else '"' + escaped.replace('"', '\\"') + '"'


def _compose_scalar(value: Any) -> str:
    """YAML in which Compose finds no variable: it replaces $NAME in what it reads."""
    return yaml_scalar(value).replace("$", "$$")


def _line(value: Any) -> str:
    """Text of a shell script or a unit file, where a line break would begin another line."""
    text = str(value)
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{text!r} has characters that the file cannot hold")
    return text


def _literal(text: str, indent: int) -> Markup:
    """Text of several lines for Compose, as a literal block whose key stands at this indentation."""
    if re.search("[\r\x85\u2028\u2029]", text):
        return Markup(_compose_scalar(text))
    lines = yaml_block({"": text.replace("$", "$$")}).partition(": ")[2].rstrip("\n")
    return Markup(lines.replace("\n", "\n" + " " * indent))


@functools.cache
def _environment(template: str) -> jinja2.Environment:
    escape: Callable[[Any], str] = _line
    if template.endswith((".yaml", ".yml")):
        escape = _compose_scalar if template == "compose.yaml" else yaml_scalar
    # With autoescape, what macros and `finalize` make is Markup, which is not escaped again.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=lambda value: (
            value if isinstance(value, Markup | jinja2.Undefined) else Markup(escape(value))
        ),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "quantity": quantity,
        "reserved": reserved,
        "block": _literal,
        "shell": shlex.quote,
    }
    environment.globals["version"] = __version__
    return environment


@functools.cache
def _promql_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=False,
        variable_start_string="@(",
        variable_end_string=")@",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment


class _LineDumper(yaml.SafeDumper):
    """Writes texts of several lines between double quotes, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


class _BlockDumper(_LineDumper):
    """Writes texts of several lines as literal blocks, and lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)


def _text_style(lines: str) -> Callable[[yaml.SafeDumper, str], yaml.Node]:
    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        broken = any(mark in text for mark in "\n\r\x85\u2028\u2029")
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=lines if broken else None)

    return represent


_LineDumper.add_representer(str, _text_style('"'))
_BlockDumper.add_representer(str, _text_style("|"))

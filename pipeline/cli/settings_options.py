"""Options of a command, made from a settings model: names, types, help and defaults come from its fields.

A field that is a settings model itself becomes one option, `--load FILE|KEY=VALUE`: a file of YAML with the model's
fields as keys, and single keys, which replace those of the file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le, Lt
from click.core import ParameterSource
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic.types import PathType
from pydantic_core import ErrorDetails

from pipeline.document_faults import faults_of
from pipeline.documents import Document, KeyPath, KeyPlace, read_document
from pipeline.errors import Fault, InvalidInput
from pipeline.overrides import apply_overrides
from pipeline.reading import UnreadableFile, read_bytes
from pipeline.settings import Option, Settings

Command = TypeVar("Command", bound=Callable[..., Any])
# Called with the command's other arguments and the settings.
Check = Callable[[Mapping[str, Any], Any], Iterable[Fault]]

_KEY_VALUE = re.compile(r"[A-Za-z_][\w.]*=")
_COLLECTIONS = (tuple, frozenset, dict, Mapping)  # types of options that may be repeated


def options_of(
    model: type[Settings], argument: str = "settings", *, check: Check | None = None
) -> Callable[[Command], Command]:
    """Give a command an option for each field of a model, and one argument that holds the model.

    Only what a command line or the environment gives is passed to the model, so `model_fields_set` tells it from
    defaults. All faults are reported at once.

    Args:
        argument: Parameter of the command that gets them.
        check: Finds faults of settings and the command's other arguments together.

    Returns:
        A decorator, to be placed below `click.command`. Used several times, it gives several models.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(*arguments: Any, **values: Any) -> Any:
            context = click.get_current_context()
            taken = {name: values.pop(name) for name in model.model_fields}
            parameters = {
                name: value
                for name, value in taken.items()
                if context.get_parameter_source(name) is not ParameterSource.DEFAULT
            }
            settings, faults = _validated(model, parameters, context)
            faults += [] if check is None else check(values, settings)
            if faults:
                raise InvalidInput(context.command_path, faults)
            return command(*arguments, **values, **{argument: settings})

        decorated: Any = call
        for name, field in reversed(model.model_fields.items()):
            decorated = _option(name, field)(decorated)
        result: Command = decorated
        return result

    return decorate


def _option(name: str, field: FieldInfo) -> Callable[[Any], Any]:
    option = _marker(field)
    kind = _value_type(field)
    spelled = option.name or f"--{name.replace('_', '-')}"
    if option.parse is None and is_section(kind):
        keys = f"Keys: {', '.join(kind.model_fields)}."
        return click.option(
            *spelled.split(),
            name,
            help=f"{field.description} May be repeated. {keys}",
            metavar=option.metavar or "FILE|KEY=VALUE",
            multiple=True,
            shell_complete=option.complete or _complete_section(kind),
        )
    many = get_origin(kind) in _COLLECTIONS and option.separator is None
    flag = kind is bool
    default = field.get_default(call_default_factory=True, validated_data={})
    extra: dict[str, Any] = {"is_flag": True} if flag else {"type": _parameter_type(kind, field, option)}
    if flag and "/" in spelled:
        extra = {}
    shown: bool | str = option.default or (not flag and (bool(default) or isinstance(default, int | float)))
    return click.option(
        *spelled.split(),
        name,
        help=field.description,
        metavar=option.metavar,
        envvar=option.envvar,
        show_envvar=option.envvar is not None,
        default=None if option.default and default is None else _shown(default, option),
        show_default=shown,
        multiple=many,
        hidden=option.hidden,
        shell_complete=option.complete,
        **extra,
    )


def _marker(field: FieldInfo) -> Option:
    return next((part for part in field.metadata if isinstance(part, Option)), Option())


def _shown(default: Any, option: Option) -> Any:
    """A default in the form that the option would be given in."""
    if option.separator is not None and isinstance(default, tuple):
        return option.separator.join(map(str, default)) or None
    return default


def _value_type(field: FieldInfo) -> Any:
    """The type of a field's value, without None and without annotations."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [part for part in get_args(kind) if part is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else str
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_section(kind: Any) -> bool:
    """Whether a field's type is a settings model, which becomes one option."""
    return isinstance(kind, type) and issubclass(kind, Settings)


def _complete_section(model: type[Settings]) -> Callable[..., Any]:
    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        keys = [f"{key}=" for key in model.model_fields if f"{key}=".startswith(incomplete)]
        return [*map(CompletionItem, keys), CompletionItem(incomplete, type="file")]

    return complete


def read_section(model: type[Settings], texts: Sequence[str], option: str) -> tuple[Settings, list[Fault]]:
    """Read the values of an option that gives a whole model.

    Args:
        texts: Names of YAML files, and `KEY=VALUE` with a YAML value. Later files replace keys of earlier ones, and
            single keys those of files. Paths in a file are relative to its folder.

    Returns:
        The settings, without the values at fault; and all faults.
    """
    document = Document(option, line=None)
    keys = [text for text in texts if _KEY_VALUE.match(text)]
    for text in texts:
        if text not in keys:
            _add_file(document, Path(text), model)
    given_keys = {text.partition("=")[0] for text in keys}
    for name in model.alternatives if given_keys.intersection(model.alternatives) else ():
        document.data.pop(name, None)
        document.forget((name,))
    apply_overrides(document, keys, option)
    faults = list(document.faults)
    try:
        settings = model.model_validate(document.data)
    except ValidationError as error:
        faults += faults_of(error, model, document)
        wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        try:
            settings = model.model_validate(
                {key: value for key, value in document.data.items() if key not in wrong}
            )
        except ValidationError:
            return model(), faults
    for fault in settings.conflicts():
        place = document.places.get((fault.key,), KeyPlace(option))
        faults.append(fault if fault.where else replace(fault, where=place.where, line=place.line))
    return settings, faults


def _add_file(document: Document, path: Path, model: type[Settings]) -> None:
    try:
        part = read_document(read_bytes(path), str(path), example=f"such as {_example(model)}")
    except UnreadableFile as error:
        document.faults.append(error.fault)
        return
    for name, value in part.data.items():
        key: KeyPath = (name,)
        field = model.model_fields.get(name)
        if field is not None and isinstance(value, str) and value not in _words(field.annotation):
            part.data[name] = str(path.parent / value) if Path in _types(field.annotation) else value
        document.forget(key)
    document.data |= part.data
    document.places |= part.places
    document.faults += part.faults
    document.formless |= part.formless


def _example(model: type[Settings]) -> str:
    name, field = next(iter(model.model_fields.items()))
    return f"{name}: {(field.examples or ['…'])[0]}"


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def _words(annotation: Any) -> list[str]:
    """Texts that a field takes besides paths, such as "calibration"."""
    literals = (get_args(part) for part in _types(annotation) if get_origin(part) is Literal)
    return [word for words in literals for word in words]


class _Text(click.ParamType[Any]):
    """Any text: the model says what is wrong with it, together with all other faults."""

    name = "text"


class _Number(click.IntRange):
    """Shows its range in the help, and leaves the check to the model."""

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        return value


def _parameter_type(kind: Any, field: FieldInfo, option: Option) -> click.ParamType[Any]:
    if option.parse is None and get_origin(kind) in _COLLECTIONS and option.separator is None:
        kind = get_args(kind)[0]
    if option.parse is not None:
        return _Text()
    if get_origin(kind) is Literal:
        return click.Choice([str(value) for value in get_args(kind)])
    if isinstance(kind, type) and issubclass(kind, Path):
        wanted = next((part.path_type for part in _metadata(field) if isinstance(part, PathType)), "")
        return click.Path(
            exists=wanted in ("file", "dir"),
            file_okay=wanted != "dir",
            dir_okay=wanted != "file",
            path_type=Path,
        )
    if kind in (int, float):
        bounds = {type(bound): bound for bound in field.metadata}
        low, high = bounds.get(Ge) or bounds.get(Gt), bounds.get(Le) or bounds.get(Lt)
        if low is None and high is None:
            text = _Text()
            text.name = {int: "integer", float: "float"}[kind]
            return text
        number = _Number(
            min=None if low is None else getattr(low, "ge", getattr(low, "gt", None)),
            max=None if high is None else getattr(high, "le", getattr(high, "lt", None)),
            min_open=Ge not in bounds and Gt in bounds,
            max_open=Le not in bounds and Lt in bounds,
        )
        number.name = {int: "integer range", float: "float range"}[kind]
        return number
    return _Text()


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """Annotations of a field, and of the members of its union or tuple."""
    yield from field.metadata
    parts: list[Any] = [field.annotation]
    while parts:
        part = parts.pop()
        if get_origin(part) is Annotated:
            yield from part.__metadata__
        parts += get_args(part)


def _validated(
    model: type[Settings], arguments: dict[str, Any], context: click.Context
) -> tuple[Settings, list[Fault]]:
    """Make the settings, and list all faults; a value that is not accepted is then left out of the settings."""
    faults = list[Fault]()
    spelled = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    values = dict[str, Any]()
    for name, value in arguments.items():
        option = _marker(model.model_fields[name])
        section = _value_type(model.model_fields[name])
        if option.parse is None and is_section(section):
            values[name], section_faults = read_section(section, value, spelled[name])
            faults += section_faults
            continue
        several = option.separator is not None or isinstance(value, tuple)
        parts = value.split(option.separator) if option.separator and isinstance(value, str) else value
        if option.parse is None or value is None:
            values[name] = parts
            continue
        parsed = list[Any]()
        texts: Any = parts if several else (parts,)
        for part in texts:
            try:
                parsed.append(option.parse(part))
            except ValueError as error:
                faults.append(Fault(str(error), key=spelled[name], value=part))
        values[name] = parsed if several else next(iter(parsed), None)
    faulty = {fault.key for fault in faults}
    try:
        settings = model.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0]) if detail["loc"] else ""
            field = model.model_fields.get(name)
            key = spelled.get(name, name)
            if key not in faulty:
                faults.append(
                    Fault(_problem(detail, field), key=key, value=detail["input"] if name else None)
                )
        faulty |= {fault.key for fault in faults}
        right = {name: value for name, value in values.items() if spelled[name] not in faulty}
        try:
            settings = model.model_validate(right)
        except ValidationError:
            raise InvalidInput(context.command_path, faults) from None
    faults += settings.conflicts()
    return settings, faults


def _problem(detail: ErrorDetails, field: FieldInfo | None) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    kind = None if field is None else _value_type(field)
    if field is None or kind not in (int, float):
        return f"is not accepted: {detail['msg']}"
    wanted = {int: "a whole number", float: "a number"}[kind]
    bounds = {type(bound): bound for bound in field.metadata}
    if Ge in bounds and Le in bounds:
        return f"must be {wanted} from {bounds[Ge].ge:g} to {bounds[Le].le:g}"
    templates = {
        Ge: "of at least {0.ge:g}",
        Gt: "above {0.gt:g}",
        Le: "of at most {0.le:g}",
        Lt: "below {0.lt:g}",
    }
    limits = [templates[kind].format(bound) for kind, bound in bounds.items() if kind in templates]
    return " ".join(("must be", wanted, " and ".join(limits))).rstrip()

"""Documents held against pydantic models: every error as a fault with file, line, key, value and what would be right.

    read_yaml(Model, path)                # the model, or InvalidInput with all that is wrong
    faults_of(error, Model, document)     # the same for a document that was read already

An unknown key is reported with its nearest neighbour; a bound with the range; a choice with all choices. Rules that
span fields are the models' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from pipeline.documents import Document, KeyPath, dotted, read_document
from pipeline.errors import Fault, InvalidInput
from pipeline.reading import MAX_BYTES, parse_json, read_bytes

Model = TypeVar("Model", bound=BaseModel)
UNION = ("union_tag_not_found", "union_tag_invalid")
# Faults that are described; more are counted.
MOST_FAULTS = 50
# Type of pydantic's error, without its ending -> what the value must be.
_TYPES = {
    "int": "a whole number", "float": "a number", "finite_number": "a finite number", "bool": "true or false",
    "string": "text", "tuple": "a list", "list": "a list", "model": "a section of keys",
    "model_attributes": "a section of keys", "dict": "a section of keys", "mapping": "a section of keys",
}  # fmt: skip
_ENDINGS = ("_type", "_parsing", "_from_float", "_parsing_size")
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_EMPTY = ("too_short", "string_too_short")


def refusal(problem: str, fix: str = "") -> PydanticCustomError:
    """Make the error that a validator of a field raises: the problem, and what would be right."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "fix": fix})


def read_yaml(model: type[Model], path: Path, most_bytes: int = MAX_BYTES) -> Model:
    """Read a file of YAML that a model describes.

    Raises:
        UnreadableFile: it cannot be read, or is too large.
        InvalidInput: with everything that is wrong with it.
    """
    document = read_document(read_bytes(path, most_bytes), str(path))
    return validate(model, document)


def read_json(model: type[Model], path: Path, most_bytes: int = MAX_BYTES) -> Model:
    """Read a file of JSON that a model describes. Raises as `read_yaml`."""
    content = read_bytes(path, most_bytes)
    document = Document(str(path), parse_json(content, path), line=None)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise _invalid(document, faults_of(error, model, document)) from None


def validate(model: type[Model], document: Document) -> Model:
    """Make a model of a document. Raises InvalidInput with its faults of form and of content."""
    faults = list(document.faults)
    if document.is_mapping:
        try:
            made = model.model_validate(document.data)
        except ValidationError as error:
            faults += faults_of(error, model, document)
        else:
            if not faults:
                return made
    raise _invalid(document, faults)


def _invalid(document: Document, faults: Sequence[Fault]) -> InvalidInput:
    faults = sorted(faults, key=lambda fault: fault.line or 0)
    return InvalidInput(document.where, faults[:MOST_FAULTS], len(faults[MOST_FAULTS:]))


def faults_of(error: ValidationError, model: type[BaseModel], document: Document) -> list[Fault]:
    """Describe each error of a document, as far as it is not a fault of its form already."""
    return [
        fault_at(path, detail, model, document) for path, detail in located_errors(error, model, document)
    ]


def located_errors(
    error: ValidationError, model: type[BaseModel], document: Document
) -> list[tuple[KeyPath, ErrorDetails]]:
    """Find the key of each error, in the order of the file; without those that the document's own faults explain."""
    errors = [(without_tags(model, detail["loc"]), detail) for detail in error.errors(include_url=False)]
    errors = [
        located
        for located in errors
        if located[1]["input"] is not None or located[0] not in document.formless
    ]
    return sorted(errors, key=lambda error: document.place(error[0]).line or 0)


def fault_at(path: KeyPath, error: ErrorDetails, model: type[BaseModel], document: Document) -> Fault:
    """Describe one error, at the key that it is about."""
    if error["type"] in UNION:
        path = (*path, error["ctx"]["discriminator"].strip("'"))
    if document.places and path not in document.places and path and isinstance(path[-1], int):
        # One value stands where a list may.
        path = path[:-1]
    place = document.place(path)
    problem, fix = explain(error, path, model, document)
    value: object = place.text if path in document.places else None
    if not document.places and path:
        value = error["input"]
    if error["type"] == "missing" or document.is_secret:
        value = None
    if error["type"] == "extra_forbidden" and document.is_secret:
        path = path[:-1]
    value = None if value == "" else value
    return Fault(problem, where=place.where, line=place.line, key=dotted(path), value=value, fix=fix)


def explain(
    error: ErrorDetails, path: KeyPath, model: type[BaseModel], document: Document
) -> tuple[str, str]:
    """Say what an error means.

    Args:
        error: one error of pydantic.
        path: the key that it is about.
        model: model of the whole document.
        document: which may be secret: then nothing of it is quoted.

    Returns:
        The problem, and what would be right ("" if nothing can be said).
    """
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    info = field_at(model, document.data, path)
    if kind == "refused":
        return context["problem"], context["fix"]
    if kind == "missing":
        return "is missing", _example(info)
    if kind == "extra_forbidden":
        return "has a key that is not known" if document.is_secret else "is not a key", _allowed(
            path, model, document.data
        )
    if kind in UNION:
        union = field_at(model, document.data, path[:-1])
        tags = [tag(member)[1] for member in members(union.annotation)] if union else []
        return ("is missing", _one_of(tags)) if kind == UNION[0] else _unknown(tags, value.get(path[-1]))
    if kind == "literal_error":
        return _unknown(context["expected"].replace(" or ", ", ").replace("'", "").split(", "), value)
    if kind in _EMPTY and context.get("min_length") == 1:
        return "is empty", _example(info)
    if kind in _BOUNDS and info is not None:
        return f"must be {_range(info)}", ""
    for ending in ("", *_ENDINGS):
        if kind.endswith(ending) and kind.removesuffix(ending) in _TYPES:
            text = None if document.is_secret else document.place(path).text
            return _wrong_type(_TYPES[kind.removesuffix(ending)], value, text, info)
    return f"is not accepted: {error['msg']}", ""


def _wrong_type(wanted: str, value: Any, text: str | None, info: FieldInfo | None) -> tuple[str, str]:
    if value is None:
        optional = info is not None and not info.is_required()
        return f"is empty; it must be {wanted}", "or leave the key out" if optional else ""
    if wanted == "text" and not isinstance(value, list | dict):
        return "must be text", "write it in quotes" + ("" if text is None else f': "{text}"')
    if wanted == "true or false" and str(value).lower() in ("on", "yes", "y", "1"):
        return "must be true or false", "write true"
    if wanted == "true or false" and str(value).lower() in ("off", "no", "n", "0"):
        return "must be true or false", "write false"
    if wanted.endswith("number") and isinstance(value, str) and text is not None:
        bare = value.replace("_", "").replace(",", "").strip()
        if bare.isdecimal():
            return f"must be {wanted}", f"write {bare}, without quotes or separators"
    return f"must be {wanted}", _example(info) if wanted == "text" else ""


def _range(info: FieldInfo) -> str:
    """Write the bounds of a number.

    >>> from pipeline.recipe.sections import Limits
    >>> _range(Limits.model_fields["max_concurrency"])
    '1 to 8192'
    """
    bounds = {type(bound): bound for bound in _metadata(info)}
    low, high = bounds.get(Ge), bounds.get(Le)
    if low and high:
        return f"{low.ge} to {high.le}"
    parts = [
        f"{word} {getattr(bounds[kind], name)}"
        for kind, name, word in (
            (Ge, "ge", "at least"), (Gt, "gt", "more than"), (Le, "le", "at most"), (Lt, "lt", "less than"),
        )
        if kind in bounds
    ]  # fmt: skip
    return " and ".join(parts)


def _metadata(info: FieldInfo) -> Iterator[Any]:
    """The bounds of a field, or of the items of its list."""
    yield from info.metadata
    parts = list(get_args(info.annotation))
    while parts:
        part = parts.pop()
        if isinstance(part, FieldInfo):
            yield from part.metadata
        else:
            parts += get_args(part)


def _example(info: FieldInfo | None) -> str:
    if info is None:
        return ""
    if not info.examples:
        return _range(info)
    example = info.examples[0]
    return f"such as {'[' + ', '.join(map(str, example)) + ']' if isinstance(example, list) else example}"


def _unknown(allowed: Sequence[str], value: Any) -> tuple[str, str]:
    if value is None:
        return "is empty", _one_of(allowed)
    return "is not known", did_you_mean(str(value).lower(), allowed) + _one_of(allowed)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Begin an advice with the nearest of the known names; "" if none is near.

    >>> did_you_mean("max_token", ["max_tokens", "seed"])
    'did you mean max_tokens? '
    """
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _one_of(allowed: Sequence[str]) -> str:
    return f"one of {', '.join(allowed)}"


def _allowed(path: KeyPath, model: type[BaseModel], data: Mapping[str, Any]) -> str:
    key, holder = str(path[-1]), field_at(model, data, path[:-1])
    section = section_at(model, data, path[:-1])
    names = list(fields_of(section)) if section else []
    near = did_you_mean(key, names)
    others = [member for member in members(holder.annotation) if key in fields_of(member)] if holder else []
    elsewhere = [known for known in all_keys(model) if known.split(".")[-1] == key and known != dotted(path)]
    hint = near or (f"did you mean {elsewhere[0]}? " if elsewhere else "")
    if others and (name := tag(others[0])[0]):
        hint = (
            f"it belongs to {dotted((*path[:-1], name))} {' or '.join(tag(member)[1] for member in others)}; "
        )
    return f"{hint}allowed{' here' if elsewhere and not near else ''}: {', '.join(names)}"


# What may stand at each key, read off the models.


def fields_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Map the keys of a section, as files have them, to its fields."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def members(annotation: Any) -> list[type[BaseModel]]:
    """List the sections that an annotation allows.

    >>> from pipeline.recipe.sections import Limits
    >>> [section.__name__ for section in members(Limits | None)]
    ['Limits']
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in members(part)]


def tag(section: type[BaseModel]) -> tuple[str, str]:
    """Return the key and value that tell a member of a union, such as ("kind", "cpu"); empty for one without."""
    for name, info in section.model_fields.items():
        if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            return name, get_args(info.annotation)[0]
    return "", ""


def _choose(info: FieldInfo, value: Any) -> type[BaseModel] | None:
    """The section that a value is meant as; None where its tag does not say."""
    sections = members(info.annotation)
    if len(sections) == 1:
        return sections[0]
    tags = value if isinstance(value, Mapping) else {}
    return next((section for section in sections if tags.get(tag(section)[0]) == tag(section)[1]), None)


def section_at(model: type[BaseModel], data: Any, path: KeyPath) -> type[BaseModel] | None:
    """Find the section whose keys stand at `path`; None if there is none, or several are possible."""
    section: type[BaseModel] | None = model
    info: FieldInfo | None = None
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
        if info is not None and (isinstance(part, int) or _has_names(info)):
            # An item of a list, or a name of a mapping, is what their field is said to hold.
            section, info = _choose(info, data), None
            continue
        info = fields_of(section).get(str(part)) if section else None
        if info is None:
            return None
        section = _choose(info, data)
    return None if info is not None and _has_names(info) else section


def _has_names(info: FieldInfo) -> bool:
    """Whether the keys below a field are names that the writer chose."""
    return get_origin(info.annotation) in (dict, Mapping)


def field_at(model: type[BaseModel], data: Any, path: KeyPath) -> FieldInfo | None:
    """Find the field at `path` (of a list's item: the list)."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return None
    section = section_at(model, data, path[:-1])
    return fields_of(section).get(str(path[-1])) if section else None


def without_tags(model: type[BaseModel], location: Sequence[str | int]) -> KeyPath:
    """Return pydantic's location of an error, less the tags of unions that it puts in.

    ("runtime", "cpu", "threads") -> ("runtime", "threads")
    """
    path: list[str | int] = []
    section: type[BaseModel] | None = model
    info: FieldInfo | None = None
    parts = list(location)
    while parts:
        part = parts.pop(0)
        path.append(part)
        if info is not None and (isinstance(part, int) or _has_names(info)):
            sections, info = members(info.annotation), None
        else:
            info = fields_of(section).get(str(part)) if section else None
            sections = members(info.annotation) if info else []
        section = sections[0] if len(sections) == 1 else None
        if len(sections) > 1 and parts:
            section = next((member for member in sections if tag(member)[1] == parts[0]), None)
            if section is not None:
                parts.pop(0)
    return tuple(path)


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, of all members of unions."""
    for name, info in fields_of(model).items():
        yield prefix + name
        for section in members(info.annotation):
            yield from all_keys(section, f"{prefix}{name}.")

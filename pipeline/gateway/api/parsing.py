"""Parses bodies, queries and forms of requests into pydantic models, within bounds, and removes their further fields.

Faults become one answer of status 400. The policy for further fields is the same for every API that models answer:

    a field that is unknown, or changes nothing here     ignored, and named in x-pipeline-ignored-fields
    a tool that the server would have to run             left out, and named there; refused if it must be called
    more output than the model gives                     clamped, and said in x-pipeline-max-tokens
    a known field whose value would change the answer    refused by name, if it cannot be honoured

Recipes with `serving.strict` refuse unknown fields, such tools and such limits instead. Types of requests declare their
fields (`OpenModel`, `Shape`); `tolerate` removes everything else. Choices of tools are judged in
`pipeline.gateway.api.tools.choice`, limits in `pipeline.gateway.api.generation`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.gateway.api.bounds import (
    MAX_DEPTH,
    MAX_FAULTS,
    MAX_GUIDE_BYTES,
    MAX_GUIDE_DEPTH,
    MAX_SHOWN,
    MAX_VALUES,
)
from pipeline.gateway.errors import ApiError
from pipeline.models.chat_template import ChatTemplate

IGNORED_FIELDS, MAX_TOKENS = "x-pipeline-ignored-fields", "x-pipeline-max-tokens"
_NUMBERS_PER_VALUE = 8
_MAX_HEADER_CHARS = 1024
_MAX_FAULT_CHARS = 300
# Parts of the place of a fault that name a member of a union, such as "constrained-str" and "list[int]".
_UNION_MEMBER = re.compile(r"constrained-\w+|(?:list|dict|tuple|set|function-\w+)\[.*\]|str|int|float|bool")
_UNPRINTABLE = re.compile(r"[^\w.$@:/-]", re.ASCII)
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # values that ask for nothing
_Kind = TypeVar("_Kind", bound=BaseModel)


def check_json(
    text: bytes, where: str = "body", param: str | None = None, *, max_depth: int = MAX_DEPTH
) -> None:
    """Refuse JSON that would become too many Python objects, or is nested too deep; before it is parsed.

    Args:
        text: JSON, or what is to be.
        where: its place in the request.
        param: field of the request that holds it; None for the whole body.
        max_depth: lists and objects within each other.

    Raises:
        ApiError: 400.
    """
    few_brackets = text.count(b"[") + text.count(b"{") <= max_depth
    if few_brackets and len(text) <= MAX_VALUES:
        return
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    values = plain.count(b'"') // 2
    if values <= MAX_VALUES:
        outside = b'"'.join(plain.split(b'"')[::2])
        values += outside.count(b"[") + outside.count(b"{") + outside.count(b",") // _NUMBERS_PER_VALUE
    if values > MAX_VALUES:
        raise ApiError(
            400, f"{where}: has more than {MAX_VALUES} values: texts, numbers, lists and objects", param=param
        )
    if not few_brackets and _depth(outside) > max_depth:
        raise ApiError(400, f"{where}: is nested deeper than {max_depth} levels", param=param)


def read_json(text: str, where: str, param: str) -> Any:
    """Parse JSON that stands as text in a field.

    Raises:
        ApiError: 400, if it has too many values, or is nested too deep.
        ValueError: it is no JSON.
    """
    check_json(text.encode(errors="replace"), where, param)
    return json.loads(text)


def check_guide(kind: str, text: str, where: str, param: str) -> None:
    """Refuse a form of answers that is too large, or nested too deep.

    Args:
        kind: "json_schema", "regex", "ebnf_grammar" or "structural_tag".
        text: the schema or tag as JSON, the expression, or the grammar.
        where: its place in the request, such as response_format.json_schema.schema.
        param: field of the request that holds it.

    Raises:
        ApiError: 400.
    """
    size = len(text.encode(errors="replace"))
    if size > MAX_GUIDE_BYTES:
        raise ApiError(400, f"{where}: has {size} bytes, of at most {MAX_GUIDE_BYTES}", param=param)
    if sum(text.count(bracket) for bracket in "([{") <= MAX_GUIDE_DEPTH:
        return
    depth = _depth(
        _LITERALS["json_schema" if kind == "structural_tag" else kind].sub("", text).encode(errors="replace")
    )
    if depth > MAX_GUIDE_DEPTH:
        raise ApiError(
            400, f"{where}: is nested {depth} levels deep, of at most {MAX_GUIDE_DEPTH}", param=param
        )


# Parts of a guide whose brackets nest nothing. Possessive, since a regular expression must not be what takes long.
_LITERALS = {
    "json_schema": re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL),
    "regex": re.compile(r"\\.|\[(?:[^\]\\]++|\\.)*+\]", re.DOTALL),
    "ebnf_grammar": re.compile(r'"(?:[^"\\\n]++|\\.)*+"|\[(?:[^\]\\\n]++|\\.)*+\]|\\.', re.DOTALL),
}
_STEPS = bytes(2 if byte in b"([{" else 0 for byte in range(256))
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"()[]{}")


def _depth(text: bytes) -> int:
    """Count the most brackets that are open at once in a text without literals.

    >>> _depth(b'{[], [[]]}')
    3
    """
    steps = text.translate(_STEPS, delete=_NO_BRACKETS)
    return max(accumulate(step - 1 for step in steps), default=0)


def parse_request(kind: type[_Kind], body: bytes) -> _Kind:
    """Parse and validate the JSON body of a request. Raises `ApiError` (400) with its first faults."""
    check_json(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_faults(error) from None


def validate_request(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """Validate the query of a URL, the fields of a form, or a translated body. Raises `ApiError` (400)."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _first_faults(error) from None


def raise_faults(faults: Sequence[str], param: str) -> None:
    """Raise `ApiError` (400) with the first faults of a field, if there are any."""
    if faults:
        raise ApiError(400, "; ".join(faults[:MAX_FAULTS]), param=param)


def unsupported(param: str, text: str) -> ApiError:
    """Return the answer to a request for something that this server does not have."""
    return ApiError(400, text, param=param, code="unsupported_parameter")


def _first_faults(error: ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_input=False)[:MAX_FAULTS]
    by_place: dict[str, list[str]] = {}
    for fault in faults:
        by_place.setdefault(_place(fault["loc"]), []).append(fault["msg"][:_MAX_FAULT_CHARS])
    texts = [f"{place}: {' or '.join(dict.fromkeys(messages))}" for place, messages in by_place.items()]
    if error.error_count() > MAX_FAULTS:
        texts.append(f"and {error.error_count() - MAX_FAULTS} more")
    first = faults[0]["loc"]
    return ApiError(400, "; ".join(texts), param=str(first[0])[:MAX_SHOWN] if first else None)


def _place(parts: Sequence[int | str]) -> str:
    """Write the place of a fault, without the types that pydantic names for each member of a union."""
    return (
        ".".join(str(part)[:MAX_SHOWN] for part in parts if not _UNION_MEMBER.fullmatch(str(part))) or "body"
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Fields of an object that stands as plain JSON within a request.

    Attributes:
        known: fields that are read.
        idle: further fields that are known, and change nothing here.
        within: field -> shape of the object, or of each object of the list, that it holds.
        for_template: whether the chat template gets the object; further fields that it names then stay.
    """

    known: Set[str]
    idle: Set[str] = frozenset()
    within: Mapping[str, Shape] = field(default_factory=dict)
    for_template: bool = False


class OpenModel(BaseModel):
    """A part of a request that may have further fields, which `tolerate` looks after."""

    model_config = ConfigDict(extra="allow")

    # Fields that are known, and change nothing here.
    idle: ClassVar[Set[str]] = frozenset()
    # Field -> values that ask for nothing; all others are refused.
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Those of `refused` without which the answer is what it would be, or that need tools which run elsewhere: refused
    # by strict recipes alone.
    optional: ClassVar[Set[str]] = frozenset()
    # Field -> shape of the object, or of each object of the list, that it holds.
    shapes: ClassVar[Mapping[str, Shape]] = {}
    # Types of `tools` that the client runs; None is a tool without a type.
    function_types: ClassVar[Sequence[str | None]] = ("function",)


def hosted_tools(tools: Sequence[Mapping[str, Any]], function_types: Sequence[str | None]) -> dict[int, str]:
    """Find the tools that the server would have to run, or whose form it does not know: index -> type.

    Args:
        tools: tools of a request.
        function_types: types of those that the client runs.

    >>> hosted_tools([{"type": "function"}, {"type": "web_search"}], ["function"])
    {1: 'web_search'}
    """
    kinds = ((index, tool.get("type")) for index, tool in enumerate(tools))
    return {index: kind for index, kind in kinds if isinstance(kind, str) and kind not in function_types}


def tolerate(request: OpenModel, template: ChatTemplate | None, *, strict: bool) -> list[str]:
    """Remove what a request holds besides the fields that are honoured.

    Args:
        request: the request, which is changed.
        template: the model's, which may read further fields of messages and tools.
        strict: whether unknown fields, and tools that the server would have to run, are refused.

    Returns:
        Places of what was removed and did ask for something, such as "metadata" or "tools.2".

    Raises:
        ApiError: 400, with every field that is refused.
    """
    removal = _Removal(template, strict=strict)
    removal.look_at_model(request)
    removal.check()
    return removal.ignored


def ignored_headers(places: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the header that names what was ignored, if something was; what is too much for it is counted.

    >>> ignored_headers(["metadata", "tools.2"])
    [(b'x-pipeline-ignored-fields', b'metadata, tools.2')]
    """
    value = ""
    for index, place in enumerate(places):
        shown = _UNPRINTABLE.sub("?", place)
        if len(value) + len(shown) > _MAX_HEADER_CHARS:
            value += f", and {len(places) - index} more"
            break
        value += f", {shown}" if value else shown
    return [(IGNORED_FIELDS.encode(), value.encode())] if places else []


class _Removal:
    """Removal of further fields from one request, and what was removed."""

    def __init__(self, template: ChatTemplate | None, *, strict: bool) -> None:
        self._template, self._strict = template, strict
        self.ignored: list[str] = []  # places of what was removed
        self._unknown: list[str] = []  # those of them that no API has
        self._unsupported: list[tuple[str, str]] = []  # field that is refused, and what is wrong with it

    def look_at_model(self, model: OpenModel, at: str = "") -> None:
        if extra := model.model_extra:
            for name, value in extra.items():
                self._judge_field(model, name, value, at)
            extra.clear()
        fields = type(model).model_fields
        for name in model.model_fields_set & fields.keys():
            if isinstance(value := getattr(model, name), OpenModel):
                self.look_at_model(value, f"{at}{fields[name].alias or name}.")
        hosted = hosted_tools(getattr(model, "tools", None) or (), model.function_types)
        self.ignored += (f"tools.{index}" for index in hosted)
        if self._strict:
            self._unsupported += (
                ("tools", f"tools.{index}.type: {kind[:MAX_SHOWN]!r} is not supported by this server")
                for index, kind in hosted.items()
            )
        for name, shape in model.shapes.items():
            value = getattr(model, name)
            cleaned = self._cleaned(value, shape, name, hosted if name == "tools" else ())
            if cleaned is not value:
                setattr(model, name, cleaned)

    def check(self) -> None:
        """Raise `ApiError` if something is refused."""
        texts = [text for _, text in self._unsupported[:MAX_FAULTS]]
        if self._strict and self._unknown:
            listed = ", ".join(self._unknown[:MAX_FAULTS])
            text = "; ".join([f"Unrecognized request argument supplied: {listed}", *texts])
            raise ApiError(400, text, param=self._unknown[0].partition(".")[0])
        if texts:
            raise unsupported(self._unsupported[0][0], "; ".join(texts))

    def _judge_field(self, model: OpenModel, name: str, value: Any, at: str) -> None:
        place = f"{at}{name[:MAX_SHOWN]}"
        if name in model.refused and name not in model.idle:
            if value in model.refused[name]:
                return
            if self._strict or name not in model.optional:
                text = f"{place} is not supported by this server"
                self._unsupported.append((place.partition(".")[0], text))
            self.ignored.append(place)
        else:
            self._ignore(place, value, known=name in model.idle)

    def _ignore(self, place: str, value: Any, *, known: bool) -> None:
        if not known:
            self._unknown.append(place)
        if not known or value not in _NOTHING:
            self.ignored.append(place)

    def _cleaned(self, value: Any, shape: Shape, at: str, skipped: Container[int] = ()) -> Any:
        """The value without fields that its shape does not have; the same object if there are none."""
        if isinstance(value, list):
            members = [
                member if index in skipped else self._cleaned(member, shape, f"{at}.{index}")
                for index, member in enumerate(value)
            ]
            return members if any(new is not old for new, old in zip(members, value, strict=True)) else value
        if not isinstance(value, dict):
            return value
        further = value.keys() - shape.known
        if shape.for_template and self._template is not None:
            further -= self._template.words
        changed: dict[str, Any] = {}
        for name in shape.within.keys() & value.keys():
            if isinstance(held := value[name], dict | list):
                cleaned = self._cleaned(held, shape.within[name], f"{at}.{name}")
                if cleaned is not held:
                    changed[name] = cleaned
        if not further and not changed:
            return value
        for name in value:
            if name in further:
                self._ignore(f"{at}.{name[:MAX_SHOWN]}", value[name], known=name in shape.idle)
        return {name: changed.get(name, held) for name, held in value.items() if name not in further}

"""From the fields of data/llm_args.yaml to pydantic models, so that values are judged as upstream's pydantic judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, create_model

_BASE = "DecodingBaseConfig"  # its fields are in all models whose names end in _DECODING
_DECODING = "DecodingConfig"
_NULL = " | null"
_PLAIN: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "path": str,
    "dict": dict[str, Any],
    "any": Any,
    "speculation": Any,  # judged apart, because its model is chosen by decoding_type
    "positive": Annotated[int, Field(gt=0)],
}
_BOUNDS = ("ge", "gt", "le")


def _no_object(value: Any) -> Any:
    raise ValueError(f"takes a Python object, which no file can hold, not {value!r}")


class Models:
    """The models of one version, by upstream's names; made when they are asked for."""

    def __init__(self, fields: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._fields = fields
        self._made: dict[str, type[BaseModel]] = {}

    def __getitem__(self, name: str) -> type[BaseModel]:
        if name not in self._made:
            made: dict[str, Any] = {entry["name"]: self._field(entry) for entry in self._entries(name)}
            config = ConfigDict(extra="forbid", protected_namespaces=())
            self._made[name] = create_model(name, __config__=config, **made)
        return self._made[name]

    def names(self, name: str) -> tuple[str, ...]:
        """Names of a model's fields."""
        return tuple(entry["name"] for entry in self._entries(name))

    def nested(self, name: str, field: str) -> str | None:
        """The model that a field holds; None if it holds something else."""
        for entry in self._entries(name):
            if entry["name"] == field:
                inner = entry["type"].removesuffix(_NULL)
                return inner if inner in self._fields else None
        return None

    def _entries(self, name: str) -> Sequence[Mapping[str, Any]]:
        base = self._fields[_BASE] if name.endswith(_DECODING) and name != _BASE else ()
        return (*base, *self._fields[name])

    def _field(self, entry: Mapping[str, Any]) -> tuple[Any, Any]:
        default = ... if entry.get("default") == "required" else None
        alias = AliasChoices(entry["name"], entry["alias"]) if "alias" in entry else None
        return self._annotation(entry), Field(default=default, validation_alias=alias)

    def _annotation(self, entry: Mapping[str, Any]) -> Any:
        text: str = entry["type"]
        made = self._type(text.removesuffix(_NULL))
        bounds = {bound: entry[bound] for bound in _BOUNDS if bound in entry}
        if "size" in entry:
            bounds["min_length"] = entry["size"]
        if bounds:
            made = Annotated[made, Field(**bounds)]
        return made | None if text.endswith(_NULL) else made

    def _type(self, text: str) -> Any:
        if text in _PLAIN:
            return _PLAIN[text]
        if text == "python":
            return Annotated[Any, BeforeValidator(_no_object)]
        if text in self._fields:
            return self[text]
        kind, _, rest = text.partition("[")
        inside = rest.removesuffix("]")
        parts = tuple(part.strip() for part in inside.split(","))
        match kind:
            case "list":
                return list[self._type(inside)]  # type: ignore[misc]
            case "map":
                return dict[self._type(parts[0]), self._type(parts[1])]  # type: ignore[misc]
            case "choice":
                return Literal[parts]
            case "load_format":
                return Annotated[str, AfterValidator(lambda value: _load_format(value, parts))]
        raise ValueError(f"data/llm_args.yaml: type {text}")


def _load_format(value: str, known: Sequence[str]) -> str:
    if value.lower() not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return value

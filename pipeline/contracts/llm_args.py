"""Arguments of TensorRT-LLM's LLM API on its PyTorch backend: which there are, and what upstream would refuse.

The facts are data (`data/llm_args.yaml`, each with its source); this answers from them. `check` judges like upstream's
pydantic models: types, choices, bounds, nested settings, keys that do not exist, then the rules across fields. Nothing
of TensorRT-LLM is imported. A version is added by adding data.

>>> [str(fault) for fault in check("1.2.1", {"model": "m", "max_batchsize": 8})]
['max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)']
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from pipeline.contracts.llm_rules import RULES
from pipeline.contracts.version_range import entries_in, require_known
from pipeline.errors import Fault
from pipeline.resources import parse_yaml

ARGUMENTS = "LlmArgs"
SPECULATION = "speculative_config"


@dataclass(frozen=True, slots=True)
class SpeculationFormat:
    """How a way to propose tokens is written in `speculative_config`, and what it costs."""

    decoding_type: str
    draft_key: str | None  # the key that names the checkpoint of a draft; None where there is no draft
    two_models: bool  # two models that run in turns, which upstream cannot overlap with scheduling
    extra: Mapping[str, Any] = field(default_factory=dict)  # settings that the version needs besides


def versions() -> tuple[str, ...]:
    """Versions of TensorRT-LLM whose arguments are known, oldest first."""
    return tuple(_data()["versions"])


def require(version: str) -> None:
    """Raise UserError if the arguments of a version are not known; the text names its neighbours."""
    require_known(version, versions())


def names(version: str) -> tuple[str, ...]:
    """Names of all arguments in a version."""
    require(version)
    return _models(version).names(ARGUMENTS)


def speculation(version: str, method: str) -> SpeculationFormat:
    """Look up how a recipe's method (ngram, mtp, draft_target, eagle3) is written in a version."""
    require(version)
    entry = next(
        entry
        for entry in entries_in(_data()["speculation"], version, versions())
        if entry["method"] == method
    )
    return SpeculationFormat(
        decoding_type=entry["decoding_type"],
        draft_key=entry.get("draft_key"),
        two_models=entry["two_models"],
        extra=dict(entry.get("extra", {})),
    )


def check(version: str, arguments: Mapping[str, Any]) -> tuple[Fault, ...]:
    """List everything that upstream would refuse in the arguments; empty if it would start.

    Raises:
        UserError: the version is not known.
    """
    require(version)
    models = _models(version)
    faults: list[Fault] = []
    values = _read(models, version, ARGUMENTS, arguments, faults)
    if arguments.get(SPECULATION) is not None:
        values[SPECULATION] = _read_speculation(models, version, arguments[SPECULATION], faults)
    if not faults:
        rules = entries_in(_data()["rules"], version, versions())
        faults += [fault for rule in rules for fault in RULES[rule["id"]](values)]
    return tuple(faults)


def _read_speculation(models: Models, version: str, given: Any, faults: list[Fault]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        faults.append(Fault("must be settings, with decoding_type among them", key=SPECULATION, value=given))
        return {}
    known = {entry["name"]: entry for entry in entries_in(_data()["decoding_types"], version, versions())}
    chosen = given.get("decoding_type")
    key = f"{SPECULATION}.decoding_type"
    if chosen not in known:
        text = "is missing" if chosen is None else f"is not known to TensorRT-LLM {version}"
        faults.append(Fault(text, key=key, value=chosen, fix=_one_of(str(chosen), tuple(known))))
        return {}
    if "refused" in known[chosen]:
        reason = known[chosen]["refused"]
        faults.append(Fault(f"does not run on the PyTorch backend: {reason}", key=key, value=chosen))
        return {}
    rest = {name: value for name, value in given.items() if name != "decoding_type"}
    values = _read(models, version, known[chosen]["model"], rest, faults, f"{SPECULATION}.")
    return {"decoding_type": chosen, **values}


def _read(
    models: Models,
    version: str,
    name: str,
    given: Mapping[str, Any],
    faults: list[Fault],
    prefix: str = "",
) -> dict[str, Any]:
    """The values as upstream reads them, without those that were not given; adds to the faults."""
    try:
        return models[name].model_validate(dict(given)).model_dump(exclude_unset=True)
    except ValidationError as error:
        for found in error.errors(include_url=False, include_context=False):
            key = prefix + ".".join(map(str, found["loc"]))
            if found["type"] == "extra_forbidden":
                inside = _model_at(models, name, found["loc"][:-1])
                text = f"is not an argument in TensorRT-LLM {version}"
                fix = _instead(str(found["loc"][-1]), models.names(inside) if inside else ())
                faults.append(Fault(text, key=key, value=found["input"], fix=fix))
            elif found["type"] == "missing":
                faults.append(Fault("is missing", key=key))
            else:
                text = found["msg"].removeprefix("Value error, ")
                faults.append(Fault(text[0].lower() + text[1:], key=key, value=found["input"]))
    return {}


def _model_at(models: Models, name: str, location: Sequence[int | str]) -> str | None:
    """The model of this contract at a location inside another."""
    found: str | None = name
    for part in location:
        found = models.nested(found, str(part)) if found else None
    return found


def _instead(name: str, known: Sequence[str]) -> str:
    for entry in _data()["renamed"]:
        if entry["from"] == name:
            return f"write {entry['to']}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _one_of(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=2, cutoff=0.6) or known
    return f"one of {', '.join(near)}"


@cache
def _models(version: str) -> Models:
    return Models(
        {name: tuple(entries_in(fields, version, versions())) for name, fields in _data()["models"].items()}
    )


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.contracts") / "data" / "llm_args.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data


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
        """Name the model that a field holds; None if it holds something else."""
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

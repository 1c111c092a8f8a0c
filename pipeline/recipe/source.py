"""Where a checkpoint or a data set comes from: `hf:org/name` on the Hugging Face Hub, or `local:path`.

Parsing only: nothing here looks at a disk or a network. A `local:` path is relative to the folder of the
recipe file, which the loader passes as the validation context ({"folder": Path, "datasets": names}); `~`
is expanded. A parsed path is absolute, so a dumped recipe means the same wherever it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from pipeline.document_faults import refusal
from pipeline.recipe.sections import RecipeSection, matching

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_DATASET = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hub.

    >>> str(HubSource("meta-llama/Llama-3.2-1B"))
    'hf:meta-llama/Llama-3.2-1B'
    """

    repo: str  # org/name
    kind: Literal["hf"] = "hf"

    def __str__(self) -> str:
        return f"hf:{self.repo}"


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder (of a checkpoint) or a file (of a data set) on this machine."""

    path: Path  # absolute
    kind: Literal["local"] = "local"

    def __str__(self) -> str:
        return f"local:{self.path}"


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """A data set that `calibration/<name>.yaml` defines."""

    name: str
    kind: Literal["named"] = "named"

    def __str__(self) -> str:
        return self.name


def parse_source(text: str, folder: Path | None = None) -> HubSource | LocalSource:
    """`hf:org/name` or `local:path`; raises what pydantic reports at the field.

    >>> parse_source("hf:org/name")
    HubSource(repo='org/name', kind='hf')
    """
    kind, colon, place = text.partition(":")
    if kind == "local" and colon:
        return LocalSource(_absolute(place, folder))
    if kind == "hf" and colon:
        if _REPO.fullmatch(place):
            return HubSource(place)
        if "@" in place:
            repo, _, revision = place.partition("@")
            raise refusal(
                "carries a revision", f'write source: "hf:{repo}" and revision: "{revision}" beside it'
            )
        raise refusal("is not a repository of the Hub", 'write "hf:organisation/name"')
    if text.startswith(("/", "./", "../", "~")):
        raise refusal("does not say what kind of source it is", f'write "local:{text}"')
    raise refusal("does not say what kind of source it is", 'write "hf:organisation/name" or "local:path"')


def parse_dataset(
    text: str, folder: Path | None = None, known: Sequence[str] | None = None
) -> NamedDataset | LocalSource:
    """The name of a definition in calibration/ (one of `known`, if given), or `local:path` of a JSONL file.

    >>> parse_dataset("cnn_dailymail")
    NamedDataset(name='cnn_dailymail', kind='named')
    """
    if text.startswith("local:"):
        return LocalSource(_absolute(text.removeprefix("local:"), folder))
    if text in known if known is not None else _DATASET.fullmatch(text):
        return NamedDataset(text)
    near = get_close_matches(text, known or (), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    names = f"known: {', '.join(known)}" if known else "write its name, such as support"
    raise refusal("is not a calibration set", f'{hint}{names}; a file of your own is "local:my-set.jsonl"')


def _absolute(text: str, folder: Path | None) -> Path:
    if not text.strip() or "\0" in text:
        raise refusal("has no path", 'write "local:path"')
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise refusal("names a home folder that is not known", "write the whole path") from None
    return Path(os.path.normpath((folder or Path.cwd()) / path))


class _Parsed:
    """Makes a field take text and hold what `parse` makes of it, both ways."""

    def __init__(
        self, parse: Callable[..., object], pattern: str, types: tuple[type, ...], *context: str
    ) -> None:
        self._parse, self._pattern, self._types, self._context = parse, pattern, types, context

    def __get_pydantic_core_schema__(
        self, _source: object, _handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo) -> object:
            if isinstance(value, self._types):
                return value
            if not isinstance(value, str):
                raise refusal("must be text", "write it in quotes")
            return self._parse(value, *((info.context or {}).get(name) for name in self._context))

        return core_schema.with_info_plain_validator_function(
            validate, serialization=core_schema.to_string_ser_schema()
        )

    def __get_pydantic_json_schema__(
        self, _schema: core_schema.CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": self._pattern}


Source = Annotated[
    HubSource | LocalSource,
    _Parsed(parse_source, r"^(hf:[^/]+/[^/]+|local:.+)$", (HubSource, LocalSource), "folder"),
]
Dataset = Annotated[
    NamedDataset | LocalSource,
    _Parsed(
        parse_dataset, r"^([a-z0-9][a-z0-9_.-]*|local:.+)$", (NamedDataset, LocalSource), "folder", "datasets"
    ),
]


Revision = Annotated[
    str,
    *matching(
        r"(?!-)(?!.*\.\.)[\w./+-]{1,255}",
        "write a branch, a tag or the 40 hexadecimal digits of a commit",
        "is not a revision",
    ),
]


class Checkpoint(RecipeSection):
    """A model as it is published: weights in safetensors, a config and a tokenizer."""

    source: Source = Field(
        description="Where the checkpoint comes from.",
        examples=["hf:meta-llama/Llama-3.1-8B-Instruct", "local:checkpoints/my-model"],
    )
    revision: Revision | None = Field(
        default=None,
        description="Branch, tag or commit on the Hub; without it, the default branch as it is when fetched.",
    )
    allow_pickle: bool = Field(
        default=False,
        description="Take weights from pickle files (.bin), which can run any code when they are read.",
    )

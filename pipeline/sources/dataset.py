"""Calibration sets: what defines one, which files it has, and what the plan keys are made from.

A recipe names a local file of JSON lines, or a set that `calibration/<name>.yaml` defines:

    name: support
    description: one line about it
    license: Apache-2.0
    format: messages                        # messages, or text
    column: article                         # with text: which column holds it (default: text)
    splits: {train: a.jsonl, heldout: b.jsonl}   # relative to the definition, or paths in the repository of `hub`
    hub: {repo: org/name, revision: <commit>}    # optional: the files lie on the Hugging Face Hub

A revision must be a commit, so that a plan needs no network and the same recipe means the same text tomorrow. Files on
the Hub come through huggingface_hub (its cache, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE), without the `datasets`
library: no code of a repository is ever run. Rows are read by `pipeline.stages.dataset`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.document_faults import read_yaml, refusal
from pipeline.errors import SourceError, UserError
from pipeline.extras import missing
from pipeline.reading import sha256_of
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.resources import folder
from pipeline.store import Json

TRAIN, HELDOUT = "train", "heldout"
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DatasetSplits(_Part):
    """Files of a data set."""

    train: str = Field(examples=["my-set/train.jsonl"])
    heldout: str | None = None


class DatasetRepository(_Part):
    """A data set on the Hub, at one commit."""

    repo: str = Field(examples=["organisation/name"])
    revision: str

    @field_validator("revision")
    @classmethod
    def _is_commit(cls, revision: str) -> str:
        if not _COMMIT.fullmatch(revision):
            raise refusal("must be a commit", "40 hex digits")
        return revision


class DatasetDefinition(_Part):
    """Content of `calibration/<name>.yaml`."""

    name: str
    description: str = ""
    license: str = "not stated"
    format: Literal["messages", "text"]
    column: str | None = None
    splits: DatasetSplits
    hub: DatasetRepository | None = None

    @property
    def text_column(self) -> str | None:
        """Column of the text; None if the rows are messages."""
        return self.column or "text" if self.format == "text" else None

    @model_validator(mode="after")
    def _column_of_text(self) -> Self:
        if self.column is not None and self.format == "messages":
            raise refusal("column goes with format text only", "remove column")
        return self


def known_sets() -> list[str]:
    """The names that a recipe may use."""
    return sorted(path.stem for path in folder("calibration").glob("*.yaml"))


def read_definition(name: str) -> DatasetDefinition:
    """Read the definition of a named set.

    Raises:
        UserError: There is no such set, or its file cannot be read.
        InvalidInput: With everything that is wrong with it.
    """
    path = folder("calibration") / f"{name}.yaml"
    if not path.exists():
        raise UserError(
            f"there is no calibration set {name!r}; known are {', '.join(known_sets())} "
            '(or give a file: dataset: "local:my-set.jsonl")'
        )
    return read_yaml(DatasetDefinition, path)


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """The files of a data set on this machine."""

    name: str
    license: str
    column: str | None  # of text; None: the rows are messages, or either
    # A line may hold a text or messages.
    any_kind: bool
    # Split -> file. Without "heldout", held-out samples are drawn from the rest of "train".
    paths: dict[str, Path]

    def digests(self) -> dict[str, Json]:
        """Split -> SHA-256 (hex) of its file."""
        return {split: sha256_of(path) for split, path in sorted(self.paths.items())}


def resolve_dataset(dataset: NamedDataset | LocalSource) -> DatasetFiles:
    """Find the files of a set; those on the Hub are downloaded.

    Raises:
        UserError: There is no such set or file.
        SourceError: The Hub does not give a file.
    """
    if isinstance(dataset, LocalSource):
        _must_exist(dataset.path, f"dataset local:{dataset.path}")
        return DatasetFiles(dataset.path.name, "not stated", None, True, {TRAIN: dataset.path})
    definition = read_definition(dataset.name)
    names = {TRAIN: definition.splits.train, HELDOUT: definition.splits.heldout}
    paths = {split: _file(definition, name) for split, name in names.items() if name}
    return DatasetFiles(definition.name, definition.license, definition.text_column, False, paths)


def dataset_identity(dataset: NamedDataset | LocalSource) -> dict[str, Json]:
    """Identity for a plan: the name, and the digests of local files or the commit on the Hub.

    Nothing is downloaded.
    """
    if isinstance(dataset, NamedDataset):
        definition = read_definition(dataset.name)
        if definition.hub is not None:
            return {
                "dataset": definition.name,
                "repo": definition.hub.repo,
                "revision": definition.hub.revision,
                "column": definition.text_column,
                "splits": definition.splits.model_dump(),
            }
    files = resolve_dataset(dataset)
    return {"dataset": files.name, "column": files.column, "files": files.digests()}


def _file(definition: DatasetDefinition, name: str) -> Path:
    if definition.hub is not None:
        return download_file(definition.hub, name)
    sets = folder("calibration")
    path = sets / name
    _must_exist(path, f"calibration set {definition.name} ({sets / definition.name}.yaml)")
    return path


def _must_exist(path: Path, subject: str) -> None:
    if not path.is_file():
        raise UserError(f"{subject}: there is no file {path}")


def download_file(hub: DatasetRepository, file: str) -> Path:
    """Find a file of a repository in huggingface_hub's cache; download it if it is not there.

    Raises:
        SourceError: The Hub does not give it.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise missing(_where(hub, file), error, "hub") from error
    try:
        path: str = hf_hub_download(hub.repo, file, repo_type="dataset", revision=hub.revision)
    except GatedRepoError as error:
        raise SourceError(
            f"{_where(hub, file)} is gated: accept its terms there, and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise SourceError(f"{_where(hub, file)}: no such repository or revision") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"{_where(hub, file)} is not in the local cache and the hub cannot be reached; "
            'give a file instead: dataset: "local:my-set.jsonl", one {"text": …} or {"messages": […]} a line'
        ) from error
    except EntryNotFoundError as error:
        raise SourceError(f"{_where(hub, file)}: the repository has no such file") from error
    except (HfHubHTTPError, OSError) as error:
        raise SourceError(f"{_where(hub, file)} cannot be downloaded: {error}") from error
    return Path(path)


def _where(hub: DatasetRepository, file: str) -> str:
    return f"data set hf:{hub.repo}@{hub.revision[:8]} ({file})"

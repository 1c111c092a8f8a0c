"""A named calibration set: `calibration/<name>.yaml`.

    name: support
    description: what it is
    license: Apache-2.0
    format: messages                        # messages, or text
    column: article                         # with text: which column holds it (default: text)
    splits: {train: a.jsonl, heldout: b.jsonl}      # relative to the definition, or paths in the repository
    of `hub` hub: {repo: org/name, revision: <commit>}       # optional: the files lie on the Hugging Face
    Hub

A revision must be a commit, so that a plan needs no network and the same recipe means the same text tomorrow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.resources import folder

_KEYS = {"name", "description", "license", "format", "column", "splits", "hub"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set repository at one commit."""

    repo: str
    revision: str


@dataclass(frozen=True, slots=True)
class Definition:
    """What `calibration/<name>.yaml` says."""

    path: Path
    name: str
    column: str | None  # None: messages
    train: str
    heldout: str | None
    license: str
    hub: Hub | None


def known_sets() -> list[str]:
    """The names that a recipe may use."""
    return sorted(path.stem for path in folder("calibration").glob("*.yaml"))


def read_definition(name: str) -> Definition:
    """The definition of a named set; InvalidInput lists everything that is wrong with it."""
    path = folder("calibration") / f"{name}.yaml"
    if not path.exists():
        raise UserError(
            f"there is no calibration set {name!r}; known are {', '.join(known_sets())} "
            '(or give a file: dataset: "local:my-set.jsonl")'
        )
    return parse_definition(path)


def parse_definition(path: Path) -> Definition:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    faults = list(_faults(content))
    if faults:
        raise InvalidInput(
            "calibration set",
            [Fault(f.problem, where=str(path), key=f.key, value=f.value, fix=f.fix) for f in faults],
        )
    hub = content.get("hub")
    return Definition(
        path=path,
        name=content["name"],
        column=content.get("column", "text") if content["format"] == "text" else None,
        train=content["splits"]["train"],
        heldout=content["splits"].get("heldout"),
        license=content.get("license", "not stated"),
        hub=Hub(hub["repo"], hub["revision"]) if hub else None,
    )


def _faults(content: Any) -> Iterator[Fault]:
    if not isinstance(content, dict):
        yield Fault("must be a mapping")
        return
    for key in sorted(set(content) - _KEYS):
        yield Fault("is not a key of a calibration set", key=key, fix=f"known are {', '.join(sorted(_KEYS))}")
    if not isinstance(content.get("name"), str):
        yield Fault("must be text", key="name", value=content.get("name"))
    if content.get("format") not in ("messages", "text"):
        yield Fault("must be messages or text", key="format", value=content.get("format"))
    if "column" in content and content.get("format") == "messages":
        yield Fault("goes with format text only", key="column", value=content["column"])
    splits = content.get("splits")
    if not isinstance(splits, dict) or not isinstance(splits.get("train"), str):
        yield Fault("must name a file", key="splits.train")
    hub = content.get("hub")
    if hub is not None:
        if not isinstance(hub, dict) or not isinstance(hub.get("repo"), str):
            yield Fault("must be organisation/name", key="hub.repo")
        elif not _COMMIT.fullmatch(str(hub.get("revision"))):
            yield Fault(
                "must be a commit", key="hub.revision", value=hub.get("revision"), fix="40 hex digits"
            )

"""The manifest of an artifact: what it was made from, by whom, when, and what is in it.

`manifest.json` is the record; its first field is the schema number, checked on load. `manifest.txt` beside
it says the same to a reader and is never read back.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from pipeline.errors import StoreError
from pipeline.progress import human_bytes
from pipeline.reading import UnreadableFile, read_json
from pipeline.store.key import SCHEMA, ArtifactKey

FILE = "manifest.json"
TWIN = "manifest.txt"
MAX_BYTES = 64 << 20
FINDINGS = "preflight"  # among the facts: what was doubtful about the recipe, and what was let pass


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class FileEntry(_Frozen):
    """One file of the artifact."""

    bytes: int
    sha256: str


class Provenance(_Frozen):
    """Who made it. No part of the digest."""

    created: str  # UTC, ISO 8601, to the second
    duration_s: float  # of the making, without hashing and publishing
    host: str
    pipeline: str  # version


class Manifest(_Frozen):
    """Content of `manifest.json`."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    stage: str
    digest: str
    name: str
    recipe: str  # the recipe that asked first
    settings: dict[str, JsonValue]
    inputs: dict[str, str]  # role -> digest
    tools: dict[str, str]  # package -> version
    facts: dict[str, JsonValue]  # what the stage found and measured
    provenance: Provenance
    files: dict[str, FileEntry]  # path relative to the artifact, with "/"
    total_bytes: int  # of `files`: the manifest itself is not counted

    @property
    def key(self) -> ArtifactKey:
        """The key that this manifest claims to answer."""
        return ArtifactKey(self.stage, self.settings, self.inputs, self.tools)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read `manifest.json` of a directory.

        Raises:
            StoreError: it is missing, damaged, or of another schema.
        """
        path = directory / FILE
        try:
            raw = read_json(path, most=MAX_BYTES)
        except UnreadableFile as error:
            raise StoreError(f"{path}: damaged: {error.fault.problem}") from error
        schema = raw.get("schema")
        if schema != SCHEMA:
            raise StoreError(
                f"{path}: written in schema {schema}, this version of pipeline reads schema {SCHEMA}; "
                "build again, or use the version of pipeline that wrote it"
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StoreError(f"{path}: damaged: {where}: {first['msg']}") from error

    def write(self, directory: Path) -> None:
        """Write `manifest.json` and its readable twin into a directory.

        Raises:
            OSError: a file cannot be written.
        """
        text = json.dumps(
            self.model_dump(mode="json", by_alias=True), indent=2, ensure_ascii=False, allow_nan=False
        )
        (directory / FILE).write_text(text + "\n", encoding="utf-8")
        (directory / TWIN).write_text(self.as_text(), encoding="utf-8")

    def as_text(self) -> str:
        """Return the text of the readable twin."""
        by = self.provenance
        lines = [
            f"{self.name}",
            f"  digest    {self.digest}",
            f"  recipe    {self.recipe}",
            f"  made      {by.created} in {by.duration_s:.1f} s on {by.host} by pipeline {by.pipeline}",
            f"  size      {human_bytes(self.total_bytes)} in {len(self.files)} files",
        ]
        for title, values in (
            ("settings", self.settings),
            ("inputs", self.inputs),
            ("tools", self.tools),
            ("facts", {key: value for key, value in self.facts.items() if key != FINDINGS}),
        ):
            if values:
                lines += ["", title, *(f"  {key}: {_flat(value)}" for key, value in sorted(values.items()))]
        findings = _findings(self.facts)
        lines += ["", FINDINGS, *(f"  {line}" for line in findings)] if findings else []
        lines += ["", "files"]
        lines += [
            f"  {human_bytes(entry.bytes):>10}  {entry.sha256}  {path}"
            for path, entry in sorted(self.files.items())
        ]
        return "\n".join(lines) + "\n"


def _findings(facts: dict[str, JsonValue]) -> list[str]:
    """A line each: "allowed sm.fp8: quantization.format: …"."""
    findings = facts.get(FINDINGS)
    return [
        f"{'allowed' if finding.get('allowed') else finding.get('severity')} {finding.get('rule')}: "
        f"{finding.get('text')}"
        for finding in (findings if isinstance(findings, list) else [])
        if isinstance(finding, dict)
    ]


def _flat(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)

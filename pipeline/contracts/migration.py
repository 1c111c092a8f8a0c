"""Settings of an engine, and what says the same in TensorRT-LLM's LLM API, by release.

The facts are data (`data/migration.yaml`, each with its source). `llm_args` says which arguments a release has.

>>> delay = setting("triton", "dynamic_batching.max_queue_delay_microseconds")
>>> delay.argument_in("1.1.0"), delay.argument_in("1.2.1")
(None, 'batch_wait_timeout_ms')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pipeline.contracts import llm_args, read_facts, record

Kind = Literal["flags", "parameters", "triton"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Files that sources of other contracts name.
_FILES = ("migration.yaml", "gpus.yaml", "rules/sources.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """One setting of an engine: a flag of trtllm-build, a parameter of the backend, or another of config.pbtxt.

    Attributes:
        argument: Dotted argument of the LLM API that says the same; None: there is none.
        key: Key of the recipe that decides it; None: another, or none.
        near: Dotted argument that is about the same subject, where none says the same.
        because: Reason why there is no argument, or what differs; empty: nothing does.
        sources: Documents that say so.
    """

    kind: Kind
    name: str
    argument: str | None = None
    key: str | None = None
    near: str | None = None
    because: str = ""
    sources: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Reason why no argument says the same, or what differs, with the argument that is near it."""
        named = self.near is None or self.near in self.because
        return self.because if named else f"{self.because} (near it: {self.near})"

    def argument_in(self, version: str) -> str | None:
        """Return the argument if a release has it."""
        has = self.argument is not None and llm_args.has_argument(version, self.argument)
        return self.argument if has else None


@dataclass(frozen=True, slots=True)
class MigrationNote:
    """A reason, with the documents that give it."""

    because: str
    sources: tuple[str, ...]


def setting(kind: Kind, name: str) -> EngineSetting | None:
    """Look up a setting; None if there is none of that name."""
    return _settings().get((kind, name))


def settings() -> tuple[EngineSetting, ...]:
    """List all settings, kind by kind."""
    return tuple(_settings().values())


def removed_keys() -> Mapping[str, MigrationNote]:
    """Map the keys of a recipe that mean nothing without an engine to the reason."""
    return {entry["key"]: _note(entry) for entry in _data()["keys"]}


def other_formats(form: str) -> tuple[str, ...]:
    """List formats of weights to take where one does not run, the nearest first; none for a format that always does."""
    return next((tuple(entry["instead"]) for entry in _data()["formats"] if entry["format"] == form), ())


def note(name: str) -> MigrationNote:
    """Look up a reason for what changes beside single settings. Raises KeyError."""
    return _note(_data()["notes"][name])


def documents(names: Sequence[str]) -> tuple[str, ...]:
    """Return what names of sources stand for, in this contract, in that of GPUs, or in the rules."""
    known: dict[str, str] = {}
    for file in reversed(_FILES):
        known |= read_facts(file)["sources"]
    return tuple(known[name] for name in names)


@cache
def _settings() -> Mapping[tuple[Kind, str], EngineSetting]:
    return {(entry.kind, entry.name): entry for kind in KINDS for entry in _of_kind(kind)}


def _of_kind(kind: Kind) -> Iterator[EngineSetting]:
    for entry in _data()["settings"][kind]:
        fields = {**entry, "kind": kind, "sources": documents(entry["source"])}
        yield from (record(EngineSetting, {**fields, "name": name}) for name in entry["names"])


def _note(entry: Mapping[str, Any]) -> MigrationNote:
    return MigrationNote(entry.get("because", ""), documents(entry["source"]))


def _data() -> Mapping[str, Any]:
    return read_facts("migration.yaml")

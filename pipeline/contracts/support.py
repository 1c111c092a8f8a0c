"""Models and features that upstream lists for the PyTorch backend: by release, and by GPU where it says so.

The facts are data (`data/support.yaml`, each with its source; its header says how to add a release). A class that a
release does not list may run all the same; upstream's matrix of features has rows for some classes only.

>>> listing("GlmMoeDsaForCausalLM")
('1.3.0rc29', '1.4.0rc1')
>>> feature_support("DeepseekV3ForCausalLM", "1.0.0")["chunked_prefill"].on(90)
'no'
>>> feature_support("LlamaForCausalLM", "1.2.1")
{}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pipeline.contracts import read_facts
from pipeline.contracts.releases import releases
from pipeline.contracts.version_range import holds, precedes

Answer = Literal["yes", "no", "untested"]
_ANSWERS: Mapping[str, Answer] = {"y": "yes", "n": "no", "u": "untested"}
_Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Support:
    """One answer of upstream's, and the GPUs of which it holds."""

    answer: Answer
    sources: tuple[str, ...]
    sm: _Ranges = ()  # compute capabilities times 10, outside of which a yes is a no; empty: all
    unsure: _Ranges = ()  # those of which upstream's page and code say different things
    needs: tuple[str, ...] = ()  # arguments of the LLM API, one of which a yes takes; empty: none

    def on(self, sm: int | None) -> Answer:
        """Return the answer for a GPU; None: for a GPU that can."""
        if self.answer != "yes" or sm is None or not self.sm or _within(sm, self.sm):
            return self.answer
        return "untested" if _within(sm, self.unsure) else "no"

    @property
    def capabilities(self) -> str:
        """Compute capabilities as a sentence names them, such as "9.0, 10.0 and newer"; empty: all."""
        return ", ".join(_shown(low, high) for low, high in self.sm)


def architectures() -> tuple[str, ...]:
    """List the classes that upstream lists, or has listed, sorted."""
    paged = {name for page in _data()["pages"] for name in page["adds"]}
    return tuple(sorted(paged | {entry["architecture"] for entry in _data()["unreleased"]}))


def features() -> tuple[str, ...]:
    """List the features of the matrix, in upstream's order."""
    return tuple(_data()["features"])


@cache
def listing(architecture: str) -> tuple[str, ...]:
    """List the releases with the PyTorch backend whose page lists a class, oldest first."""
    versions = []
    for release in releases():
        listed = False
        for page in _data()["pages"]:
            if "pytorch" in release.tracks and not precedes(release.version, page["since"]):
                listed = architecture in page["adds"] or (listed and architecture not in page["drops"])
        if listed:
            versions.append(release.version)
    return tuple(versions)


def feature_support(architecture: str, version: str) -> Mapping[str, Support]:
    """Map features to upstream's answers for a class in a release; all that its matrix has where there is a row."""
    row = next(
        (entry["row"] for entry in _data()["rows"] if entry["architecture"] == architecture), architecture
    )
    page, known = _page(version), dict[str, Support]()
    if row in page["matrix"]:
        answers = zip(features(), page["matrix"][row].split(), strict=True)
        known = {name: _support(row, name, version, _ANSWERS[mark], page["source"]) for name, mark in answers}
    for entry in _data()["more"]:
        if architecture in entry["architectures"] and holds(version, entry.get("since"), entry.get("until")):
            needs = tuple(entry.get("needs", ()))
            known[entry["feature"]] = Support(_ANSWERS[entry["answer"]], tuple(entry["source"]), needs=needs)
    return known


def model_support(architecture: str, version: str) -> Support:
    """Return the GPUs on which upstream has a class; the answer is yes, whether or not it is listed."""
    return _support(architecture, None, version, "yes", _page(version)["source"])


def untested_together() -> tuple[tuple[str, str], ...]:
    """List the pairs of features that upstream has not tested together."""
    return tuple(
        (first, second) for first, second in (row["features"] for row in _data()["untested_together"])
    )


def sources_of(version: str) -> tuple[str, ...]:
    """Name the sources, of the data, that say what a release has."""
    return tuple(_page(version)["source"])


def _page(version: str) -> Mapping[str, Any]:
    """The newest page that is not newer than the release."""
    pages: list[Mapping[str, Any]] = _data()["pages"]
    return [page for page in pages if not precedes(version, page["since"])][-1]


def _support(
    architecture: str, feature: str | None, version: str, answer: Answer, source: list[str]
) -> Support:
    for entry in _data()["only"]:
        if (entry["architecture"], entry.get("feature")) == (architecture, feature) and holds(
            version, entry.get("since"), entry.get("until")
        ):
            return Support(answer, tuple(entry["source"]), _ranges(entry["sm"]), _ranges(entry["unsure"]))
    return Support(answer, tuple(source))


def _ranges(pairs: list[list[int]]) -> _Ranges:
    return tuple((low, high) for low, high in pairs)


def _within(sm: int, ranges: _Ranges) -> bool:
    return any(low <= sm <= high for low, high in ranges)


def _shown(low: int, high: int) -> str:
    first = f"{low // 10}.{low % 10}"
    return (
        first
        if low == high
        else f"{first} and newer"
        if high >= 999
        else f"{first} to {high // 10}.{high % 10}"
    )


def _data() -> Mapping[str, Any]:
    return read_facts("support.yaml")

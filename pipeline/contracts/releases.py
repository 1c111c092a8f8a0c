"""Releases of TensorRT-LLM: which runtimes they have, what they are pinned to, and the containers that carry them.

The facts are data (`data/releases.yaml`, each with its source). A release is added by adding data.

>>> container("1.2.1").image
'nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.contracts import read_facts
from pipeline.contracts.version_range import release_of, unknown_version
from pipeline.errors import UserError

Track = Literal["tensorrt", "pytorch"]
TRACKS: tuple[Track, ...] = ("tensorrt", "pytorch")


@dataclass(frozen=True, slots=True)
class TritonContainer:
    """An image that holds Triton and TensorRT-LLM."""

    release: str | None  # of Triton: "26.07"; None for TensorRT-LLM's own image
    image: str  # with its tag
    trtllm: str
    tensorrt: str | None
    torch: str | None
    cuda: str | None
    driver: str  # the oldest that it runs with
    python: str
    conflict: str | None  # why it is not known what is inside
    joins: tuple[str, str] | None = None  # TensorRT-LLM's own image and Triton's, of which it is to be built
    unseen: str | None = None  # what nobody has shown of it


@dataclass(frozen=True, slots=True)
class Release:
    """One version of TensorRT-LLM. Pins are as the release declares them; None is not known, or not there."""

    version: str
    tracks: tuple[Track, ...]
    refusals: Mapping[Track, str]  # why a runtime is not offered
    tensorrt: str | None
    torch: str | None
    modelopt: str | None
    transformers: str | None
    cuda: str | None
    python: str | None
    containers: tuple[TritonContainer, ...]  # oldest first


def releases() -> tuple[Release, ...]:
    """List the stable releases, oldest first."""
    return tuple(_release(entry, entry["version"]) for entry in _data()["releases"])


def candidate_lines() -> tuple[str, ...]:
    """List the versions of which only candidates exist, oldest first."""
    return tuple(entry["line"] for entry in _data()["candidates"])


def release(version: str) -> Release:
    """Look up a release by its version, or a candidate (1.3.0rc4) of a version that has nothing else.

    Raises:
        UserError: it is not known; the text names those that are near.
    """
    for entry in _data()["releases"]:
        if entry["version"] == version:
            return _release(entry, version)
    for entry in _data()["candidates"]:
        if entry["line"] == release_of(version) != version:
            return _release(entry, version)
    known = [entry["version"] for entry in _data()["releases"]] + [f"{line}rcN" for line in candidate_lines()]
    raise unknown_version(version, known)


def require_runtime(version: str, track: Track) -> Release:
    """Look up a release that has a runtime.

    Raises:
        UserError: it is not known, or lacks the runtime; the text says why, and which releases have it.
    """
    found = release(version)
    if track not in found.tracks:
        having = [one.version for one in releases() if track in one.tracks]
        reason = found.refusals.get(track, "the release does not have it")
        raise UserError(
            f"TensorRT-LLM {version} is not offered with runtime {track}: {reason}; with it: {', '.join(having)}"
        )
    return found


def container(version: str) -> TritonContainer:
    """Find the newest container that carries a release; one with a conflict only if there is no other.

    Raises:
        UserError: the release is not known, or no container is.
    """
    carrying = release(version).containers
    if not carrying:
        raise UserError(f"no container is known to carry TensorRT-LLM {version}")
    return max(carrying, key=lambda one: (one.conflict is None, one.release or ""))


def containers() -> tuple[TritonContainer, ...]:
    """List all Triton containers, oldest first, those with conflicts too."""
    return tuple(_container(entry) for entry in _data()["containers"])


def joined() -> tuple[TritonContainer, ...]:
    """List the images of our own, which the Dockerfile makes of TensorRT-LLM's container and Triton's."""
    return tuple(
        replace(
            _container({**entry, "image": f"pipeline-triton:{entry['trtllm']}"}),
            joins=(entry["trtllm_image"], entry["triton_image"]),
            unseen=entry["unseen"],
        )
        for entry in _data()["joined"]
    )


def _release(entry: Mapping[str, Any], version: str) -> Release:
    carrying = tuple(one for one in (*joined(), *containers()) if one.trtllm == version)
    if "image" in entry and not carrying:
        image = {**entry, "image": entry["image"].format(version=version), "trtllm": version, "release": None}
        carrying = (_container(image),)
    return Release(
        version=version,
        tracks=tuple(entry["tracks"]),
        refusals={track: entry[f"no_{track}"] for track in TRACKS if f"no_{track}" in entry},
        containers=carrying,
        **{
            name: entry.get(name)
            for name in ("tensorrt", "torch", "modelopt", "transformers", "cuda", "python")
        },
    )


def _container(entry: Mapping[str, Any]) -> TritonContainer:
    optional = ("tensorrt", "torch", "cuda", "conflict")
    return TritonContainer(
        release=entry["release"],
        image=entry["image"],
        trtllm=entry["trtllm"],
        driver=entry["driver"],
        python=entry["python"],
        **{name: entry.get(name) for name in optional},
    )


def _data() -> Mapping[str, Any]:
    return read_facts("releases.yaml")

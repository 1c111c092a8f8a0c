"""Releases of TensorRT-LLM: which runtimes they have, what they are pinned to, and the containers that carry them.

The facts are data (`data/releases.yaml`, each with its source). A release, or a candidate, is added by adding data.

>>> container("1.2.1").image
'nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pipeline.contracts import read_facts, record
from pipeline.contracts.version_range import unknown_version
from pipeline.errors import UserError

Track = Literal["tensorrt", "pytorch"]
TRACKS: tuple[Track, ...] = ("tensorrt", "pytorch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonContainer:
    """An image that holds Triton and TensorRT-LLM."""

    release: str | None  # of Triton: "26.07"; None for TensorRT-LLM's own image
    image: str  # with its tag
    trtllm: str
    tensorrt: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str  # the oldest that it runs with
    python: str
    conflict: str | None = None  # why it is not known what is inside
    joins: tuple[str, str] | None = None  # TensorRT-LLM's own image and Triton's, of which it is to be built
    unseen: str | None = None  # what nobody has shown of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One version of TensorRT-LLM. Pins are as the release declares them; None is not known, or not there."""

    version: str
    candidate: bool = False  # a release candidate, which is not final
    tracks: tuple[Track, ...]
    tensorrt: str | None = None
    torch: str | None = None
    modelopt: str | None = None
    transformers: str | None = None
    cuda: str | None = None
    python: str | None = None
    commit: str | None = None  # of NVIDIA/TensorRT-LLM, as its package names it
    containers: tuple[TritonContainer, ...]  # oldest first


@cache
def releases() -> tuple[Release, ...]:
    """List the releases, oldest first; candidates among them are later than every stable one."""
    images = (*joined(), *containers())
    return tuple(
        record(
            Release, {**entry, "containers": [image for image in images if image.trtllm == entry["version"]]}
        )
        for entry in _data()["releases"]
    )


def release(version: str) -> Release:
    """Look up a release, or a candidate, by its version.

    Raises:
        UserError: it is not known; the text names those that are near.
    """
    known = {entry.version: entry for entry in releases()}
    if version not in known:
        raise unknown_version(version, tuple(known))
    return known[version]


def half(track: Track) -> str:
    """Say in two sentences which releases a runtime lives in, and whether upstream still works on it."""
    text: str = _data()["halves"][track]
    return text


def require_runtime(version: str, track: Track) -> Release:
    """Look up a release that has a runtime.

    Raises:
        UserError: it is not known, or lacks the runtime; the text says why, and which releases have it.
    """
    entry = release(version)
    if track not in entry.tracks:
        having = [other.version for other in releases() if track in other.tracks]
        raise UserError(
            f"TensorRT-LLM {version} is not offered with runtime {track}; with it: {', '.join(having)}. {half(track)}"
        )
    return entry


def container(version: str) -> TritonContainer:
    """Find the newest container that carries a release; a container with a conflict only if there is no other.

    Raises:
        UserError: the release is not known, or no container is.
    """
    carrying = release(version).containers
    if not carrying:
        raise UserError(f"no container is known to carry TensorRT-LLM {version}")
    return max(carrying, key=lambda image: (image.conflict is None, image.release or ""))


@cache
def containers() -> tuple[TritonContainer, ...]:
    """List all Triton containers, oldest first, those with conflicts too."""
    return tuple(record(TritonContainer, entry) for entry in _data()["containers"])


@cache
def joined() -> tuple[TritonContainer, ...]:
    """List the images of our own, which the Dockerfile makes of TensorRT-LLM's container and Triton's."""
    return tuple(
        record(
            TritonContainer,
            {
                **entry,
                "image": f"pipeline-triton:{entry['trtllm']}",
                "joins": (entry["trtllm_image"], entry["triton_image"]),
            },
        )
        for entry in _data()["joined"]
    )


def _data() -> Mapping[str, Any]:
    return read_facts("releases.yaml")

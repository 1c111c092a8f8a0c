"""Images that serve a release: NVIDIA's container, or one that the Dockerfile makes where that one does not serve.

The facts are data: `data/images.yaml` (what is installed, freed and checked), `data/releases.yaml` (the containers).

>>> serving_image("1.2.1", "tensorrt").name
'nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3'
>>> serving_image("1.2.1", "pytorch").name
'pipeline-triton:1.2.1'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contracts import read_facts, record
from pipeline.contracts.releases import Track, container
from pipeline.contracts.version_range import holds

_OWN = "pipeline-triton:"
_JOINED = "joined"  # the Dockerfile's stage that puts Triton into TensorRT-LLM's image


@dataclass(frozen=True, slots=True)
class FreedPin:
    """A version that an image holds a package to, and that is let go."""

    package: str
    since: str  # release of TensorRT-LLM from which on it is in the way
    below: str  # the package's first version that does
    wants: str  # ">=1.108.1,<2"
    why: str


@dataclass(frozen=True, slots=True)
class ServingImage:
    """The image that a package is served in."""

    name: str
    arguments: Mapping[str, str]  # of the Dockerfile, for all stages that serve
    why: str | None  # why it is built first; None for a container of NVIDIA's, which is pulled

    def build_command(self, stage: str = "models", tag: str | None = None) -> tuple[str, ...]:
        """Lines of the command that builds it in a checkout of pipeline, or another stage of the Dockerfile on it."""
        chosen = (f"  --build-arg {key}={value} \\" for key, value in self.arguments.items())
        return (f"docker build --target {stage} \\", *chosen, f"  -t {tag or self.name} .")


def serving_image(version: str, track: Track) -> ServingImage:
    """Choose the image that serves a release.

    Raises:
        UserError: the release is not known, or no image can have it.
    """
    chosen = container(version)
    name = f"{_OWN}{version}"
    if chosen.joins is not None:
        trtllm, triton = chosen.joins
        arguments = {"TRITON_IMAGE": _JOINED, "TRTLLM_IMAGE": trtllm, "PLAIN_TRITON_IMAGE": triton}
        return ServingImage(
            name, arguments, f"no container of NVIDIA's has Triton and TensorRT-LLM {version}"
        )
    arguments = {"TRITON_IMAGE": chosen.image}
    # The C++ backend of engines imports no Python.
    freed = freed_pins(version) if track == "pytorch" else ()
    if freed:
        return ServingImage(name, arguments, f"{chosen.image} as it is does not do: {freed[0].why}")
    return ServingImage(chosen.image, arguments, None)


def named_image(name: str, version: str, track: Track) -> ServingImage:
    """Describe the image that a package names, which was made for a release and a runtime."""
    # Engines run in the container that built them, whatever is newest.
    if not name.startswith(_OWN):
        return ServingImage(name, {"TRITON_IMAGE": name}, None)
    return serving_image(version, track)


def freed_pins(version: str) -> tuple[FreedPin, ...]:
    """List the pins of images that are let go where TensorRT-LLM has this version."""
    return tuple(
        record(FreedPin, entry) for entry in _data()["freed"] if holds(version, entry["since"], None)
    )


def image_facts() -> Mapping[str, Any]:
    """Return what is installed in an image of the Dockerfile, and what is checked while it is built."""
    return _data()


def _data() -> Mapping[str, Any]:
    return read_facts("images.yaml")

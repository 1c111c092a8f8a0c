"""Images that serve: which is chosen and how it is built, and that all packages of each agree, by the index's metadata.

`scripts/renew_image_pins` renews the metadata. No image was ever built where this project is developed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from pipeline.contracts.images import freed_pins, image_facts, named_image, serving_image
from pipeline.contracts.releases import container, containers, joined, releases

ROOT = Path(__file__).resolve().parents[2]
PINS: dict[str, Any] = json.loads((Path(__file__).parent / "image_pins.json").read_text("utf-8"))
PLACE = {
    "python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "os_name": "posix",
    "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython",
    "platform_python_implementation": "CPython", "platform_release": "", "platform_version": "",
}  # fmt: skip
JOINED = [image.trtllm for image in joined()]


def ours() -> list[str]:
    """Packages that the Dockerfile installs beside NVIDIA's: for the models, and for the server."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = (line for extra in ("gateway", "objects") for line in project["optional-dependencies"][extra])
    return [*image_facts()["installs"], *project["dependencies"], *extras]


def parties(version: str) -> dict[str, list[str]]:
    """Requirements of packages in an image, each with the package that asks."""
    asking = {f"tensorrt-llm {version}": PINS["images"][version]["tensorrt_llm"], "pipeline": ours()}
    if version not in JOINED:
        freed = {pin.package: f"{pin.package}{pin.wants}" for pin in freed_pins(version)}
        pins = image_facts()["triton_python"]["requires"]
        asking["triton"] = [freed.get(Requirement(line).name, line) for line in pins]
    return asking


def holds(requirement: Requirement, extras: Sequence[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**PLACE, "extra": extra}) for extra in ("", *extras))


def disagreements(asking: Mapping[str, Sequence[str]], chosen: Mapping[str, str]) -> Iterator[str]:
    """Requirements that the chosen versions do not meet: those of the parties, and of all that they bring along."""
    open_, seen = [(who, Requirement(line), ()) for who, lines in asking.items() for line in lines], set()
    while open_:
        who, wanted, extras = open_.pop()
        name = canonicalize_name(wanted.name)
        if not holds(wanted, extras):
            continue
        if name not in chosen:
            yield f"{who} asks for {name}, which nobody has chosen: scripts/renew_image_pins"
            continue
        if not SpecifierSet(str(wanted.specifier)).contains(chosen[name], prereleases=True):
            yield f"{who} asks for {name}{wanted.specifier}, and {chosen[name]} is chosen"
        here = (name, tuple(sorted(wanted.extras)))
        if here not in seen:
            seen.add(here)
            lines = PINS["packages"][f"{name}=={chosen[name]}"]
            open_ += [(f"{name} {chosen[name]}", Requirement(line), here[1]) for line in lines]


def irreconcilable(asking: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Packages of which no version on the index meets all parties, and what they ask for."""
    found = {}
    for name, versions in PINS["versions"].items():
        wants = {
            who: Requirement(line).specifier
            for who, lines in asking.items()
            for line in lines
            if canonicalize_name(Requirement(line).name) == name and holds(Requirement(line), ())
        }
        if not any(
            all(want.contains(version, prereleases=True) for want in wants.values()) for version in versions
        ):
            found[name] = "; ".join(f"{who} {want}" for who, want in wants.items())
    return found


def test_every_image_that_is_built_is_resolved() -> None:
    built = {
        release.version for release in releases() if serving_image(release.version, "pytorch").why is not None
    }
    assert built | set(JOINED) == set(PINS["images"])


@pytest.mark.parametrize("version", PINS["images"])
def test_packages_of_an_image_agree(version: str) -> None:
    assert list(disagreements(parties(version), PINS["images"][version]["chosen"])) == []


def test_two_pins_that_cannot_agree_are_named() -> None:
    asking = parties("1.2.1")
    old = {**asking, "triton": image_facts()["triton_python"]["requires"]}
    chosen = PINS["images"]["1.2.1"]["chosen"]
    (said,) = disagreements(old, chosen)
    assert said == f"triton asks for openai==1.107.3, and {chosen['openai']} is chosen"
    (said,) = disagreements({**asking, "new": ["numpy>=2"]}, chosen)
    assert said == f"new asks for numpy>=2, and {chosen['numpy']} is chosen"


@pytest.mark.parametrize("version", JOINED)
def test_the_wheel_does_not_agree_with_the_python_of_tritons_own_image(version: str) -> None:
    """The reason, as far as packages go, why Triton is put into TensorRT-LLM's image and not the other way round."""
    found = irreconcilable({**parties(version), "triton": image_facts()["triton_python"]["requires"]})
    assert set(found) == {"fastapi", "numpy"}
    assert "triton <2" in found["numpy"]


def test_nvidias_container_serves_as_it_is_where_it_can() -> None:
    for version in ("1.0.0", "1.1.0", "1.2.1"):
        image = serving_image(version, "tensorrt")
        assert (image.name, image.why) == (container(version).image, None)
    assert serving_image("1.1.0", "pytorch").why is None


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1"])
def test_a_container_whose_pin_stops_every_model_is_built_upon(version: str) -> None:
    image = serving_image(version, "pytorch")
    assert image.name == f"pipeline-triton:{version}"
    assert image.arguments == {"TRITON_IMAGE": container(version).image}
    assert "openai 1.107.3" in str(image.why)
    # A package names its image, and is deployed with that one.
    assert named_image(image.name, version, "pytorch") == image
    assert named_image("example/own:1", version, "pytorch").arguments == {"TRITON_IMAGE": "example/own:1"}


@pytest.mark.parametrize("version", JOINED)
def test_where_no_container_has_both_two_are_joined(version: str) -> None:
    assert version not in {container.trtllm for container in containers()}
    image, both = serving_image(version, "pytorch"), container(version)
    assert both.joins == (image.arguments["TRTLLM_IMAGE"], image.arguments["PLAIN_TRITON_IMAGE"])
    assert image.arguments["TRITON_IMAGE"] == "joined"
    assert both.joins[0].endswith(f":{version}")
    assert both.unseen
    assert image.build_command("serve", "mine")[::4] == (
        "docker build --target serve \\",
        "  -t mine .",
    )

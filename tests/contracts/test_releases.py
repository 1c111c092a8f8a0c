"""Releases and containers: what is offered, what is refused and why; and that all contracts know the same versions."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from pipeline.contracts import inflight_batcher, llm_args, llmapi
from pipeline.contracts import releases as releases_module
from pipeline.contracts.launching import launch_facts
from pipeline.contracts.releases import (
    TRACKS,
    container,
    containers,
    half,
    release,
    releases,
    require_runtime,
)
from pipeline.contracts.version_range import precedes
from pipeline.errors import UserError

STABLE, CANDIDATES = ["1.0.0", "1.1.0", "1.2.0", "1.2.1"], ["1.3.0rc29", "1.4.0rc1"]
SUPPORTED = [*STABLE, *CANDIDATES]


def test_the_supported_releases_oldest_first() -> None:
    assert [release.version for release in releases()] == SUPPORTED
    assert [release.version for release in releases() if release.candidate] == CANDIDATES
    assert all(precedes(older, other) for older, other in pairwise(SUPPORTED))
    assert [release.version for release in releases() if "tensorrt" in release.tracks] == STABLE


def test_other_contracts_know_the_same_versions() -> None:
    of = {track: [release.version for release in releases() if track in release.tracks] for track in TRACKS}
    assert list(inflight_batcher.versions()) == of["tensorrt"]
    assert list(llm_args.versions()) == list(llmapi.versions()) == of["pytorch"]
    assert all(launch_facts(version).server for version in SUPPORTED)


@pytest.mark.parametrize("version", SUPPORTED)
def test_each_release_has_a_container_that_says_what_it_needs(version: str) -> None:
    found = container(version)
    assert found.trtllm == version
    bases = found.joins or (found.image,)
    assert all(base.startswith("nvcr.io/nvidia/") for base in bases)
    assert not found.image.endswith("latest")
    assert found.driver.count(".") == 2


def test_a_container_whose_content_is_disputed_is_the_last_resort() -> None:
    assert container("1.1.0").release == "26.02"
    assert container("1.2.0").conflict is not None  # 26.03 is the only one
    disputed = [container.release for container in containers() if container.conflict is not None]
    assert disputed == ["25.11", "26.03"]


@pytest.mark.parametrize(
    ("version", "track", "said"),
    [
        ("0.20.0", "pytorch", "0.20.0 is not supported; the oldest is 1.0.0$"),
        ("1.0.0rc1", "tensorrt", "1.0.0rc1 is not supported; the oldest is 1.0.0$"),
        ("1.2.1.post1", "tensorrt", "1.2.1.post1 is not known; near: 1.2.1, 1.3.0rc29$"),
        (
            "1.3.0rc29",
            "tensorrt",
            "with it: 1.0.0, 1.1.0, 1.2.0, 1.2.1.*frozen: TensorRT-LLM 1.2.1 is the last",
        ),
        ("1.3.0rc14", "pytorch", "1.3.0rc14 is not known; near: 1.2.1, 1.3.0rc29$"),
        ("1.3.0", "pytorch", "1.3.0 is not known; near: 1.2.1, 1.3.0rc29, 1.4.0rc1$"),
        ("2.0.0", "pytorch", "2.0.0 is not known; near: 1.2.1, 1.3.0rc29, 1.4.0rc1$"),
    ],
)
def test_what_is_not_offered_and_why(version: str, track: str, said: str) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        require_runtime(version, "tensorrt" if track == "tensorrt" else "pytorch")


def test_a_candidate_declares_what_it_needs() -> None:
    for version, cuda in (("1.3.0rc29", "13.2.1"), ("1.4.0rc1", "13.4.1")):
        found = release(version)
        assert (found.torch, found.transformers, found.cuda) == (">=2.14.0a0,<=2.14.0", "==5.5.4", cuda)
        assert found.modelopt is None
        assert len(found.commit or "") == 40
        joins = container(version).joins
        assert joins is not None
        assert joins[0] == f"nvcr.io/nvidia/tensorrt-llm/release:{version}"


def test_each_half_is_said_in_two_sentences() -> None:
    for track in TRACKS:
        assert len(re.findall(r"\.(?= [A-Z]|$)", half(track))) == 2


def test_a_release_is_added_by_adding_data(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    facts = releases_module._data()
    fresh = {**facts["releases"][3], "version": "1.4.0", "tracks": ["pytorch"], "candidate": False}
    image = {
        **facts["containers"][-1],
        "release": "26.12",
        "trtllm": "1.4.0",
        "image": "example/triton:26.12",
    }
    more = {
        **facts,
        "releases": [*facts["releases"], fresh],
        "containers": [*facts["containers"], image],
    }
    monkeypatch.setattr(releases_module, "_data", lambda: more)
    for read_once in (releases, releases_module.containers, releases_module.joined):
        read_once.cache_clear()
        request.addfinalizer(read_once.cache_clear)
    assert [release.version for release in releases()] == [*SUPPORTED, "1.4.0"]
    assert require_runtime("1.4.0", "pytorch").tracks == ("pytorch",)
    assert container("1.4.0").image == "example/triton:26.12"
    with pytest.raises(UserError, match=r"1\.2\.1\. Engines .* are frozen"):
        require_runtime("1.4.0", "tensorrt")

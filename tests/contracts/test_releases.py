"""Releases and containers: what is offered, what is refused and why; and that all contracts know the same versions."""

from __future__ import annotations

import pytest

from pipeline.contracts import inflight_batcher, llm_args, llmapi
from pipeline.contracts import releases as releases_module
from pipeline.contracts.launching import launch_facts
from pipeline.contracts.releases import (
    TRACKS,
    candidate_lines,
    container,
    containers,
    release,
    releases,
    require_runtime,
)
from pipeline.errors import UserError

SUPPORTED = ["1.0.0", "1.1.0", "1.2.0", "1.2.1"]


def test_the_supported_releases_oldest_first() -> None:
    assert [one.version for one in releases()] == SUPPORTED


def test_other_contracts_know_the_same_versions() -> None:
    of = {track: [one.version for one in releases() if track in one.tracks] for track in TRACKS}
    assert list(inflight_batcher.versions()) == of["tensorrt"]
    assert list(llm_args.versions()) == [*of["pytorch"], *candidate_lines()]
    assert set(llmapi.versions()) >= {*of["pytorch"], *candidate_lines()}
    for version in [*SUPPORTED, *(f"{line}rc1" for line in candidate_lines())]:
        assert launch_facts(version).server


@pytest.mark.parametrize("version", [*SUPPORTED, "1.3.0rc14"])
def test_each_release_has_a_container_that_says_what_it_needs(version: str) -> None:
    found = container(version)
    assert found.trtllm == version
    assert found.image.startswith("nvcr.io/nvidia/")
    assert not found.image.endswith("latest")
    assert found.driver.count(".") == 2


def test_a_container_whose_content_is_disputed_is_the_last_resort() -> None:
    assert container("1.1.0").release == "26.02"
    assert container("1.2.0").conflict is not None  # 26.03 is the only one
    disputed = [one.release for one in containers() if one.conflict is not None]
    assert disputed == ["25.11", "26.03"]


@pytest.mark.parametrize(
    ("version", "track", "said"),
    [
        ("0.20.0", "pytorch", "0.20.0 is not supported; the oldest is 1.0.0$"),
        ("0.21.0rc1", "tensorrt", "0.21.0rc1 is not supported; the oldest is 1.0.0$"),
        ("1.3.0rc14", "tensorrt", "1.2.1 is the last of them that has trtllm-build.*with it: 1.0.0"),
        ("1.2.9", "tensorrt", "1.2.9 is not known; known: 1.2.1, 1.3.0rcN"),
        ("1.3.0", "pytorch", "not known; known: .*1.3.0rcN"),
    ],
)
def test_what_is_not_offered_and_why(version: str, track: str, said: str) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        require_runtime(version, "tensorrt" if track == "tensorrt" else "pytorch")


def test_any_candidate_of_the_line_after_the_last_release() -> None:
    assert release("1.3.0rc4").tracks == ("pytorch",)
    assert container("1.3.0rc4").image == "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc4"


def test_a_release_is_added_by_adding_data(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = releases_module._data()
    fresh = {**facts["releases"][-1], "version": "1.4.0", "tracks": ["pytorch"], "no_tensorrt": "it is gone"}
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
    assert [one.version for one in releases()] == [*SUPPORTED, "1.4.0"]
    assert require_runtime("1.4.0", "pytorch").tracks == ("pytorch",)
    assert container("1.4.0").image == "example/triton:26.12"
    with pytest.raises(UserError, match="it is gone"):
        require_runtime("1.4.0", "tensorrt")

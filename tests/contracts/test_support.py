"""Models and features that upstream lists: the data hold together, and answer by release and GPU."""

from __future__ import annotations

import pytest

from pipeline.contracts import read_facts
from pipeline.contracts.releases import releases
from pipeline.contracts.support import (
    architectures,
    feature_support,
    features,
    listing,
    model_support,
    untested_together,
)
from pipeline.contracts.version_range import precedes
from pipeline.plan.compatibility import FEATURES, feature_issue, why_not_listed

VERSIONS = [release.version for release in releases() if "pytorch" in release.tracks]


def test_rows_of_the_matrix_are_of_classes_that_are_listed_then() -> None:
    for page in read_facts("support.yaml")["pages"]:
        for name, row in page["matrix"].items():
            assert len(row.split()) == len(features()), name
            assert set(row.split()) <= set("ynu"), name
            assert page["since"] in listing(name), name


def test_every_release_has_a_page_and_every_pair_a_name() -> None:
    assert read_facts("support.yaml")["pages"][0]["since"] == VERSIONS[0]
    assert {*features(), *(name for pair in untested_together() for name in pair)} == set(FEATURES)


def test_a_class_is_listed_from_one_release_to_before_another() -> None:
    for name in architectures():
        inside = [version in listing(name) for version in VERSIONS]
        assert (
            inside == sorted(inside)
            or inside == sorted(inside, reverse=True)
            or name == "MiniMaxM2ForCausalLM"
        )


@pytest.mark.parametrize("name", architectures())
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_proposed_is_right(name: str, version: str) -> None:
    """A release that a warning names lists the class; one that a refusal names has the feature."""
    issue = why_not_listed(name, version)
    assert (issue is None) == (version in listing(name))
    for feature in features():
        said = feature_issue(name, feature, version, None)
        if said is not None and "runtime.version to " in said.fix:
            better = said.fix.partition("runtime.version to ")[2].replace(" or ", ", ").split(", ")
            assert all(feature_issue(name, feature, listed, None) is None for listed in better)
            assert all(listed in listing(name) for listed in better)


def test_answers_by_gpu() -> None:
    chunks = feature_support("DeepseekV3ForCausalLM", "1.2.1")["chunked_prefill"]
    assert [chunks.on(sm) for sm in (89, 90, 100, 103, 120, None)] == [
        "no",
        "untested",
        "yes",
        "yes",
        "untested",
        "yes",
    ]
    assert [model_support("DeepseekV4ForCausalLM", "1.3.0rc29").on(sm) for sm in (90, 100, 120)] == [
        "no",
        "yes",
        "yes",
    ]
    assert model_support("LlamaForCausalLM", "1.0.0").on(80) == "yes"


def test_published_checkpoints_have_the_row_of_their_text_decoder() -> None:
    outer = feature_support("Qwen3_5MoeForConditionalGeneration", "1.3.0rc29")
    assert outer == feature_support("Qwen3_5MoeForCausalLM", "1.3.0rc29")
    assert outer["mtp"].answer == "yes"
    assert precedes("1.2.1", listing("Qwen3_5MoeForConditionalGeneration")[0])

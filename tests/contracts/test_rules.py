"""The rules as data: what a rule answers."""

from __future__ import annotations

import pytest

from pipeline.contracts.rules import GROUPS, rule, rules, similar_ids, source


def test_ids_are_unique_over_groups() -> None:
    names = [rule.id for rule in rules()]
    assert len(names) == len(set(names))
    assert {rule.group for rule in rules()} == set(GROUPS)


@pytest.mark.parametrize(
    ("name", "runtime", "version", "holds"),
    [
        ("rt.ngram_size", "pytorch", "1.2.1", True),
        ("rt.ngram_size", "pytorch", "1.3.0rc29", False),
        ("rt.ngram_size", "pytorch", None, True),
        ("rt.ngram_size", "tensorrt", "1.2.1", False),
        ("rt.required_param_keys", "tensorrt", "1.0.0", True),
        ("host.disk", "cpu", None, True),
    ],
)
def test_where_a_rule_holds(name: str, runtime: str, version: str | None, holds: bool) -> None:
    assert rule(name).concerns(runtime, version) == holds


def test_severities_may_depend_on_the_runtime() -> None:
    vocabulary = rule("rt.spec_same_vocab")
    assert [vocabulary.severity(kind) for kind in ("tensorrt", "pytorch", "cpu")] == [
        "error",
        "warning",
        "error",
    ]
    assert vocabulary.gravest == "error"


def test_what_may_not_be_allowed_says_why_and_leaves_no_word_to_warnings() -> None:
    for each in rules():
        assert each.gravest == "error" or not each.never_allowed, each.id
        assert not each.held or each.never_allowed, each.id  # who holds it does not ask


@pytest.mark.parametrize(
    ("wrong", "first"),
    [("awq_block", "tp.awq_block"), ("sm.fp9", "sm.fp8"), ("host.disc", "host.disk"), ("?", None)],
)
def test_the_nearest_rules(wrong: str, first: str | None) -> None:
    found = similar_ids(wrong)
    assert (found[0] if found else None) == first


def test_sources_are_texts() -> None:
    assert source("builder").startswith("NVIDIA/TensorRT-LLM tensorrt_llm/builder.py")

"""The rules as data: all that upstream's sources name, and what a rule answers."""

from __future__ import annotations

import pytest

from pipeline.contracts.rules import GROUPS, rule, rules, similar_ids, source

# What upstream's sources were read for (but for kvq.int8: no recipe can ask for it); rules of our own come on top.
OF_UPSTREAM = [
    "tp.attention_heads",
    "tp.kv_heads_even",
    "tp.kv_heads_duplicate",
    "tp.hidden_and_ffn",
    "tp.awq_block",
    "vocab.pad_tp",
    "vocab.pad_awq",
    "pp.world",
    "pp.layers",
    "moe.ep",
    "ckpt.mapping",
    "sm.fp8",
    "sm.fp8_ctx_fmha",
    "sm.nvfp4",
    "sm.awq_blackwell",
    "sm.w4a8_arch",
    "sm.bf16",
    "sm.fp8_kv_ampere",
    "kvq.weight_combo",
    "calib.awq_sizes",
    "quantization.w4a8_group",
    "checkpoint.qwen_seq_length",
    "kvq.engine_llmapi",
    "build.max_num_tokens_clip",
    "build.max_num_tokens_large",
    "build.max_num_tokens_block",
    "build.max_num_tokens_spec",
    "build.batch_le_tokens",
    "build.input_lt_seq",
    "build.opt_tokens",
    "build.tokens_per_block",
    "build.draft_flags",
    "build.ctx_logits",
    "rt.kv_reuse",
    "rt.chunked",
    "rt.batch_cap",
    "rt.decoupled_stream",
    "rt.spec_decoupled",
    "rt.logits_dtype",
    "rt.required_param_keys",
    "rt.max_batch_llmapi",
    "rt.spec_same_vocab",
    "rt.spec_kv_reuse",
    "rt.spec_exclude_input",
    "rt.spec_batch",
    "rt.spec_len",
    "rt.spec_sm",
    "rt.spec_overlap",
    "rt.spec_tokens_budget",
    "rt.ngram_size",
    "rt.backend_supports_spec",
    "port.arch",
    "port.version",
    "port.models_tree",
    "mpi.world_launch",
    "mpi.orchestrator",
    "mpi.slots",
    "mpi.root",
    "gpu_ids.count",
    "host.shm",
    "host.ports",
    "host.driver",
    "llmapi.multi_gpu",
    "llmapi.unknown_keys",
]


def test_every_rule_of_upstream_is_among_the_data() -> None:
    assert set(OF_UPSTREAM) <= {one.id for one in rules()}
    assert len(OF_UPSTREAM) == 64


def test_ids_are_unique_over_groups() -> None:
    names = [one.id for one in rules()]
    assert len(names) == len(set(names))
    assert {one.group for one in rules()} == set(GROUPS)


@pytest.mark.parametrize(
    ("name", "runtime", "version", "holds"),
    [
        ("rt.ngram_size", "pytorch", "1.2.1", True),
        ("rt.ngram_size", "pytorch", "1.3.0rc14", False),
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


def test_what_differs_from_upstream_says_why() -> None:
    differing = {one.id for one in rules() if one.differs}
    assert {
        "rt.spec_decoupled",
        "rt.spec_exclude_input",
        "rt.spec_batch",
        "mpi.slots",
        "host.ports",
    } <= differing
    assert all(
        "ours" in rule(name).differs
        for name in ("rt.spec_decoupled", "rt.spec_exclude_input", "rt.spec_batch")
    )


def test_what_may_not_be_allowed_says_why_and_leaves_no_word_to_warnings() -> None:
    for one in rules():
        assert one.gravest == "error" or not one.never_allowed, one.id
        assert not one.held or one.never_allowed, one.id  # who holds it does not ask


@pytest.mark.parametrize(
    ("wrong", "first"),
    [("awq_block", "tp.awq_block"), ("sm.fp9", "sm.fp8"), ("host.disc", "host.disk"), ("?", None)],
)
def test_the_nearest_rules(wrong: str, first: str | None) -> None:
    found = similar_ids(wrong)
    assert (found[0] if found else None) == first


def test_sources_are_texts() -> None:
    assert source("builder").startswith("NVIDIA/TensorRT-LLM tensorrt_llm/builder.py")

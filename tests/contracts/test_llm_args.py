"""The contract of the LLM API's arguments: sound data, and the judgements of upstream's pydantic models."""

from __future__ import annotations

from importlib import resources
from itertools import combinations
from typing import Any

import pytest
import yaml

from pipeline.contracts.llm_args import check, names, speculation, versions
from pipeline.contracts.llm_rules import RULES, graph_sizes
from pipeline.contracts.version_range import entries_in
from pipeline.errors import UserError

DATA: dict[str, Any] = yaml.safe_load(
    (resources.files("pipeline.contracts") / "data" / "llm_args.yaml").read_text("utf-8")
)
ENTRIES = [
    *((section, entry) for section in ("speculation", "decoding_types", "rules", "renamed") for entry in DATA[section]),
    *((model, field) for model, fields in DATA["models"].items() for field in fields),
]  # fmt: skip
MODEL = {"model": "m"}


def said(version: str, **arguments: Any) -> list[str]:
    return [str(fault) for fault in check(version, MODEL | arguments)]


def test_every_fact_has_a_source_and_a_span() -> None:
    for where, entry in ENTRIES:
        assert entry["source"], where
        assert set(entry["source"]) <= set(DATA["sources"]), where
        assert {entry.get("since"), entry.get("until")} <= {None, *versions()}, where


@pytest.mark.parametrize("version", versions())
def test_a_field_has_one_type_in_a_version(version: str) -> None:
    for model, fields in DATA["models"].items():
        known = [entry["name"] for entry in entries_in(fields, version, versions())]
        assert len(known) == len(set(known)), model


@pytest.mark.parametrize("version", versions())
def test_all_types_can_be_made(version: str) -> None:
    """Each decoding type and each section, empty or with a key too many, gives a judgement."""
    for entry in entries_in(DATA["decoding_types"], version, versions()):
        settings = {"decoding_type": entry["name"], "no_such_key": 1}
        assert any(
            "no_such_key" in line or "engines only" in line
            for line in said(version, speculative_config=settings)
        )
    for name in names(version):
        assert isinstance(said(version, **{name: {"no_such_key": 1}}), list)


def test_rules_are_those_of_the_data() -> None:
    assert {rule["id"] for rule in DATA["rules"]} == set(RULES)


def test_a_methods_spelling_is_one_in_each_version() -> None:
    for version in versions():
        entries = list(entries_in(DATA["speculation"], version, versions()))
        assert sorted(entry["method"] for entry in entries) == ["draft_target", "eagle3", "mtp", "ngram"]


@pytest.mark.parametrize(
    ("version", "method", "decoding_type", "key"),
    [
        ("1.0.0", "draft_target", "DraftTarget", "speculative_model_dir"),
        ("1.2.0", "draft_target", "DraftTarget", "speculative_model_dir"),
        ("1.2.1", "draft_target", "DraftTarget", "speculative_model"),
        ("1.3.0", "draft_target", "Draft_Target", "speculative_model"),
        ("1.1.0", "eagle3", "Eagle", "speculative_model_dir"),
        ("1.2.1", "eagle3", "Eagle", "speculative_model"),
        ("1.3.0", "eagle3", "Eagle3", "speculative_model"),
        ("1.3.0", "ngram", "NGram", None),
        ("1.0.0", "mtp", "MTP", None),
    ],
)
def test_names_by_version(version: str, method: str, decoding_type: str, key: str | None) -> None:
    chosen = speculation(version, method)
    assert (chosen.decoding_type, chosen.draft_key) == (decoding_type, key)


def test_versions_that_are_not_taken_say_why() -> None:
    with pytest.raises(UserError, match=r"0\.21\.0 is not supported; the oldest is 1\.0\.0"):
        check("0.21.0", MODEL)
    with pytest.raises(UserError, match=r"1\.2\.9 is not known; known: 1\.2"):
        check("1.2.9", MODEL)


@pytest.mark.parametrize(
    ("version", "arguments", "fault"),
    [
        (
            "1.2.1",
            {"max_batchsize": 8},
            "max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)",
        ),
        (
            "1.2.1",
            {"quant_config": {}},
            "quant_config = {}: is not an argument in TensorRT-LLM 1.2.1 (write nothing: the checkpoint itself",
        ),
        (
            "1.3.0",
            {"build_config": {}},
            "build_config = {}: is not an argument in TensorRT-LLM 1.3.0 (write max_batch_size",
        ),
        (
            "1.0.0",
            {"return_perf_metrics": True},
            "return_perf_metrics = True: is not an argument in TensorRT-LLM 1.0.0",
        ),
        (
            "1.2.0",
            {"connector_config": {}},
            "connector_config = {}: is not an argument in TensorRT-LLM 1.2.0 (did you mean kv_connector_config?)",
        ),
        (
            "1.0.0",
            {"kv_cache_config": {"tokens_per_block": 64}},
            "kv_cache_config.tokens_per_block = 64: is not an argument",
        ),
        (
            "1.2.1",
            {"kv_cache_config": {"free_gpu_memory_fraction": 1.1}},
            "kv_cache_config.free_gpu_memory_fraction = 1.1: input should be less than or equal to 1",
        ),
        (
            "1.2.1",
            {"kv_cache_config": {"max_attention_window": []}},
            "kv_cache_config.max_attention_window = []: list should have at least 1 item",
        ),
        (
            "1.2.1",
            {"scheduler_config": {"capacity_scheduler_policy": "guaranteed_no_evict"}},
            "scheduler_config.capacity_scheduler_policy = guaranteed_no_evict: input should be",
        ),
        (
            "1.2.1",
            {"tensor_parallel_size": "two"},
            "tensor_parallel_size = two: input should be a valid integer",
        ),
        ("1.2.1", {"stream_interval": 0}, "stream_interval = 0: input should be greater than 0"),
        ("1.3.0", {"backend": "tensorrt"}, "backend = tensorrt: input should be 'pytorch'"),
        ("1.2.1", {"batched_logits_processor": "x"}, "batched_logits_processor = x: takes a Python object"),
        ("1.2.1", {"load_format": "pickle"}, "load_format = pickle: must be one of auto, dummy, vision_only"),
        (
            "1.2.1",
            {"cuda_graph_config": {"batch_sizes": [1, 3], "max_batch_size": 4}},
            "cuda_graph_config.batch_sizes = [1, 3]: is given, and max_batch_size too",
        ),
        (
            "1.3.0",
            {"cuda_graph_config": {"batch_sizes": [1, 3], "max_batch_size": 4}},
            "cuda_graph_config.max_batch_size = 4: must be the largest of batch_sizes, 3",
        ),
        (
            "1.2.1",
            {"ray_worker_extension_cls": "a.B"},
            "ray_worker_extension_cls = a.B: needs orchestrator_type ray",
        ),
        (
            "1.2.1",
            {"tensor_parallel_size": 4, "moe_expert_parallel_size": 3},
            "tensor_parallel_size = 4: must be a multiple",
        ),
    ],
)
def test_what_upstream_refuses(version: str, arguments: dict[str, Any], fault: str) -> None:
    faults = said(version, **arguments)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


DRAFT = {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "d"}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}


@pytest.mark.parametrize(
    ("version", "settings", "fault"),
    [
        ("1.2.1", {}, "speculative_config.decoding_type: is missing (one of MTP, NGram, Eagle,"),
        (
            "1.2.1",
            {**DRAFT, "decoding_type": "Draft_Target"},
            "speculative_config.decoding_type = Draft_Target: is not known to TensorRT-LLM 1.2.1 (one of",
        ),
        (
            "1.3.0",
            DRAFT,
            "speculative_config.decoding_type = DraftTarget: is not known to TensorRT-LLM 1.3.0 (one of Draft_Target)",
        ),
        (
            "1.2.1",
            {**DRAFT, "decoding_type": "Eagle3"},
            "speculative_config.decoding_type = Eagle3: is not known",
        ),
        (
            "1.2.0",
            DRAFT,
            "speculative_config.speculative_model = d: is not an argument in TensorRT-LLM 1.2.0 (did you mean",
        ),
        (
            "1.2.1",
            {"decoding_type": "Medusa"},
            "speculative_config.decoding_type = Medusa: does not run on the PyTorch backend",
        ),
        (
            "1.2.1",
            {"decoding_type": "NGram", "max_draft_len": 3},
            "speculative_config.max_matching_ngram_size: is missing",
        ),
        (
            "1.2.1",
            {**NGRAM, "max_matching_ngram_size": 0},
            "speculative_config.max_matching_ngram_size = 0: input should be greater than 0",
        ),
        ("1.2.1", {**NGRAM, "max_draft_len": 0}, "speculative_config.max_draft_len = 0: must be more than 0"),
        (
            "1.2.1",
            {"decoding_type": "DraftTarget", "max_draft_len": 3},
            "speculative_config: names no draft, which DraftTarget needs",
        ),
        (
            "1.2.1",
            {"decoding_type": "MTP", "num_nextn_predict_layers": 0},
            "speculative_config.num_nextn_predict_layers = 0: input should be greater than 0",
        ),
        (
            "1.2.1",
            {"decoding_type": "UserProvided", "drafter": "x"},
            "speculative_config.drafter = x: takes a Python object",
        ),
    ],
)
def test_what_upstream_refuses_of_speculation(version: str, settings: dict[str, Any], fault: str) -> None:
    faults = said(version, speculative_config=settings, disable_overlap_scheduler=True)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.2.0", "1.2.1"])
def test_two_models_do_not_overlap(version: str) -> None:
    for settings in (
        NGRAM,
        {
            "decoding_type": "DraftTarget",
            "max_draft_len": 3,
            speculation(version, "draft_target").draft_key: "d",
        },
        {
            "decoding_type": "Eagle",
            "max_draft_len": 3,
            speculation(version, "eagle3").draft_key: "d",
            "eagle3_one_model": False,
        },
    ):
        (fault,) = said(version, speculative_config=settings)
        assert fault.startswith(
            "disable_overlap_scheduler: must be true with speculative_config.decoding_type"
        )
        assert said(version, speculative_config=settings, disable_overlap_scheduler=True) == []
    assert said(version, speculative_config={"decoding_type": "MTP"}) == []
    assert said("1.3.0", speculative_config=NGRAM) == []


def test_the_old_name_of_the_draft_is_an_alias_from_1_2_1() -> None:
    settings = {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model_dir": "d"}
    assert said("1.2.1", speculative_config=settings, disable_overlap_scheduler=True) == []
    assert said("1.2.0", speculative_config=settings, disable_overlap_scheduler=True) == []


def test_a_release_candidate_has_what_its_release_has() -> None:
    assert speculation("1.3.0rc4", "eagle3").decoding_type == "Eagle3"
    (fault,) = said("1.2.0rc3", connector_config=None)
    assert fault.startswith("connector_config: is not an argument in TensorRT-LLM 1.2.0rc3")
    with pytest.raises(UserError, match="not supported"):
        check("0.21.0rc1", MODEL)


def test_all_faults_at_once() -> None:
    wrong = {
        "tensor_parallel_size": None,
        "a": 1,
        "kv_cache_config": {"b": 2},
        "speculative_config": {"decoding_type": "C"},
    }
    for some in range(1, len(wrong) + 1):
        for keys in combinations(wrong, some):
            assert len(said("1.2.1", **{key: wrong[key] for key in keys})) == some


def test_pydantic_reads_what_yaml_may_say() -> None:
    """Numbers as text, and whole numbers where a fraction is meant, as upstream's models take them."""
    assert said("1.2.1", tensor_parallel_size="2", kv_cache_config={"free_gpu_memory_fraction": 1}) == []
    assert said("1.2.1", cuda_graph_config=None, max_batch_size=None) == []


@pytest.mark.parametrize(
    ("largest", "padding", "sizes"),
    [
        (1, True, [1]),
        (6, True, [1, 2, 4, 6]),
        (24, True, [1, 2, 4, 8, 16, 24]),
        (4, False, [1, 2, 3, 4]),
        (300, True, [1, 2, 4, *range(8, 129, 8), 256, 300]),
        (512, False, [*range(1, 33), 64, 128, 256, 512]),
    ],
)
def test_sizes_of_graphs(largest: int, padding: bool, sizes: list[int]) -> None:
    assert graph_sizes(largest, padding=padding) == sizes
    given = {"batch_sizes": sizes, "max_batch_size": largest, "enable_padding": padding}
    assert said("1.2.1", cuda_graph_config=given) == []

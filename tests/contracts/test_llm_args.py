"""Arguments of the LLM API: what a release takes and refuses, by name and by type."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.contracts import read_facts
from pipeline.contracts.llm_args import check, speculation, versions
from pipeline.contracts.version_range import entries_in
from pipeline.errors import UserError

MODEL = {"model": "m"}
DRAFT = {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "d"}


def said(version: str, **arguments: Any) -> list[str]:
    return [str(fault) for fault in check(version, MODEL | arguments)]


@pytest.mark.parametrize("version", versions())
def test_a_field_has_one_type_in_a_version_and_every_type_can_be_judged(version: str) -> None:
    for model, fields in read_facts("llm_args.yaml")["models"].items():
        known = [entry["name"] for entry in entries_in(fields, version, versions())]
        assert len(known) == len(set(known)), model
    for entry in entries_in(read_facts("llm_args.yaml")["decoding_types"], version, versions()):
        (fault,) = said(version, speculative_config={"decoding_type": entry["name"], "no_such_key": 1})
        assert fault.startswith("speculative_config.no_such_key = 1: is not an argument")
    methods = [
        entry["method"]
        for entry in entries_in(read_facts("llm_args.yaml")["speculation"], version, versions())
    ]
    assert sorted(methods) == ["draft_target", "eagle3", "mtp", "ngram"]


@pytest.mark.parametrize(
    ("version", "method", "decoding_type", "key"),
    [
        ("1.0.0", "draft_target", "DraftTarget", "speculative_model_dir"),
        ("1.2.1", "draft_target", "DraftTarget", "speculative_model"),
        ("1.3.0rc4", "draft_target", "Draft_Target", "speculative_model"),
        ("1.1.0", "eagle3", "Eagle", "speculative_model_dir"),
        ("1.3.0", "eagle3", "Eagle3", "speculative_model"),
        ("1.3.0", "ngram", "NGram", None),
    ],
)
def test_names_by_version(version: str, method: str, decoding_type: str, key: str | None) -> None:
    chosen = speculation(version, method)
    assert (chosen.decoding_type, chosen.draft_key) == (decoding_type, key)


def test_versions_that_are_not_taken_say_why() -> None:
    with pytest.raises(UserError, match=r"0\.21\.0rc1 is not supported; the oldest is 1\.0\.0"):
        check("0.21.0rc1", MODEL)
    with pytest.raises(UserError, match=r"1\.2\.9 is not known; known: 1\.2"):
        check("1.2.9", MODEL)


@pytest.mark.parametrize(
    ("version", "arguments", "fault"),
    [
        ("1.2.1", {"max_batchsize": 8},
         "max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)"),
        ("1.0.0", {"return_perf_metrics": True},
         "return_perf_metrics = True: is not an argument in TensorRT-LLM 1.0.0"),
        ("1.2.0rc3", {"connector_config": None},
         "connector_config: is not an argument in TensorRT-LLM 1.2.0rc3 (did you mean kv_connector_config?)"),
        ("1.0.0", {"kv_cache_config": {"tokens_per_block": 64}},
         "kv_cache_config.tokens_per_block = 64: is not an argument"),
        ("1.2.1", {"kv_cache_config": {"max_attention_window": ["a"]}},
         "kv_cache_config.max_attention_window = ['a']: must be list[int] | null"),
        ("1.2.1", {"scheduler_config": {"capacity_scheduler_policy": "guaranteed_no_evict"}},
         "scheduler_config.capacity_scheduler_policy = guaranteed_no_evict: must be choice[MAX_UTILIZATION,"),
        ("1.2.1", {"tensor_parallel_size": "two"}, "tensor_parallel_size = two: must be int"),
        ("1.2.1", {"enable_chunked_prefill": 1}, "enable_chunked_prefill = 1: must be bool"),
        ("1.2.1", {"dtype": 16}, "dtype = 16: must be str"),
        ("1.2.1", {"kv_cache_config": 1}, "kv_cache_config = 1: must be KvCacheConfig"),
        ("1.2.1", {"speculative_config": 1}, "speculative_config = 1: must be speculation | null"),
        ("1.2.1", {"speculative_config": {}}, "speculative_config.decoding_type: is missing (one of MTP, NGram,"),
        ("1.3.0", {"speculative_config": DRAFT},
         "speculative_config.decoding_type = DraftTarget: is not known to TensorRT-LLM 1.3.0 (one of"),
        ("1.2.0", {"speculative_config": DRAFT},
         "speculative_config.speculative_model = d: is not an argument in TensorRT-LLM 1.2.0 (did you mean"),
    ],
)  # fmt: skip
def test_what_is_refused(version: str, arguments: dict[str, Any], fault: str) -> None:
    (found,) = said(version, **arguments)
    assert found.startswith(fault)


def test_what_is_taken() -> None:
    """The old name of the draft's checkpoint is an alias from 1.2.1; whole numbers may stand for fractions."""
    old = {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model_dir": "d"}
    for version in ("1.2.0", "1.2.1"):
        assert said(version, speculative_config=old) == []
    assert (
        said("1.2.1", kv_cache_config={"free_gpu_memory_fraction": 1}, moe_config={"load_balancer": 3}) == []
    )
    assert said("1.2.1", cuda_graph_config=None, max_batch_size=None, speculative_config=None) == []


def test_all_faults_at_once() -> None:
    wrong = {"tensor_parallel_size": None, "a": 1, "kv_cache_config": {"b": 2},
             "speculative_config": {"decoding_type": "C"}}  # fmt: skip
    assert len(said("1.2.1", **wrong)) == 4

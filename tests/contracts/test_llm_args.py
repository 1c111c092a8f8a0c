"""Arguments of the LLM API: what a release takes and refuses, by name and by type."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.contracts import read_facts
from pipeline.contracts.llm_args import check, rests_on, speculation, unverified, versions
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
        given = {"speculative_config": {"decoding_type": entry["name"], "max_draft_length": 1}}
        (fault,) = said(version, **given)
        assert fault.startswith("speculative_config.max_draft_length = 1: is not an argument")
    methods = [
        entry["method"]
        for entry in entries_in(read_facts("llm_args.yaml")["speculation"], version, versions())
    ]
    assert sorted(methods) == ["draft_target", "eagle3", "mtp", "ngram"]


@pytest.mark.parametrize(
    ("version", "method", "decoding_type", "key"),
    [
        ("1.0.0", "draft_target", "DraftTarget", "speculative_model_dir"),
        ("1.2.0", "draft_target", "DraftTarget", "speculative_model"),
        ("1.3.0rc29", "draft_target", "Draft_Target", "speculative_model"),
        ("1.1.0", "eagle3", "Eagle", "speculative_model_dir"),
        ("1.4.0rc1", "eagle3", "Eagle3", "speculative_model"),
        ("1.3.0rc29", "ngram", "NGram", None),
    ],
)
def test_names_by_version(version: str, method: str, decoding_type: str, key: str | None) -> None:
    chosen = speculation(version, method)
    assert (chosen.decoding_type, chosen.draft_key) == (decoding_type, key)


def test_versions_that_are_not_taken_say_why() -> None:
    with pytest.raises(UserError, match=r"0\.21\.0rc1 is not supported; the oldest is 1\.0\.0"):
        check("0.21.0rc1", MODEL)
    with pytest.raises(UserError, match=r"1\.2\.9 is not known; near: 1\.2"):
        check("1.2.9", MODEL)


@pytest.mark.parametrize(
    ("version", "arguments", "fault"),
    [
        ("1.2.1", {"max_batchsize": 8},
         "max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)"),
        ("1.0.0", {"return_perf_metrics": True},
         "return_perf_metrics = True: is not an argument in TensorRT-LLM 1.0.0"),
        ("1.1.0", {"enable_trtllm_sampler": True},
         "enable_trtllm_sampler = True: is not an argument in TensorRT-LLM 1.1.0 (TensorRT-LLM 1.0.0 takes it)"),
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
        ("1.3.0rc29", {"speculative_config": DRAFT},
         "speculative_config.decoding_type = DraftTarget: is not known to TensorRT-LLM 1.3.0rc29 (TensorRT-LLM 1.0.0, "
         "1.1.0, 1.2.0 and 1.2.1 take it; one of MTP, NGram, SA,"),
        ("1.1.0", {"speculative_config": DRAFT},
         "speculative_config.speculative_model = d: is not an argument in TensorRT-LLM 1.1.0 (TensorRT-LLM 1.2.0, "
         "1.2.1, 1.3.0rc29 and 1.4.0rc1 take it)"),
        ("1.2.1", {"nvfp4_gemm_config": {"allowed_backends": ["marlin"]}},
         "nvfp4_gemm_config.allowed_backends = ['marlin']: must be list[choice[cutlass, cublaslt, cutedsl, "),
        ("1.3.0rc29", {"enable_sleep": True},
         "enable_sleep = True: is not an argument in TensorRT-LLM 1.3.0rc29 (TensorRT-LLM 1.2.0 and 1.2.1 take it)"),
        ("1.2.1", {"speculative_config": {"decoding_type": "SA", "max_draft_len": 3}},
         "speculative_config.decoding_type = SA: is not known to TensorRT-LLM 1.2.1 (TensorRT-LLM 1.3.0rc29 and "
         "1.4.0rc1 take it"),
        ("1.2.1", {"load_format": "GMS"},
         "load_format = GMS: must be choice[auto, dummy, vision_only, AUTO, DUMMY, VISION_ONLY] "
         "(TensorRT-LLM 1.3.0rc29 and 1.4.0rc1 take it)"),
        ("1.2.1", {"gms_config": {}},
         "gms_config = {}: is not an argument in TensorRT-LLM 1.2.1 (TensorRT-LLM 1.3.0rc29 and 1.4.0rc1 take it)"),
        ("1.4.0rc1", {"sampler_type": "auto"},
         "sampler_type = auto: is not an argument in TensorRT-LLM 1.4.0rc1 (TensorRT-LLM 1.1.0, 1.2.0 and 1.2.1 "),
        ("1.4.0rc1", {"moe_config": {"backend": "WIDEEP"}}, "moe_config.backend = WIDEEP: must be choice[AUTO, "),
        ("1.4.0rc1", {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers_from_model_config": 1}},
         "speculative_config.num_nextn_predict_layers_from_model_config = 1: is not an argument in Tensor"),
    ],
)  # fmt: skip
def test_what_is_refused(version: str, arguments: dict[str, Any], fault: str) -> None:
    (found,) = said(version, **arguments)
    assert found.startswith(fault)


def test_what_is_taken() -> None:
    """The old name of the draft's checkpoint is an alias from 1.2.0; whole numbers may stand for fractions."""
    old = {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model_dir": "d"}
    for version in ("1.1.0", "1.2.0", "1.2.1"):
        assert said(version, speculative_config=old) == []
    for version in ("1.2.0", "1.2.1"):
        assert said(version, speculative_config=DRAFT | {"allow_advanced_sampling": True}) == []
        assert said(version, env_overrides={"TLLM_LOG_LEVEL": "INFO"}, pp_partition=[20, 12]) == []
    assert (
        said("1.2.1", kv_cache_config={"free_gpu_memory_fraction": 1}, moe_config={"load_balancer": 3}) == []
    )
    assert said("1.2.1", cuda_graph_config=None, max_batch_size=None, speculative_config=None) == []


@pytest.mark.parametrize("version", ["1.3.0rc29", "1.4.0rc1"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"load_format": "GMS", "gms_config": {"mode": "ro"}},
        {
            "enable_attention_dp": True,
            "attention_dp_config": {"kv_cache_routing_conversation_affinity": True},
        },
        {"moe_config": {"backend": "MEGAMOE_CUTEDSL"}},
        {
            "kv_cache_config": {
                "use_kv_cache_manager_v2": "auto",
                "block_reuse_config": {"policy": "per_request"},
            }
        },
        {"speculative_config": {"decoding_type": "SA", "max_draft_len": 3, "enable_global_pool": True}},
        {"speculative_config": {"decoding_type": "DFlash", "speculative_model": "d", "mask_token_id": 3}},
        {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3, "sa_config": {"threshold": 4}}},
        {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "d"}},
    ],
)
def test_what_the_candidates_take(version: str, arguments: dict[str, Any]) -> None:
    assert said(version, **arguments) == []
    assert unverified(version, MODEL | arguments) == ()
    assert said("1.2.1", **arguments) != []


def test_a_version_newer_than_all_that_was_read_may_have_any_name() -> None:
    assert said("1.4.0rc1", quite_another_thing=1) == []
    (fault,) = unverified("1.4.0rc1", MODEL | {"quite_another_thing": 1})
    assert "is not certain to be taken by TensorRT-LLM 1.4.0rc1" in str(fault)
    assert said("1.4.0rc1", max_batchsize=1)[0].endswith("(did you mean max_batch_size?)")
    assert said("1.3.0rc29", quite_another_thing=1) != []
    assert "TensorRT-LLM 1.4.0rc1 takes it" in said("1.3.0rc29", per_request_spec_decode_stats=True)[0]


def test_evidence_other_than_the_release_is_said() -> None:
    assert [version for version in versions() if rests_on(version)] == ["1.4.0rc1"]


def test_all_faults_at_once() -> None:
    wrong = {"tensor_parallel_size": None, "a": 1, "kv_cache_config": {"b": 2},
             "speculative_config": {"decoding_type": "C"}}  # fmt: skip
    assert len(said("1.2.1", **wrong)) == 4

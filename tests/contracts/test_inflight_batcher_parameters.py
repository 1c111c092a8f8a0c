"""Parameters of the Triton models: what a version needs, and every way in which a value can be wrong."""

from __future__ import annotations

import pytest

from pipeline.contracts.inflight_batcher import models, versions
from pipeline.contracts.inflight_batcher_parameters import check, parameters
from pipeline.errors import UserError

REQUIRED = {  # the least with which each model loads
    "preprocessing": {"tokenizer_dir": "1/tokenizer", "multimodal_model_path": ""},
    "postprocessing": {"tokenizer_dir": "1/tokenizer"},
    "tensorrt_llm": {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": "/engine",
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
    },
    "ensemble": {},
    "tensorrt_llm_bls": {},
}
EVERY = [(model, version) for model in models() for version in versions()]


@pytest.mark.parametrize(("model", "version"), EVERY)
def test_the_least_is_enough_and_each_part_of_it_is_needed(model: str, version: str) -> None:
    assert check(version, model, REQUIRED[model]) == []
    for name in REQUIRED[model]:
        rest = {other: value for other, value in REQUIRED[model].items() if other != name}
        (fault,) = check(version, model, rest)
        assert fault.startswith(f"{model}: {name}: is missing")


@pytest.mark.parametrize(("model", "version"), EVERY)
def test_defaults_are_values_that_the_model_reads(model: str, version: str) -> None:
    facts = parameters(model, version)
    defaults = {name: fact.default for name, fact in facts.items() if fact.default is not None}
    assert check(version, model, REQUIRED[model] | defaults) == []
    for fact in facts.values():
        assert bool(fact.values) == (fact.kind == "choice")


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("key", ["tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"])
def test_keys_that_the_backend_reads_without_a_net_must_exist_but_may_be_empty(
    version: str, key: str
) -> None:
    assert parameters("tensorrt_llm", version)[key].needed == "key"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_beam_width", "two", "max_beam_width = two: must be a whole number, at least 1"),
        ("max_beam_width", "0", "max_beam_width = 0: must be a whole number, at least 1"),
        ("kv_cache_free_gpu_mem_fraction", "90", "must be a number above 0 and below 1"),
        ("kv_cache_free_gpu_mem_fraction", "1.0", "must be a number above 0 and below 1"),
        ("kv_cache_free_gpu_mem_fraction", "nan", "must be a number above 0 and below 1"),
        ("gpu_weights_percent", "1.5", "must be a number above 0 and at most 1"),
        ("enable_kv_cache_reuse", "yes", "must be true or false"),
        ("batch_scheduler_policy", "evict", "must be one of max_utilization, guaranteed_no_evict"),
        ("decoding_mode", "draft_target", "must be one of top_k, "),
        ("gpu_device_ids", "0,1,;2", "a comma inside an instance and a semicolon between"),
        ("max_attention_window_size", "1024;", "must be whole numbers between commas"),
        ("num_nodes", "", "num_nodes: is empty; give it a value, or leave it out"),
        ("gpt_model_path", "", "gpt_model_path: is empty; give it a value"),
        ("gpt_model_path", "${engine_dir}", "a placeholder is left"),
        ("enable_chunked_contxt", "true", "did you mean enable_chunked_context?"),
        ("cpu_threads", "2", "cpu_threads: is not read by this version"),
        (
            "decoding_mode",
            "lookahead",
            "lookahead_window_size: is missing, and decoding_mode = lookahead needs it",
        ),
    ],
)
def test_each_fault_is_said(name: str, value: str, said: str) -> None:
    faults = check("1.2.1", "tensorrt_llm", REQUIRED["tensorrt_llm"] | {name: value})
    assert any(said in fault for fault in faults), faults


def test_parameters_of_our_own_sources_pass_where_they_are_named() -> None:
    given = REQUIRED["preprocessing"] | {"vocab_size": "32000"}
    assert check("1.2.1", "preprocessing", given) == [
        "preprocessing: vocab_size: is not read by this version"
    ]
    assert check("1.2.1", "preprocessing", given, ours={"vocab_size"}) == []


def test_templates_have_upstreams_names() -> None:
    facts = parameters("tensorrt_llm", "1.2.1")
    assert facts["gpt_model_path"].template == "engine_dir"
    assert facts["gpt_model_type"].template == "batching_strategy"
    assert facts["num_nodes"].template == "num_nodes"
    assert facts["recv_poll_period_ms"].template is None


def test_an_unknown_version_or_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"1\.2\.9 is not known; known: .*1\.2\.1"):
        check("1.2.9", "ensemble", {})
    with pytest.raises(UserError, match="preprocesing is not a model"):
        check("1.2.1", "preprocesing", {})

"""Rules across fields, on both sides of their edge. Each message names the fields and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from pipeline.recipe import Recipe
from pipeline.recipe.loading import ValidValues
from pipeline.recipe.validators import RULES

Load = Callable[..., Recipe]
Faults = Callable[..., list[str]]

SUPPORT = {"dataset": "support"}
FP8 = {"format": "fp8", "calibration": SUPPORT}
DRAFT = {"source": "local:draft", "max_draft_tokens": 4}
TRT = {"kind": "tensorrt", "version": "1.2.1", "gpu": "h100-sxm-80g"}
TORCH = TRT | {"kind": "pytorch"}

# sections to replace -> what the one fault must contain, in this order
BROKEN = {
    "revision of a local model": (
        {"model": {"source": "local:x", "revision": "main"}},
        ["model.revision = main", "model.source is a local folder", "remove model.revision"]),
    "revision of a local draft": (
        {"draft": DRAFT | {"revision": "main"}}, ["draft.revision = main", "draft.source", "remove draft.revision"]),
    "revision of a local adapter": (
        {"adapters": {"tone": {"source": "local:x", "revision": "main"}}},
        ["adapters.tone.revision = main", "adapters.tone.source is a local folder", "remove adapters.tone.revision"]),
    "adapters of an engine": (
        {"runtime": TRT, "adapters": {"tone": {"source": "hf:org/tone"}}},
        ["adapters", "runtime.kind pytorch and cpu, but it is tensorrt", "set runtime.kind to pytorch"]),
    "ranks beside adapters": (
        {"runtime": TORCH | {"llm_args": {"lora_config": {"max_lora_rank": 8, "max_loras": 2}}},
         "adapters": {"tone": {"source": "hf:org/tone"}}},
        ["runtime.llm_args", "has lora_config.max_lora_rank, which adapters decide", "max_loras, max_cpu_loras"]),
    "no calibration": (
        {"quantization": {"format": "fp8"}},
        ["quantization.calibration: is missing", "quantization.format is fp8", "quantization.calibration.dataset"]),
    "no calibration of the draft": (
        {"draft": DRAFT | {"quantization": "fp8"}},
        ["quantization.calibration: is missing", "draft.quantization is fp8", "quantization.calibration.dataset"]),
    "calibration of nothing": (
        {"quantization": {"calibration": SUPPORT}},
        ["quantization.calibration: is given", "quantization.format is none", "remove quantization.calibration"]),
    "gate of nothing": (
        {"quantization": {"gate": {}}}, ["quantization.gate: is given", "quantization.format is none", "remove"]),
    "few samples": (
        {"quantization": {"format": "fp8", "calibration": SUPPORT | {"samples": 127}}},
        ["quantization.calibration.samples = 127: must be 128 to 512", "quantization.calibration.allow_sample_count"]),
    "many samples": (
        {"quantization": {"format": "fp8", "calibration": SUPPORT | {"samples": 513}}},
        ["quantization.calibration.samples = 513: must be 128 to 512", "quantization.calibration.allow_sample_count"]),
    "block size of nothing": (
        {"quantization": FP8 | {"awq_block_size": 64}},
        ["quantization.awq_block_size = 64", "quantization.format fp8 has no AWQ blocks", "int4_awq or w4a8_awq"]),
    "auto without budget": (
        {"quantization": FP8 | {"format": "auto"}},
        ["quantization.auto: is missing", "quantization.format is auto", "quantization.auto.effective_bits"]),
    "budget without auto": (
        {"quantization": FP8 | {"auto": {"effective_bits": 6}}},
        ["quantization.auto: is given", "quantization.format is fp8", "remove quantization.auto"]),
    "p99 below p95": (
        {"slo": {"ttft_p95_ms": 200, "ttft_p99_ms": 150}},
        ["slo.ttft_p99_ms = 150", "less than slo.ttft_p95_ms, which is 200", "set slo.ttft_p99_ms to slo.ttft_p95_ms"]),
    "nvfp4 on cpu": (
        {"quantization": FP8 | {"format": "nvfp4"}},
        ["quantization.format = nvfp4: needs a GPU", "runtime.kind is cpu", "fp8 or int4_awq"]),
    "nvfp4 draft on cpu": (
        {"quantization": FP8, "draft": DRAFT | {"quantization": "nvfp4"}},
        ["draft.quantization = nvfp4: needs a GPU", "runtime.kind is cpu"]),
    "nvfp4 by auto on cpu": (
        {"quantization": FP8 | {"format": "auto", "auto": {"effective_bits": 6, "formats": ["fp8", "nvfp4"]}}},
        ["quantization.auto.formats: needs a GPU", "runtime.kind is cpu"]),
    "fp8 cache without calibration": (
        {"quantization": {"kv_cache": "fp8"}, "runtime": TRT},
        ["quantization.kv_cache = fp8: needs scales", "quantization.format is none", "quantization.kv_cache to auto"]),
    "draft longer than answers": (
        {"draft": DRAFT | {"max_draft_tokens": 64}},
        ["draft.max_draft_tokens = 64", "less than limits.max_output_tokens, which is 64", "at most 63"]),
    "batch smaller than one step": (
        {"limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 19},
         "draft": DRAFT},
        ["limits.max_batch_tokens = 19", "limits.max_concurrency 4 x (draft.max_draft_tokens 4 + 1)", "at least 20"]),
    "batch smaller than a prompt": (
        {"limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 8},
         "scheduler": {"chunked_context": False}, "runtime": TRT},
        ["limits.max_batch_tokens = 8", "limits.max_input_tokens 9", "scheduler.chunked_context is false", "least 9"]),
    "batch smaller than a prompt with its answer and drafts": (
        {"limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 20},
         "scheduler": {"chunked_context": False}, "runtime": TRT, "draft": DRAFT},
        ["limits.max_batch_tokens = 20", "prompt, answer and drafts together, 21", "at least 21"]),
    "graphs of no size": (
        {"runtime": TORCH | {"max_graph_batch": 8, "cuda_graphs": False}},
        ["runtime.max_graph_batch = 8: is given, but runtime.cuda_graphs is false", "remove runtime.max_graph_batch"]),
    "experts do not divide": (
        {"runtime": TRT | {"tensor_parallel": 4, "expert_parallel": 3}},
        ["runtime.expert_parallel = 3", "runtime.tensor_parallel, which is 4", "one of 1, 2, 4"]),
    "export without the runtime's size": (
        {"runtime": TRT | {"tensor_parallel": 2}, "quantization": FP8 | {"export_tensor_parallel": [1, 4]}},
        ["quantization.export_tensor_parallel", "runtime.tensor_parallel, which is 2", "add 2"]),
    "ranks of a format that no engine takes": (
        {"quantization": FP8 | {"format": "w4a16_nvfp4", "export_tensor_parallel": [1]}},
        ["quantization.export_tensor_parallel", "no engine takes quantization.format w4a16_nvfp4"]),
    "eagle3 on tensorrt": (
        {"runtime": TRT, "draft": DRAFT | {"method": "eagle3"}},
        ["draft.method = eagle3", "runtime.kind pytorch, but it is tensorrt", "draft_target"]),
    "parallel draft on pytorch": (
        {"runtime": TORCH, "draft": DRAFT | {"tensor_parallel": 2}},
        ["draft.tensor_parallel = 2", "needs runtime.kind tensorrt, but it is pytorch", "remove draft.tensor"]),
    "draft without reuse on tensorrt": (
        {"runtime": TRT, "draft": DRAFT, "kv_cache": {"reuse": False}},
        ["kv_cache.reuse = false: must be true", "runtime.kind tensorrt", "remove kv_cache.reuse, or draft"]),
    "draft without reuse by bls": (
        {"runtime": {"kind": "cpu", "speculation": "bls"}, "draft": DRAFT, "kv_cache": {"reuse": False}},
        ["kv_cache.reuse = false: must be true", "runtime.speculation bls", "remove kv_cache.reuse, or draft"]),
    "bls without a draft": (
        {"runtime": {"kind": "cpu", "speculation": "bls"}},
        ["runtime.speculation = bls: is bls, but there is no draft", "give a draft"]),
    "two speculations": (
        {"runtime": TORCH | {"speculation": {"method": "ngram", "max_draft_tokens": 4}}, "draft": DRAFT},
        ["runtime.speculation: is given, and draft too", "remove runtime.speculation or draft"]),
    "share of no GPU": (
        {"kv_cache": {"memory_fraction": 0.5}},
        ["kv_cache.memory_fraction = 0.5", "runtime.kind is cpu", "runtime.kv_cache_mib"]),
    "offload without GPU": (
        {"kv_cache": {"host_memory_gib": 1}}, ["kv_cache.host_memory_gib = 1", "runtime.kind is cpu", "remove"]),
    "policy of cpu": (
        {"scheduler": {"policy": "max_utilization"}},
        ["scheduler.policy = max_utilization", "runtime.kind cpu", "guaranteed_no_evict"]),
    "chunks of cpu": (
        {"scheduler": {"chunked_context": False}},
        ["scheduler.chunked_context = false", "runtime.kind cpu", "remove scheduler.chunked_context"]),
    "port of what is not open": (
        {"triton": {"http_port": 8000}},
        ["triton.http_port = 8000", "serving.http is false", "remove triton.http_port"]),
    "fewer servers at most than at least": (
        {"kubernetes": {"min_replicas": 5}},
        ["kubernetes.max_replicas: is less than kubernetes.min_replicas, which is 5", "at least 5"]),
    "a way in without a name": (
        {"kubernetes": {"expose": "ingress:nginx"}}, ["kubernetes.expose", "add kubernetes.hostname"]),
    "semantic without cache": (
        {"cache": {"semantic": {"min_similarity": 0.9}}},
        ["cache.semantic: is given", "cache.enabled is false", "set cache.enabled to true"]),
}  # fmt: skip

SOUND = {
    "revision of the Hub": {"model": {"source": "hf:a/b", "revision": "main"}},
    "quantized draft of an unquantized target": {
        "quantization": {"calibration": SUPPORT}, "draft": DRAFT | {"quantization": "int8_sq"}},
    "128 samples": {"quantization": {"format": "fp8", "calibration": SUPPORT | {"samples": 128}}},
    "512 samples": {"quantization": {"format": "fp8", "calibration": SUPPORT | {"samples": 512}}},
    "4 samples by leave": {
        "quantization": {"format": "fp8", "calibration": SUPPORT | {"samples": 4, "allow_sample_count": True}}},
    "AWQ blocks": {"quantization": FP8 | {"format": "int4_awq", "awq_block_size": 64}},
    "AWQ blocks of the draft": {
        "quantization": FP8 | {"awq_block_size": 64}, "draft": DRAFT | {"quantization": "w4a8_awq"}},
    "auto with AWQ blocks": {
        "quantization": FP8 | {"format": "auto", "awq_block_size": 64, "auto": {"effective_bits": 6}}},
    "nvfp4 of weights alone on cpu": {"quantization": FP8 | {"format": "w4a16_nvfp4"}},
    "nvfp4 on a GPU": {"quantization": FP8 | {"format": "nvfp4"}, "runtime": TORCH},
    "fp8 cache of an unquantized model on pytorch": {"quantization": {"kv_cache": "fp8"}, "runtime": TORCH},
    "draft just shorter than answers": {"draft": DRAFT | {"max_draft_tokens": 63}},
    "batch of one step": {
        "limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 20},
        "draft": DRAFT},
    "batch of a prompt": {
        "limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 9},
        "scheduler": {"chunked_context": False}, "runtime": TRT},
    "batch of a prompt with its answer and drafts": {
        "limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 21},
        "scheduler": {"chunked_context": False}, "runtime": TRT, "draft": DRAFT},
    "chunked prompts": {
        "limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 4, "max_batch_tokens": 8}},
    "batch of one step of each GPU": {
        "limits": {"max_input_tokens": 9, "max_output_tokens": 9, "max_concurrency": 40, "max_batch_tokens": 10},
        "runtime": TORCH | {"tensor_parallel": 4, "attention_dp": True}},
    "experts divide": {"runtime": TRT | {"tensor_parallel": 4, "expert_parallel": 2}},
    "export with the runtime's size": {
        "runtime": TRT | {"tensor_parallel": 2}, "quantization": FP8 | {"export_tensor_parallel": [1, 2, 4]}},
    "export on cpu": {"quantization": FP8 | {"export_tensor_parallel": [4]}},
    "parallel draft on tensorrt": {"runtime": TRT, "draft": DRAFT | {"tensor_parallel": 2}},
    "eagle3 on pytorch": {"runtime": TORCH, "draft": DRAFT | {"method": "eagle3"}},
    "speculation without draft": {"runtime": TORCH | {"speculation": {"method": "mtp"}}},
    "share of a GPU": {"kv_cache": {"memory_fraction": 0.5, "host_memory_gib": 8}, "runtime": TRT},
    "policy of a GPU": {"scheduler": {"policy": "max_utilization"}, "runtime": TRT},
    "semantic cache": {"cache": {"enabled": True, "semantic": {"min_similarity": 0.9}}},
}  # fmt: skip


def with_sections(small: str, sections: dict[str, object]) -> str:
    text: str = yaml.safe_dump(yaml.safe_load(small) | sections, sort_keys=False)
    return text


@pytest.mark.parametrize(("sections", "parts"), BROKEN.values(), ids=BROKEN)
def test_broken(faults: Faults, small: str, sections: dict[str, object], parts: list[str]) -> None:
    (message,) = faults(with_sections(small, sections))
    at = 0
    for part in parts:
        assert part in message[at:]
        at = message.index(part, at) + len(part)


@pytest.mark.parametrize("sections", SOUND.values(), ids=SOUND)
def test_sound(load: Load, small: str, sections: dict[str, object]) -> None:
    load(with_sections(small, sections))


@pytest.mark.parametrize("sections", [sections for sections, _ in BROKEN.values()], ids=BROKEN)
def test_broken_beside_another_fault(faults: Faults, small: str, sections: dict[str, Any]) -> None:
    (alone,) = faults(with_sections(small, sections))
    slo = {**sections.get("slo", {}), "unknown": 1}
    assert alone in faults(with_sections(small, sections | {"slo": slo}))


def test_every_rule_is_broken_by_a_case(small: str) -> None:
    cases = [ValidValues(yaml.safe_load(small) | sections, []) for sections, _ in BROKEN.values()]
    assert [rule.__name__ for rule in RULES if not any(list(rule(values)) for values in cases)] == []


def test_a_recipe_made_in_python_obeys_the_rules(load: Load, small: str) -> None:
    sound = load(small).model_dump(mode="json")
    with pytest.raises(ValueError, match=r"limits\.max_batch_tokens") as caught:
        Recipe.model_validate(sound | {"limits": sound["limits"] | {"max_batch_tokens": 1}})
    assert "must hold one step" in str(caught.value)

"""Overrides: `--set a.b=c` is the same as editing the file, and its faults say `--set`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.recipe import CpuRuntime, Recipe
from pipeline.recipe.loading import recipe_of_values

Load = Callable[..., Recipe]
Faults = Callable[..., list[str]]


def test_values_are_yaml(load: Load, small: str) -> None:
    recipe = load(
        small, "limits.max_concurrency=7", "kv_cache.reuse=false", "slo.ttft_p95_ms=1e2", "name=on",
        "runtime={kind: cpu, threads: 3}", "draft.source=hf:a/b", "draft.max_draft_tokens=2", "slo.itl_p95_ms=",
    )  # fmt: skip
    assert recipe.limits.max_concurrency == 7
    assert recipe.kv_cache.reuse is False
    assert recipe.slo.ttft_p95_ms == 100
    assert recipe.slo.itl_p95_ms is None
    assert recipe.name == "on"
    assert recipe.runtime == CpuRuntime(threads=3)
    assert recipe.draft is not None
    assert str(recipe.draft.source) == "hf:a/b"


def test_the_last_one_wins(load: Load, small: str) -> None:
    assert load(small, "limits.max_concurrency=7", "limits.max_concurrency=8").limits.max_concurrency == 8
    assert load(small, "slo.ttft_p95_ms=7", "slo=null", "slo={}").slo.ttft_p95_ms is None


def test_a_section_is_replaced_whole(load: Load, small: str) -> None:
    text = small + "quantization: {format: fp8, calibration: {dataset: support}}\n"
    assert load(text, "quantization={format: none}").quantization.calibration is None


def test_the_file_is_read_first_so_its_values_can_be_mended(load: Load, small: str) -> None:
    assert load(small.replace("kind: cpu", "kind: wrong"), "runtime.kind=cpu").runtime.kind == "cpu"


def test_equal_however_it_was_said(load: Load, small: str) -> None:
    edited = load(small.replace("concurrency: 4", "concurrency: 5"))
    overridden = load(small, "limits.max_concurrency=5")
    assert edited == overridden
    assert hash(edited) == hash(overridden)
    assert edited.model_dump_json() == overridden.model_dump_json()
    assert overridden.provenance.overrides == ("limits.max_concurrency=5",)
    assert str(overridden.provenance).endswith("r.yaml with --set limits.max_concurrency=5")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limits.max_concurrency", "--set: limits.max_concurrency: is not an override (write --set section.key=value)"),
        ("=3", "--set: =3: is not an override (write --set section.key=value)"),
        ("limits..x=3", "--set: limits..x=3: is not an override (write --set section.key=value)"),
        ("limits.max_concurency=3",
            "--set: limits.max_concurency = 3: is not a key (did you mean max_concurrency? allowed: max_input_tokens, "
            "max_output_tokens, max_concurrency, max_batch_tokens)"),
        ("limit.max_concurrency=3",
            "--set: limit: is not a key (did you mean limits? allowed: name, model, draft, adapters, quantization, "
            "runtime, "
            "limits, guided_decoding, kv_cache, scheduler, serving, slo, tool_prompt, golden, cache, "
            "gateway, triton, deploy, kubernetes)"),
        ("name.x=3", "--set: name.x = 3: name is not a section"),
        ("limits.max_concurrency=0", "--set: limits.max_concurrency = 0: must be 1 to 8192"),
        ("limits.max_concurrency=[1", "--set: limits.max_concurrency = [1: is not YAML: expected ',' or ']', but got "
            "'<stream end>' (a bracket is not closed, or a comma is missing)"),
        ("limits.max_concurrency={a: 1, a: 2}",
            "--set: limits.max_concurrency = {a: 1, a: 2}: stands twice; first on line 1 (remove one)"),
        ("slo={ttft_p95_ms: -1}", "--set: slo.ttft_p95_ms = -1: must be more than 0"),
        ("draft.max_draft_tokens=2",
            "--set: draft.source: is missing (such as hf:meta-llama/Llama-3.1-8B-Instruct)"),
        ("runtime.threads=0", "--set: runtime.threads = 0: must be 1 to 1024"),
        ("limits.max_batch_tokens=2",
            "--set: limits.max_batch_tokens = 2: must hold one step of all requests: limits.max_concurrency 4 "
            "(at least 4)"),
    ],
)  # fmt: skip
def test_faults_say_set(faults: Faults, small: str, override: str, message: str) -> None:
    assert message in faults(small, override)


def test_a_rule_broken_by_an_override_says_so(faults: Faults, small: str) -> None:
    text = small + "quantization: {format: nvfp4, calibration: {dataset: support}}\n"
    text = text.replace("kind: cpu", "kind: pytorch\n  version: 1.2.1\n  gpu: b200")
    assert faults(text, "runtime={kind: cpu}") == [
        "r.yaml:12: quantization.format = nvfp4: needs a GPU, but runtime.kind is cpu [runtime.kind given by --set] "
        "(set quantization.format to w4a16_nvfp4, fp8 or int4_awq, or runtime.kind to tensorrt or pytorch)"
    ]


def test_overrides_of_a_file_that_is_wrong_elsewhere(faults: Faults, small: str) -> None:
    found = faults(small.replace("name: small", "name: 3"), "limits.max_concurrency=0")
    assert [message.split(" ")[0] for message in found] == ["r.yaml:1:", "--set:"]


def test_a_recipe_is_read_back_from_what_it_was_written_as(load: Load, small: str) -> None:
    """As the gateway reads it from the record of the server that it stands in front of."""
    recipe = load(small, "serving.aliases=[gpt-4o, org/Tiny]")
    assert recipe_of_values(recipe.model_dump(mode="json"), (), "small").serving == recipe.serving

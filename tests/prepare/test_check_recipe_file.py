"""`recipes validate`: faults of a file hide no finding of preflight that could be said before they are mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import Fault, InvalidInput
from pipeline.prepare import check_recipe_file

# Values that are no valid ones, of keys whose defaults or samples take their place.
WRONG = (
    "name=Tiny", "limits.max_input_tokens=0", "limits.max_output_tokens=x", "limits.max_concurrency=null",
    "limits={}", "limits.foo=1", "quantization.format=fp9", "quantization.calibration.samples=1",
    "quantization.kv_cache=x", "quantization.gate=3", "draft.max_draft_tokens=0", "draft.source=x", "runtime.gpu=3",
    "runtime.tensor_parallel=0", "runtime.version=1", "runtime.kind=x", "slo={ttft_p95_ms: 2, ttft_p99_ms: 1}",
    "kv_cache.memory_fraction=7", "scheduler.policy=x", "serving=7", "cache.semantic={}", "golden.file=nowhere.jsonl",
    "model.source=x", "model=null",
)  # fmt: skip
FILE = """name: {name}
model: {{source: "hf:meta-llama/Llama-3.1-8B-Instruct"}}
draft: {{source: "local:nowhere", max_draft_tokens: {drafted}}}
quantization: {{format: nvfp4, calibration: {{dataset: support, samples: 128}}}}
limits: {{max_input_tokens: 2048, max_output_tokens: 100, max_concurrency: {concurrency}}}
runtime: {{kind: tensorrt, gpu: a100-sxm-80g, version: {version}, tensor_parallel: 3}}
slo: {{ttft_p95_ms: 5, ttft_p99_ms: {p99}}}
"""
RIGHT = {"name": "tiny", "drafted": 4, "concurrency": 8, "version": "1.2.1", "p99": 9}


def faults(tmp_path: Path, **values: object) -> list[Fault]:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE.format(**{**RIGHT, **values}))
    with pytest.raises(InvalidInput) as caught:
        check_recipe_file(str(file))
    return list(caught.value.faults)


def rules(found: list[Fault]) -> set[str]:
    return {fault.rule for fault in found if fault.rule}


def test_faults_of_form_and_across_fields_hide_no_finding(tmp_path: Path) -> None:
    """What is found of the valid file is found beside other faults, too; in the order of the file."""
    all_rules = rules(faults(tmp_path))
    assert {"sm.nvfp4", "tp.attention_heads", "source.files"} <= all_rules
    wrong = faults(tmp_path, name="Tiny", concurrency=0, p99=1)
    assert rules(wrong) == all_rules
    assert {fault.key for fault in wrong if not fault.rule} == {
        "name",
        "limits.max_concurrency",
        "slo.ttft_p99_ms",
    }
    assert [fault.line for fault in wrong] == sorted(fault.line or 0 for fault in wrong)
    assert {fault.where for fault in wrong} == {str(tmp_path / "mine.yaml")}


def test_nothing_is_said_of_what_is_a_guess(tmp_path: Path) -> None:
    """The release decides on all rules; the length of a draft on none that is found here."""
    wrong = faults(tmp_path, version="x")
    assert rules(wrong) == {"source.files"}
    assert "source.files" in rules(faults(tmp_path, drafted=0))


@pytest.mark.parametrize("override", WRONG)
# One of each runtime.
@pytest.mark.parametrize("name", ["tiny-cpu", "llama-3.3-70b-fp8", "llama-3.3-70b-nvfp4"])
def test_a_fault_in_a_good_recipe_is_the_only_thing_that_is_said(name: str, override: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_recipe_file(name, [override])
    key = override.partition("=")[0].partition(".")[0]
    about = {fault.key.partition(".")[0] for fault in caught.value.faults if fault.rule}
    assert about <= {key}, str(caught.value)


def test_equal_faults_are_printed_once_with_their_number() -> None:
    layers = [Fault("is missing", where="model", key=f"layers.{number}.weight") for number in range(24)]
    other = Fault("is too large", where="model", key="lm_head")
    error = InvalidInput("model", [*layers, other])
    assert error.faults == (*layers, other)
    assert str(error) == (
        "model: 25 faults\n"
        "  model: layers.0.weight: is missing (24 times: also "
        f"{'; '.join(f'layers.{number}.weight' for number in range(1, 11))}; …)\n"
        "  model: lm_head: is too large"
    )
    lines = [Fault("is no JSON", where="q.jsonl", line=number) for number in (3, 5, 9)]
    assert str(InvalidInput("q.jsonl", lines)).endswith(
        "\n  q.jsonl:3: is no JSON (3 times: also line 5; line 9)"
    )
    assert str(InvalidInput("q.jsonl", lines[:2])).count("is no JSON") == 2

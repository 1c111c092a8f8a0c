"""Every kind of fault says what is wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.errors import InvalidInput

Faults = Callable[..., list[str]]

CALIBRATION = "quantization: {format: fp8, calibration: {dataset: support}}\n"

# (replaced text or None to append, new text, the one message)
CASES = {
    "unknown key": (
        "limits:", "limits:\n  max_batch_token: 64",
        "r.yaml:7: limits.max_batch_token = 64: is not a key (did you mean max_batch_tokens? allowed: "
        "max_input_tokens, max_output_tokens, max_concurrency, max_batch_tokens)",
    ),
    "unknown section": (
        None, "sheduler: {}\n",
        "r.yaml:10: sheduler: is not a key (did you mean scheduler? allowed: name, model, draft, adapters, "
        "quantization, runtime, limits, guided_decoding, kv_cache, scheduler, serving, slo, tool_prompt, golden, "
        "cache, gateway, triton, deploy, kubernetes)",
    ),
    "key of another section": (
        None, "max_batch_tokens: 64\n",
        "r.yaml:10: max_batch_tokens = 64: is not a key (did you mean limits.max_batch_tokens? allowed here: name, "
        "model, draft, adapters, quantization, runtime, limits, guided_decoding, kv_cache, scheduler, serving, slo, "
        "tool_prompt, golden, cache, gateway, triton, deploy, kubernetes)",
    ),
    "missing key": ("  source: local:target", "  revision: main",
        "r.yaml:2: model.source: is missing (such as hf:meta-llama/Llama-3.1-8B-Instruct)"),
    "missing section": ("name: small\n", "", "r.yaml:1: name: is missing (such as llama-3.1-8b-fp8)"),
    "empty section": (None, "slo:\n", "r.yaml:10: slo: is empty; it must be a section of keys (or leave the key out)"),
    "empty union": ("\n  kind: cpu", "",
        "r.yaml:4: runtime: is empty; it must be a section of keys (or leave the key out)"),
    "scalar for a section": (None, "slo: 4\n", "r.yaml:10: slo = 4: must be a section of keys"),
    "list for a section": (None, "draft: [1]\n", "r.yaml:10: draft: must be a section of keys"),
    "text for a number": ("tokens: 512", "tokens: many",
        "r.yaml:7: limits.max_input_tokens = many: must be a whole number"),
    "quoted number": ("tokens: 512", 'tokens: "512"',
        "r.yaml:7: limits.max_input_tokens = 512: must be a whole number (write 512, without quotes or separators)"),
    "separators": ("tokens: 512", "tokens: 8_192",
        "r.yaml:7: limits.max_input_tokens = 8_192: must be a whole number (write 8192, without quotes or separators)"),
    "fraction for a whole number": ("tokens: 512", "tokens: 512.5",
        "r.yaml:7: limits.max_input_tokens = 512.5: must be a whole number"),
    "boolean for a number": ("tokens: 512", "tokens: true",
        "r.yaml:7: limits.max_input_tokens = true: must be a whole number"),
    "empty number": ("tokens: 512", "tokens:",
        "r.yaml:7: limits.max_input_tokens: is empty; it must be a whole number"),
    "mapping for a number": ("tokens: 512", "tokens: {a: 1}",
        "r.yaml:7: limits.max_input_tokens: must be a whole number"),
    "number for text": ("name: small", "name: 12", 'r.yaml:1: name = 12: must be text (write it in quotes: "12")'),
    "on for true": (None, "kv_cache: {reuse: on}\n",
        "r.yaml:10: kv_cache.reuse = on: must be true or false (write true)"),
    "no for false": (None, "kv_cache: {reuse: no}\n",
        "r.yaml:10: kv_cache.reuse = no: must be true or false (write false)"),
    "other for a boolean": (None, "kv_cache: {reuse: 7}\n", "r.yaml:10: kv_cache.reuse = 7: must be true or false"),
    "too small": ("tokens: 512", "tokens: 0", "r.yaml:7: limits.max_input_tokens = 0: must be 1 to 10000000"),
    "too large": (None, "kv_cache: {host_memory_gib: 9000}\n",
        "r.yaml:10: kv_cache.host_memory_gib = 9000: must be 0 to 4096"),
    "not positive": (None, "slo: {ttft_p95_ms: 0}\n", "r.yaml:10: slo.ttft_p95_ms = 0: must be more than 0"),
    "open bounds": (None, "kv_cache: {memory_fraction: 1}\n",
        "r.yaml:10: kv_cache.memory_fraction = 1: must be more than 0 and less than 1"),
    "infinite": (None, "slo: {ttft_p95_ms: .inf}\n", "r.yaml:10: slo.ttft_p95_ms = .inf: must be a finite number"),
    "not a number": (None, "slo: {ttft_p95_ms: .nan}\n", "r.yaml:10: slo.ttft_p95_ms = .nan: must be a finite number"),
    "unknown choice": (None, "quantization: {format: fp9}\n",
        "r.yaml:10: quantization.format = fp9: is not known (did you mean fp8? one of none, fp8, int4_awq, w4a8_awq, "
        "int8_sq, nvfp4, w4a16_nvfp4, auto)"),
    "null choice": (None, "quantization: {format: }\n",
        "r.yaml:10: quantization.format: is empty (one of none, fp8, int4_awq, w4a8_awq, int8_sq, nvfp4, "
        "w4a16_nvfp4, auto)"),
    "number choice": (None, "quantization: {awq_block_size: 32}\n",
        "r.yaml:10: quantization.awq_block_size = 32: is not known (one of 64, 128)"),
    "cache format": (None, "quantization: {kv_cache: int8}\n",
        "r.yaml:10: quantization.kv_cache = int8: is not known (one of auto, fp8)"),
    "draft format": (None, "draft: {source: local:d, max_draft_tokens: 2, quantization: FP8}\n",
        "r.yaml:10: draft.quantization = FP8: is not known (did you mean fp8? one of none, fp8, int4_awq, w4a8_awq, "
        "int8_sq, nvfp4, w4a16_nvfp4)"),
    "scalar for a list": (None, CALIBRATION.replace("fp8,", "fp8, export_tensor_parallel: 2,"),
        "r.yaml:10: quantization.export_tensor_parallel = 2: must be a list"),
    "item of a list": (None, CALIBRATION.replace("fp8,", "fp8, export_tensor_parallel: [1, 0],"),
        "r.yaml:10: quantization.export_tensor_parallel[1] = 0: must be 1 to 64"),
    "unknown runtime": ("kind: cpu", "kind: tensort",
        "r.yaml:5: runtime.kind = tensort: is not known (did you mean tensorrt? one of cpu, tensorrt, pytorch)"),
    "no runtime kind": ("kind: cpu", "threads: 2",
        "r.yaml:4: runtime.kind: is missing (one of cpu, tensorrt, pytorch)"),
    "key of another runtime": ("kind: cpu", "kind: cpu\n  tensor_parallel: 2",
        "r.yaml:6: runtime.tensor_parallel = 2: is not a key (it belongs to runtime.kind tensorrt or pytorch; "
        "allowed here: kind, threads, kv_cache_mib, precision, speculation, simulate_activations)"),
    "unknown backend": (None, "cache: {backend: {kind: redsi}}\n",
        "r.yaml:10: cache.backend.kind = redsi: is not known (did you mean redis? one of sqlite, redis, pgvector)"),
    "backend that is gone": (None, "cache: {backend: {kind: qdrant, url: 'qdrant://host:6333'}}\n",
        "r.yaml:10: cache.backend.kind = qdrant: is not known (one of sqlite, redis, pgvector)"),
    "pattern": (None, "cache: {backend: {kind: redis, url: host}}\n",
        "r.yaml:10: cache.backend.url = host: is not the address of a Redis or Valkey server (write "
        "redis://host:6379/0, or rediss:// for TLS; valkey:// is the same)"),
    "password": (None, "cache: {backend: {kind: pgvector, url: 'postgresql://ada:secret@db/x'}}\n",
        "r.yaml:10: cache.backend.url = postgresql://ada:…@db/x: holds a password (leave it out, and set "
        "PIPELINE_CACHE_PASSWORD where the cache is used)"),
    "name": ("name: small", "name: Small Model",
        'r.yaml:1: name = Small Model: is not a name (write at most 63 lower-case letters, digits, "-" and ".", like '
        "llama-3.1-8b-fp8)"),
    "no draft length": (None, "draft: {source: local:d}\n", "r.yaml:10: draft.max_draft_tokens: is missing (1 to 64)"),
    "source without kind": ("local:target", "meta-llama/Llama-3",
        "r.yaml:3: model.source = meta-llama/Llama-3: does not say what kind of source it is (write "
        '"hf:organisation/name" or "local:path")'),
    "path without kind": ("local:target", "./target",
        'r.yaml:3: model.source = ./target: does not say what kind of source it is (write "local:./target")'),
    "repository": ("local:target", "hf:gpt2",
        'r.yaml:3: model.source = hf:gpt2: is not a repository of the Hub (write "hf:organisation/name")'),
    "revision in the source": ("local:target", "hf:a/b@main",
        "r.yaml:3: model.source = hf:a/b@main: carries a revision "
        '(write source: "hf:a/b" and revision: "main" beside it)'),
    "no path": ("local:target", '"local:"', 'r.yaml:3: model.source = local:: has no path (write "local:path")'),
    "number for a source": ("local:target", "3", "r.yaml:3: model.source = 3: must be text (write it in quotes)"),
    "revision": ("local:target", "hf:a/b\n  revision: -x",
        "r.yaml:4: model.revision = -x: is not a revision (write a branch, a tag or the 40 hexadecimal digits of a "
        "commit)"),
    "revision of digits": ("local:target", "hf:a/b\n  revision: 1234567",
        'r.yaml:4: model.revision = 1234567: must be text (write it in quotes: "1234567")'),
    "revision like a float": ("local:target", "hf:a/b\n  revision: 12345e67",
        'r.yaml:4: model.revision = 12345e67: must be text (write it in quotes: "12345e67")'),
    "data set": (None, CALIBRATION.replace("support", "suport"),
        "r.yaml:10: quantization.calibration.dataset = suport: is not a calibration set "
        "(did you mean support? known: "),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), CASES.values(), ids=CASES)
def test_message(faults: Faults, small: str, old: str | None, new: str, message: str) -> None:
    assert old is None or old in small
    (found,) = faults(small + new if old is None else small.replace(old, new, 1))
    assert found == message or (message.endswith("known: ") and found.startswith(message))


def test_version_that_yaml_reads_as_a_number(faults: Faults, small: str) -> None:
    text = small.replace("kind: cpu", "kind: tensorrt\n  version: 1.2\n  gpu: L4")
    assert faults(text) == [
        'r.yaml:6: runtime.version = 1.2: must be text (write it in quotes: "1.2")',
        "r.yaml:7: runtime.gpu = L4: is not the name of a GPU "
        "(write lower-case words joined by hyphens, like h100-sxm-80g)",
    ]  # fmt: skip


def test_version_with_two_numbers(faults: Faults, small: str) -> None:
    (message,) = faults(small.replace("kind: cpu", 'kind: tensorrt\n  version: "1.2"\n  gpu: l4'))
    assert (
        message
        == "r.yaml:6: runtime.version = 1.2: is not a version of TensorRT-LLM (write all three numbers, like 1.2.1)"
    )


def test_all_faults_at_once_in_the_order_of_the_file(faults: Faults) -> None:
    text = """\
name: Bad
model: {source: nowhere, extra: 1}
draft: {source: local:d, max_draft_tokens: 900}
quantization:
  format: fp8
  format: nvfp4
  kv_cache: int8
  calibration: {dataset: support, samples: 4, max_tokens: -1}
runtime: {kind: cpu, threads: 0, tensor_parallel: 8}
limits: {max_input_tokens: 10, max_output_tokens: 2, max_concurrency: 8, max_batch_tokens: 4}
slo: 3
"""
    found = faults(text, "cache.ttl_s=0")
    assert [message.split(" ")[0:2] for message in found] == [
        ["r.yaml:1:", "name"], ["r.yaml:2:", "model.source"], ["r.yaml:2:", "model.extra"],
        ["r.yaml:3:", "draft.max_draft_tokens"], ["r.yaml:6:", "quantization.format:"],
        ["r.yaml:7:", "quantization.kv_cache"], ["r.yaml:8:", "quantization.calibration.max_tokens"],
        ["r.yaml:8:", "quantization.calibration.samples"], ["r.yaml:9:", "runtime.threads"],
        ["r.yaml:9:", "runtime.tensor_parallel"], ["r.yaml:11:", "slo"],
        ["--set:", "cache.ttl_s"],
    ]  # fmt: skip


def test_a_rule_waits_for_the_values_it_reads(faults: Faults, small: str) -> None:
    text = small.replace("max_concurrency: 4", "max_concurrency: 400000\n  max_batch_tokens: 2")
    assert faults(text) == ["r.yaml:9: limits.max_concurrency = 400000: must be 1 to 8192"]


def test_a_rule_is_judged_although_another_section_is_wrong(faults: Faults, small: str) -> None:
    text = small.replace("max_concurrency: 4", "max_concurrency: 4\n  max_batch_tokens: 2") + "slo: {x: 1}\n"
    assert [message.split(" ")[1] for message in faults(text)] == ["limits.max_batch_tokens", "slo.x"]


def test_a_rule_is_judged_on_defaults_of_a_broken_recipe(faults: Faults, small: str) -> None:
    text = small + "slo: {x: 1}\nquantization: {calibration: {dataset: support, samples: 600}}\n"
    assert [message.split(" ")[1] for message in faults(text)] == [
        "slo.x", "quantization.calibration:", "quantization.calibration.samples",
    ]  # fmt: skip


def test_of_many_faults_the_first_are_described_and_the_others_counted(
    load: Callable[..., object], small: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(small + "".join(f"k{number:04}: 1\n" for number in range(9_000)))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("r.yaml: 9,000 faults")
    assert lines[1].partition(" = ")[0].endswith("k0000")
    assert lines[1].endswith(
        "(50 times: also k0001; k0002; k0003; k0004; k0005; k0006; k0007; k0008; k0009; k0010; …)"
    )
    assert lines[2:] == ["  and 8,950 more"]
    assert caught.value.faults[-1].key == "k0049"
    assert (len(caught.value.faults), caught.value.more) == (50, 8_950)


def test_what_holds_too_many_values_is_not_read_to_its_end(faults: Faults, small: str) -> None:
    keys = "".join(f"k{number:05}: 1\n" for number in range(90_000))
    assert faults(small + keys) == ["r.yaml:10001: holds more than 10000 values"]

"""Published checkpoints with one thing broken each: that is named, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pipeline.cli.plan import command
from pipeline.models.blocks import WeightTensor
from pipeline.models.header import BITS, HeaderEntry
from pipeline.models.sizes import ModelSizes, config_faults
from pipeline.models.tensors import DTYPES, TensorFiles
from pipeline.plan.lint import Finding, lint, lint_folder, settings_are_dynamic
from pipeline.plan.lint.layouts import SCALES, Layout, layouts_of
from pipeline.plan.model_facts import read_model_facts
from tests.support.models import make_checkpoint, quantize_checkpoint

Tensors = dict[str, tuple[str, tuple[int, ...]]]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 640,
    "max_position_embeddings": 512,
}  # fmt: skip
QWEN = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 64,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 64,
    "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 128,
}  # fmt: skip


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


# name -> config, settings, carrier
CHECKPOINTS: Mapping[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "bf16": (LLAMA, None, ""),
    "fp8 modelopt": (LLAMA, modelopt("FP8", kv_cache_quant_algo="FP8"), "weight"),
    "fp8 rows": (QWEN, compressed({"type": "float", "num_bits": 8, "strategy": "channel"},
                                  {"type": "float", "num_bits": 8, "dynamic": True}), "weight"),
    "fp8 blocks": (DEEPSEEK, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight"),
    "nvfp4 modelopt": (QWEN, modelopt("NVFP4", group_size=16, kv_cache_quant_algo="FP8"), "weight"),
    "nvfp4 compressed": (QWEN, compressed(
        {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group"},
        {"type": "float", "num_bits": 4, "dynamic": "local"}), "weight_packed"),
    "w4a16_nvfp4": (LLAMA, modelopt("W4A16_NVFP4", group_size=16), "weight"),
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, "blocks"),
    "mxfp8": (LLAMA, modelopt("MXFP8"), "weight"),
    "awq modelopt": (LLAMA, modelopt("W4A16_AWQ", group_size=128), "weight"),
    "w4a8 awq": (LLAMA, modelopt("W4A8_AWQ", group_size=128), "weight"),
    "awq": (LLAMA, {"quant_method": "awq", "bits": 4, "group_size": 128}, "qweight"),
    "gptq": (LLAMA, {"quant_method": "gptq", "bits": 4, "group_size": 128}, "qweight"),
    "int4": (LLAMA, compressed({"type": "int", "num_bits": 4, "group_size": 128}), "weight_packed"),
    "int8": (LLAMA, compressed({"type": "int", "num_bits": 8, "strategy": "channel"},
                               {"type": "int", "num_bits": 8, "dynamic": True}), "weight"),
    "smoothquant": (LLAMA, modelopt("W8A8_SQ_PER_CHANNEL"), "weight"),
}  # fmt: skip
QUANTIZED = [name for name, (_, told, _) in CHECKPOINTS.items() if told is not None]


@cache
def described(name: str) -> tuple[ModelSizes, Tensors]:
    """Sizes of a checkpoint, and its tensors as type and shape."""
    config, told, carrier = CHECKPOINTS[name]
    whole = {**config, **({} if told is None else {"quantization_config": told})}
    sizes = ModelSizes.from_config(whole)
    assert sizes is not None, list(map(str, config_faults(whole)))
    found: Tensors = {}
    for weight in (*sizes.weights(), *sizes.draft):
        place = ("" if weight.kind == "lm_head" else "model.") + weight.name
        if "GptOss" in sizes.architecture and weight.copies > 1:
            stack(found, place, weight)
            continue
        for index in range(weight.copies):
            found |= dict(parts_of(place.replace(".experts.0.", f".experts.{index}."), weight, carrier))
    if sizes.kv_cache:
        for layer in range(sizes.layers):
            for letter in "kv":
                found[f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale"] = ("F32", ())
    return sizes, found


def stack(found: Tensors, place: str, weight: WeightTensor) -> None:
    """Experts of gpt-oss: all in one tensor, gate and up joined."""
    joined = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    head, _, rest = place.partition(".experts.0.")
    projection = joined[rest.removesuffix(".bias")]
    name, rows = f"{head}.experts.{projection}", weight.rows * (2 if projection != "down_proj" else 1)
    if rest.endswith("bias"):
        found[f"{name}_bias"] = ("BF16", (weight.copies, rows))
    else:
        found[f"{name}_blocks"] = ("U8", (weight.copies, rows, weight.columns // 32, 16))
        found[f"{name}_scales"] = ("U8", (weight.copies, rows, weight.columns // 32))


def parts_of(
    name: str, weight: WeightTensor, carrier: str
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    layouts = [layout for layout in layouts_of(weight.stored) if layout.carrier == carrier]
    if not layouts:
        is_whole = name.rsplit(".", 1)[-1] in ("bias", "sinks", "e_score_correction_bias")
        shape = (weight.rows,) if weight.columns == 1 else (weight.rows, weight.columns)
        yield name if is_whole else f"{name}.weight", ("BF16", shape)
        return
    (layout,) = layouts
    kind, single = layout.types[0], replace(weight, copies=1)
    yield f"{name}.{carrier}", (kind, (weight.rows, weight.columns * layout.bits // BITS[kind]))
    for names, each in layout.scales.items():
        counts = layout.counts(each, [single])
        yield f"{name}.{names[0]}", (scale_type(layout, names[0], each), (max(counts, default=1),))
    if layout.inputs:
        yield f"{name}.{layout.inputs}", ("F32", ())


def scale_type(layout: Layout, name: str, kind: str) -> str:
    if "zero" in name:
        return "I32"
    if kind == "group" and "nvfp4" in layout.format:
        return "F8_E4M3"
    return "U8" if layout.format.startswith("mx") else "F16" if kind == "group" else "F32"


def judge(name: str, tensors: Tensors, values: Mapping[str, float] | None = None) -> tuple[Finding, ...]:
    """Lint one file of tensors whose numbers are all 1, but those that are given."""
    sizes, told = described(name)[0], CHECKPOINTS[name][1]
    entries, place = [], 0
    # The order of safetensors' own files: wide types first.
    for tensor, (kind, shape) in sorted(tensors.items(), key=lambda pair: (-BITS[pair[1][0]], pair[0])):
        size = math.prod(shape) * BITS[kind] // 8
        entries.append(HeaderEntry(tensor, kind, shape, place, place + size))
        place += size

    def read(_file: str, begin: int, end: int) -> bytes:
        inside = [entry for entry in entries if begin <= entry.begin and entry.end <= end]
        assert sum(tensor.end - tensor.begin for tensor in inside) <= 1 << 20
        content = bytearray(end - begin)
        for tensor in inside:
            value = np.full(tensor.shape, (values or {}).get(tensor.name, 1)).astype(DTYPES[tensor.dtype])
            content[tensor.begin - begin : tensor.end - begin] = value.tobytes()
        return bytes(content)

    dynamic = settings_are_dynamic({"quantization_config": told} if told else {})
    return lint(sizes, {"model.safetensors": entries}, read=read, dynamic_inputs=dynamic)


def scales(name: str) -> list[str]:
    return [
        entry for entry in described(name)[1] if entry.endswith(tuple(SCALES)) and not entry.endswith("zeros")
    ]


def named(findings: tuple[Finding, ...]) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.severity, finding.names) for finding in findings]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_whole_one_has_no_finding(name: str) -> None:
    assert judge(name, described(name)[1]) == ()


one_scale = st.sampled_from(QUANTIZED).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(scales(name)))
)


@given(one_scale)
@settings(max_examples=60, deadline=None)
def test_a_scale_that_is_missing_is_named(chosen: tuple[str, str]) -> None:
    name, scale = chosen
    tensors = {key: value for key, value in described(name)[1].items() if key != scale}
    found = judge(name, tensors)
    assert named(found) == [("error", (scale,))]
    assert found[0].served


@given(one_scale, st.sampled_from([0.0, -1.0, math.nan, math.inf]))
@settings(max_examples=60, deadline=None)
def test_a_scale_that_is_no_scale_is_named(chosen: tuple[str, str], value: float) -> None:
    name, scale = chosen
    kind = described(name)[1][scale][0]
    if kind == "U8":
        value = 255  # of exponents, the only one that is no number
    elif kind == "F8_E4M3" and math.isinf(value):
        value = math.nan
    assert named(judge(name, described(name)[1], {scale: value})) == [("error", (scale,))]


@given(one_scale)
@settings(max_examples=40, deadline=None)
def test_a_scale_of_another_size_is_named(chosen: tuple[str, str]) -> None:
    name, scale = chosen
    kind, _shape = described(name)[1][scale]
    found = judge(name, {**described(name)[1], scale: (kind, (7, 11))})
    is_checked = not scale.endswith(("input_scale", "global_scale", "k_scale", "v_scale")) or scale.endswith(
        "weight_global_scale"
    )
    assert named(found) == ([("error", (scale,))] if is_checked else [])


@pytest.mark.parametrize("name", CHECKPOINTS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_weight_that_is_missing_is_named(name: str, data: st.DataObject) -> None:
    whole = described(name)[1]
    draft = f".layers.{described(name)[0].layers}."
    weight = data.draw(
        st.sampled_from([name for name in whole if name.endswith(".weight") and draft not in name])
    )
    layer = weight.removesuffix("weight")
    lost = {name for name in whole if name.startswith(layer)}
    found = judge(name, {key: value for key, value in whole.items() if key not in lost})
    assert {finding.severity for finding in found} == {"error"}
    # Scales of a layer that is absent are not missed; its bias and scales of the KV cache are.
    absent = {weight} | {tensor for tensor in lost if tensor.endswith((".bias", ".k_scale", ".v_scale"))}
    assert {name for each in found for name in each.names} == absent


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_weight_of_another_type_is_named(name: str) -> None:
    whole = described(name)[1]
    carrier = CHECKPOINTS[name][2]
    weight = next(
        tensor for tensor, (kind, _) in whole.items() if tensor.endswith(carrier) and kind != "BF16"
    )
    found = judge(name, {**whole, weight: ("BF16", (256, 256))})
    assert named(found)[0] == ("error", (weight,))
    assert "is BF16" in found[0].problem


def test_a_layer_that_is_left_out_and_quantized_all_the_same_is_named() -> None:
    whole = described("fp8 modelopt")[1]
    found = judge(
        "fp8 modelopt",
        {**whole, "lm_head.weight": ("F8_E4M3", (640, 256)), "lm_head.weight_scale": ("F32", ())},
    )
    assert named(found) == [("error", ("lm_head.weight",))]
    assert "leave it out" in found[0].expected


def test_layers_for_further_tokens_that_are_absent_are_a_warning() -> None:
    whole = described("fp8 blocks")[1]
    found = judge("fp8 blocks", {key: value for key, value in whole.items() if ".layers.3." not in key})
    assert [finding.severity for finding in found] == ["warning"]
    assert "MTP" in found[0].problem


def test_a_checkpoint_without_any_input_scale() -> None:
    whole = described("nvfp4 modelopt")[1]
    found = judge(
        "nvfp4 modelopt", {key: value for key, value in whole.items() if not key.endswith("input_scale")}
    )
    assert [finding.severity for finding in found] == ["warning"]


def test_names_that_are_not_known_are_not_judged() -> None:
    whole = described("bf16")[1]
    renamed = {key.replace("mlp.up_proj", "mlp.lift"): value for key, value in whole.items()}
    found = judge("bf16", renamed)
    assert {finding.severity for finding in found} == {"not judged"}
    assert {name for finding in found for name in finding.names} == {
        "model.layers.*.mlp.up_proj.weight", "model.layers.*.mlp.lift.weight",
    }  # fmt: skip


def test_values_of_large_scales_are_not_judged() -> None:
    sizes, _ = described("bf16")
    entries = [HeaderEntry("model.layers.0.mlp.up_proj.weight_scale", "F32", (1 << 19,), 0, 4 << 19)]
    found = lint(sizes, {"a": entries}, read=lambda *_: pytest.fail("reads megabytes"))
    assert any(finding.severity == "not judged" and finding.names == (entries[0].name,) for finding in found)


def test_an_index_that_differs_from_the_files() -> None:
    sizes, whole = described("bf16")
    entries = [HeaderEntry(name, kind, shape, 0, 0) for name, (kind, shape) in whole.items()]
    index = dict.fromkeys(whole, "a.safetensors")
    first, second, *_ = whole
    half = {"a.safetensors": entries[1:], "b.safetensors": entries[:1]}
    assert lint(sizes, {"a.safetensors": entries}, index=index) == ()
    assert named(lint(sizes, half, index=index)) == [("error", (first,))]
    assert named(lint(sizes, {"a.safetensors": entries}, index={**index, "x": "a.safetensors"})) == [
        ("error", ("x",))
    ]
    del index[second]
    assert named(lint(sizes, {"a.safetensors": entries}, index=index)) == [("warning", (second,))]
    assert named(lint(sizes, {"a.safetensors": entries, "c": entries[:1]})) == [("error", (first,))]


@pytest.mark.parametrize("form", ["", "fp8", "int4_awq", "w4a8_awq", "int8_sq"])
def test_checkpoints_that_are_made_here_have_no_finding(tmp_path: Path, form: str) -> None:
    folder = make_checkpoint(tmp_path / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    if form:
        folder = quantize_checkpoint(folder, tmp_path / form, form, kv_cache=True)
    assert lint_folder(folder) == ()


@pytest.mark.parametrize("name", ["support-target", "support-draft"])
def test_checkpoints_of_the_recipes_have_no_finding(name: str) -> None:
    assert lint_folder(Path("recipes/checkpoints") / name) == ()


def test_a_broken_checkpoint_is_named_on_the_command_line(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    folder = quantize_checkpoint(source, tmp_path / "org--broken", "fp8", kv_cache=True)
    tensors = {name: np.array(value) for name, value in TensorFiles(folder).items()}
    lost, zero = "model.layers.1.mlp.up_proj.input_scale", "model.layers.0.self_attn.o_proj.weight_scale"
    del tensors[lost]
    tensors[zero] = np.array(0, np.float32)
    save_file(tensors, folder / "model.safetensors")
    done = CliRunner().invoke(command, ["models", str(folder)])
    assert done.exit_code == 2
    assert "org/broken: 2 errors" in done.output
    assert lost in done.output
    assert f"is zero: {zero}" in done.output
    found = json.loads(CliRunner().invoke(command, ["models", str(folder), "--json"]).output)
    assert [finding["names"] for finding in found["models"][0]["findings"]] == [[lost], [zero]]
    faults = read_model_facts(folder).weight_faults
    assert [name in fault for name, fault in zip((lost, zero), faults, strict=True)] == [True, True]
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    assert "bytes long" in CliRunner().invoke(command, ["models", str(folder)]).output

"""`pipeline plan`, as a user calls it: pages, JSON, other hardware, exit codes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.plan import command
from pipeline.cli.render import forecast_errors as accuracy
from pipeline.cli.render.memory import OutputStyle, bar, legend
from pipeline.contracts import gpus
from pipeline.errors import SloMissed, UserError
from pipeline.machine.host import Memory
from pipeline.plan.memory import DeploymentSpec, ModelSpec, plan_memory
from pipeline.prepare import facts
from pipeline.prepare.report_json import schema_text
from pipeline.recipe import load_recipe, packaged

GOLDEN = Path(__file__).parent / "golden"
GIB = 2**30


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a hub, on a machine of 16 GiB, with a store of its own."""
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(facts, "read_memory", lambda: Memory(16 * GIB, 8 * GIB, 0, None))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def as_json(*arguments: str, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    speed = found["performance"]
    missed = code == 0 and speed is not None and speed["meets_slo"] is False
    assert result.exit_code == (SloMissed.exit_code if missed else code), result.output
    return found


@pytest.mark.parametrize("name", ["llama-3.3-70b-fp8", "tiny-cpu"])
def test_pages_are_as_they_were(name: str, tmp_path: Path) -> None:
    """Verdict, steps and memory; write them anew with GOLDEN=1. Names of artifacts depend on what is installed."""
    result = run(name)
    assert result.exit_code in (0, SloMissed.exit_code), result.output
    page = result.stdout.partition("\nspeed on")[0].replace(str(tmp_path), "…")
    page = re.sub(r"headers in \S*/recipes", "headers in …/recipes", re.sub(r"-[0-9a-f]{20}", "-…", page))
    file = GOLDEN / f"plan-{name}.txt"
    if os.environ.get("GOLDEN"):
        file.write_text(page, encoding="utf-8")
    assert page == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(packaged()))
def test_packaged_recipes_are_planned_without_a_network(name: str) -> None:
    whole = as_json(name)
    assert whole["schema"] == 2
    assert whole["verdict"]["memory"] == "fits"
    assert not whole["verdict"]["refused"]
    for rank in whole["memory"]["ranks"]:
        assert sum(line["bytes"] for line in rank["lines"]) == rank["used_bytes"]
        assert rank["used_bytes"] + rank["headroom_bytes"] == whole["memory"]["capacity_bytes"]
        assert all(line["formula"] and line["sources"] for line in rank["lines"])
    assert whole["steps"] is not None or "plan" in whole["unknown"]


@pytest.mark.parametrize(
    "arguments", [("llama-3.1-8b-fp8",), ("llama-3.3-70b-nvfp4", "--set", "runtime.gpu=h100-sxm-80g")]
)
def test_json_is_as_its_schema_says(arguments: tuple[str, ...]) -> None:
    """Fit or not: nothing is missing, and nothing is there that the schema does not name."""
    schema = json.loads(schema_text())
    result = run(*arguments, "--json")
    assert _unlike(json.loads(result.stdout), schema, schema["$defs"]) == []
    assert {"verdict", "steps", "memory", "performance", "findings"} <= set(schema["properties"])


def _unlike(value: Any, schema: dict[str, Any], known: dict[str, Any], where: str = "$") -> list[str]:
    """Where a value is not what its schema names: types, keys and choices, which is all that ours use."""
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        tried = [_unlike(value, member, known, where) for member in schema["anyOf"]]
        return [] if [] in tried else tried[0]
    types: dict[str, Any] = {
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    types |= {"object": dict, "array": list}
    if "type" in schema and not isinstance(value, types[schema["type"]]):
        return [f"{where}: {value!r} is not {schema['type']}"]
    if value not in schema.get("enum", [value]):
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    found: list[str] = []
    if isinstance(value, dict) and "properties" in schema:
        named = schema["properties"]
        found += [f"{where}.{key}: not named" for key in value.keys() - named.keys()]
        found += [f"{where}.{key}: missing" for key in set(schema.get("required", [])) - value.keys()]
        for key in value.keys() & named.keys():
            found += _unlike(value[key], named[key], known, f"{where}.{key}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += _unlike(item, schema["items"], known, f"{where}[{index}]")
    return found


def test_other_hardware_is_tried() -> None:
    small, large = (
        as_json("llama-3.1-8b-fp8", "--set", f"runtime.gpu={name}")
        for name in ("h100-sxm-80g", "h200-sxm-141g")
    )
    assert large["memory"]["sequences"] > small["memory"]["sequences"]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    recipe = ("llama-3.3-70b-fp8", "--set", "runtime.tensor_parallel=1", "--set", "runtime.gpu=l40s-48g")
    whole = as_json(*recipe, code=2)
    assert whole["verdict"]["memory"] == "does not fit"
    assert whole["memory"]["sequences"] == 0
    assert whole["alternatives"]
    for alternative in whole["alternatives"]:
        assert alternative["sequences"] > 0
        planned = as_json(
            *recipe, *(word for override in alternative["overrides"] for word in ("--set", override))
        )
        assert planned["memory"]["sequences"] == alternative["sequences"], alternative["overrides"]
    page = run(*recipe)
    assert page.exit_code == 2
    assert "does not fit: 27." in page.stdout
    assert "what would hold more" in page.stdout
    assert "] !" in page.stdout


def test_findings_of_preflight_refuse_and_are_shown_beside_the_memory() -> None:
    result = run("llama-3.1-8b-fp8", "--set", "runtime.gpu=a100-sxm-80g")
    assert result.exit_code == 2
    assert "[sm.fp8]" in result.stdout
    assert "KV cache holds" in result.stdout
    assert "steps are not known" in result.stdout


@pytest.mark.parametrize("sm", [75, 110])
def test_a_gpu_of_a_generation_that_is_not_measured(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is planned at once; speed is not, until rates and generation are given, and then without a bracket."""
    known = gpus._data()
    new = {
        "name": "x1-80g",
        "chip": "X1",
        "architecture": "X",
        "sm": sm,
        "memory_gib": 80,
        "driver_mib": 81559,
    }
    data = {**known, "gpus": [*known["gpus"], new]}
    monkeypatch.setattr(gpus, "_data", lambda: data)
    recipe = ("phi-4-fp8", "--set", "runtime.gpu=x1-80g", "--set", "quantization={format: none}")
    found = json.loads(run(*recipe, "--json").stdout)
    assert found["memory"] is not None
    assert "peak rates are not known" in found["unknown"]["performance"]
    assert "speed is not known: GPU x1-80g" in run(*recipe).stdout
    new["rates"] = next(device["rates"] for device in known["gpus"] if device["name"] == "h100-sxm-80g")
    found = json.loads(run(*recipe, "--json").stdout)
    assert "is of no known generation" in found["unknown"]["performance"]
    data["generations"] = [
        *known["generations"],
        {"sm": sm, "constants": "hopper", "links": "nvlink", "measured": False},
    ]
    speed = json.loads(run(*recipe, "--json").stdout)["performance"]
    assert speed["itl_ms"]["value"] > 0
    assert speed["tokens_per_s"]["low"] is None
    assert any("on x1-80g" in warning for warning in speed["warnings"])


GPT_OSS = (
    "llama-3.3-70b-nvfp4", "--set", "runtime.gpu=h200-sxm-141g", "--set", "model={source: 'hf:openai/gpt-oss-120b'}",
    "--set", "quantization={}", "--set", "runtime.tensor_parallel=1",
)  # fmt: skip


def test_experts_in_mxfp4_are_understood() -> None:
    """gpt-oss-120b is served on one H200, and how fast that is nothing here was compared with."""
    whole = as_json(*GPT_OSS)
    (rank,) = whole["memory"]["ranks"]
    assert sum(line["bytes"] for line in rank["lines"] if line["group"] == "weights") == 65_248_815_744
    assert whole["verdict"]["memory"] == "fits"
    assert whole["performance"]["tokens_per_s"]["low"] is None
    assert whole["performance"]["ttft_ms"]["high"] is None
    for said in (
        "sparse models in mxfp4 on h200-sxm-141g",
        "experts in MXFP4",
        "buffers of models with experts",
    ):
        assert any(said in warning for warning in whole["warnings"]), said
    assert [finding["rule"] for finding in whole["findings"]] == ["sm.listed"]  # of MXFP4 on Hopper
    page = run(*GPT_OSS).stdout
    assert page.count("warning: ") == len(whole["warnings"]) + 1


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 32, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def of_config(folder: Path, weights: bytes = b"", **config: Any) -> tuple[str, ...]:
    """A recipe of a model that only its config.json, and perhaps its files, tell of; on a GPU that is too small."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL | config))
    if weights:
        (folder / "model/model.safetensors").write_bytes(weights)
    source = f"model={{source: 'local:{folder / 'model'}'}}"
    changes = (source, "quantization={}", "runtime.tensor_parallel=1", "runtime.gpu=rtx-4090-24g")
    return ("llama-3.3-70b-nvfp4", *(word for change in changes for word in ("--set", change)))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architectures = ['FalconForCausalLM']: is not known"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "quantization_config.config_groups",
        ),
        (
            {"quantization_config": {"quant_method": "quanto"}},
            "quant_method = quanto: is not known (one of modelopt",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
            "quantization_config.quantized_layers",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "quantization_config.bits = 8"),
    ],
)
def test_what_is_not_understood_is_not_judged(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Figures of a guess would refuse it: it would not fit."""
    recipe = of_config(tmp_path, **config)
    whole = json.loads(run(*recipe, "--json").stdout)
    assert whole["memory"] is whole["verdict"]["memory"] is whole["performance"] is None
    assert whole["alternatives"] == []
    assert named in whole["unknown"]["memory"]
    assert "memory.fits" not in {finding["rule"] for finding in whole["findings"]}
    page = run(*recipe).stdout
    assert page.splitlines()[1].startswith("whether it fits is not known")
    assert "memory is not known: the target is a " in page
    compared = run("compare", *recipe, "--gpus", "h100-sxm")
    assert isinstance(compared.exception, UserError)
    assert named in str(compared.exception)


def test_latent_attention_is_counted_and_said_to_be_unchecked(tmp_path: Path) -> None:
    whole = json.loads(run(*of_config(tmp_path, **LATENT), "--json").stdout)
    assert whole["memory"]["token_bytes"] == {"target": 32 * (512 + 64) * 2}
    assert any("multi-head latent attention is counted from its sizes" in said for said in whole["warnings"])


@pytest.mark.parametrize(("gib", "judged"), [(3.0, False), (3.85, True), (8.0, True)])
def test_counted_bytes_are_held_against_the_files(gib: float, judged: bool, tmp_path: Path) -> None:
    """A published format is the size that its files have: less than is counted is not understood, more is said."""
    size = int(gib * GIB)
    header = json.dumps({"all": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    awq = {"quantization_config": {"quant_method": "awq"}}
    recipe = of_config(tmp_path, len(header).to_bytes(8, "little") + header, **awq, vocab_size=32000)
    whole = json.loads(run(*recipe, "--json").stdout)
    told = [*whole["warnings"], whole["unknown"].get("memory", "")]
    assert (whole["memory"] is not None) == judged
    assert any("the checkpoint is not understood" in said for said in told) == (gib != 3.85)


def test_a_gpu_that_is_not_known() -> None:
    result = run("llama-3.1-8b-fp8", "--set", "runtime.gpu=h100")
    assert result.exit_code == 2
    assert "not known" in result.stdout


def test_the_model_s_errors_are_printed() -> None:
    result = run("accuracy")
    assert result.exit_code == 0
    found = re.search(r"24 points: median error (\S+)%, worst (\S+)%", result.stdout)
    assert found
    assert float(found[1]) <= 3
    assert float(found[2]) <= 6
    parts = json.loads(accuracy.accuracy_page(as_json=True))
    assert len(parts["capacity"]["figures"]) == 24


@pytest.mark.parametrize("gib", [8, 12, 24, 80, 280])
@pytest.mark.parametrize("cells", [10, 40, 200])
def test_a_bar_is_as_long_as_it_is_to_be(gib: int, cells: int) -> None:
    from pipeline.contracts.models import known_model

    sizes = known_model("meta-llama/Llama-3.1-8B")
    assert sizes is not None
    plan = plan_memory(DeploymentSpec("gpu", gib * GIB, (ModelSpec("target", sizes),), 1000, 8))
    rank = plan.ranks[0]
    drawn = bar(rank, cells, OutputStyle(100, colour=False))
    assert (drawn.endswith("!")) == (rank.headroom < 0)
    inner = drawn.partition("]")[0].removeprefix("[")
    assert abs(len(inner) - cells) <= 2
    assert ("." in inner) == (rank.headroom > 0 and len(inner) >= cells and inner.endswith("."))
    assert all(
        word in legend(plan.ranks, OutputStyle(100, colour=False)) for word in ("weights", "activations")
    )


def test_a_size_is_written_as_a_recipe_and_a_missed_slo_has_a_code_of_its_own(tmp_path: Path) -> None:
    asked = ("llama-3.1-8b-fp8", "--prompt-tokens", "500", "--output-tokens", "200", "--rate", "60")
    file = tmp_path / "sized.yaml"
    result = run(*asked, "--output", str(file), "--price", "h100-sxm-80g=2")
    assert result.exit_code == 0, result.output
    sized = load_recipe(file, ())
    found = as_json(*asked, "--price", "h100-sxm-80g=2")["performance"]["rate"]
    assert sized.kubernetes.min_replicas == found["replicas"] > 1
    assert f"{found['replicas']} replicas, {found['gpus']} GPUs" in result.stdout
    again = run(*asked, "--output", str(file))
    assert "exists" in str(again.exception)
    late = run(*asked, "--set", "slo.itl_p95_ms=0.5")
    assert late.exit_code == SloMissed.exit_code
    assert "no number of replicas" in late.stdout

"""What `build` leaves for the pytorch runtime, and that it is judged by the files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError, StageError
from pipeline.progress import Silent
from pipeline.runtimes.pytorch import artifact
from pipeline.runtimes.pytorch.model_repository import Engines, LlmapiSettings, package_llmapi
from pipeline.triton.deployment import Deployment
from tests.support.hub_configs import hub_configs
from tests.support.llmapi import LIMITS, requirements, tiny

ARGUMENTS: dict[str, Any] = {"model": "checkpoint", "backend": "pytorch", "max_batch_size": 8}
DETAILS = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny(tmp_path / "source")


def quantized(source: Path, **changes: object) -> None:
    details = {**DETAILS, "quantization": {**DETAILS["quantization"], **changes}}
    (source / "hf_quant_config.json").write_text(json.dumps(details))


def test_the_weights_are_not_there_twice(source: Path, tmp_path: Path) -> None:
    (source / "manifest.json").write_text("{}")
    (source / "inference").mkdir()
    (source / "inference" / "note.txt").write_text("x")
    size = artifact.write_checkpoint(source, tmp_path / "made")
    made = tmp_path / "made" / "checkpoint"
    assert os.path.samefile(made / "model.safetensors", source / "model.safetensors")
    assert (made / "inference" / "note.txt").is_file()
    assert not (made / "manifest.json").exists()
    assert size["files"] == sum(path.is_file() for path in made.rglob("*"))


def test_an_unquantized_checkpoint(source: Path, tmp_path: Path) -> None:
    artifact.write_checkpoint(source, tmp_path)
    assert artifact.judge_checkpoint(tmp_path, "none", "auto") == ("none", None)


@pytest.mark.parametrize(
    ("repo", "form", "kv_cache"),
    [
        ("openai/gpt-oss-20b", "mxfp4", None),
        ("deepseek-ai/DeepSeek-R1", "fp8_block", None),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "nvfp4", "fp8"),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", "nvfp4", "fp8"),
    ],
)
def test_a_checkpoint_that_is_published_quantized(
    source: Path, tmp_path: Path, repo: str, form: str, kv_cache: str | None
) -> None:
    entry = hub_configs()[repo]
    (source / "config.json").write_text(json.dumps(entry["config"]))
    if "hf_quant_config" in entry:
        (source / "hf_quant_config.json").write_text(json.dumps(entry["hf_quant_config"]))
    artifact.write_checkpoint(source, tmp_path)
    assert artifact.judge_checkpoint(tmp_path, "none", "auto") == (form, kv_cache)


def test_a_quantization_that_nobody_knows_is_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp3"}})
    )
    artifact.write_checkpoint(source, tmp_path)
    with pytest.raises(StageError, match=r"quantization_config\.quant_method = fp3: is not known"):
        artifact.judge_checkpoint(tmp_path, "none", "auto")


@pytest.mark.parametrize(
    ("format", "kv_cache", "changes", "message"),
    [
        ("fp8", "auto", {}, None),
        ("fp8", "fp8", {"kv_cache_quant_algo": "FP8"}, None),
        ("auto", "auto", {"quant_algo": "MIXED_PRECISION"}, None),
        ("nvfp4", "auto", {}, r"checkpoint is fp8, not nvfp4"),
        ("fp8", "fp8", {}, r"its KV cache is not quantized, but quantization\.kv_cache is fp8"),
        ("fp8", "auto", {"kv_cache_quant_algo": "FP8"}, r"its KV cache is FP8, but quantization\.kv_cache is auto"),
    ],
)  # fmt: skip
def test_a_quantized_checkpoint_is_what_the_recipe_says(
    source: Path, tmp_path: Path, format: str, kv_cache: str, changes: dict[str, object], message: str | None
) -> None:
    quantized(source, **changes)
    artifact.write_checkpoint(source, tmp_path)
    if message is None:
        artifact.judge_checkpoint(tmp_path, format, kv_cache)
    else:
        with pytest.raises(StageError, match=message):
            artifact.judge_checkpoint(tmp_path, format, kv_cache)


@pytest.mark.parametrize("format", ["fp8", "auto"])
def test_a_quantized_checkpoint_says_so_where_tensorrt_llm_looks(
    source: Path, tmp_path: Path, format: str
) -> None:
    artifact.write_checkpoint(source, tmp_path)
    with pytest.raises(StageError, match=r"no hf_quant_config\.json, so TensorRT-LLM would take it as"):
        artifact.judge_checkpoint(tmp_path, format, "auto")


def test_files_that_are_missing_or_torn(source: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    artifact.write_checkpoint(source, torn)
    weights = torn / "checkpoint" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(StageError, match="no weights"):
        artifact.judge_checkpoint(torn, "none", "auto")
    weights.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="bytes long, but its header describes"):
        artifact.judge_checkpoint(torn, "none", "auto")
    (torn / "checkpoint" / "config.json").unlink()
    with pytest.raises(StageError, match=r"no config\.json"):
        artifact.judge_checkpoint(torn, "none", "auto")


def test_arguments_are_read_back(tmp_path: Path) -> None:
    artifact.write_arguments("1.2.1", ARGUMENTS, tmp_path)
    artifact.judge_arguments("1.2.1", ARGUMENTS, tmp_path)
    assert artifact.read_arguments(tmp_path) == ARGUMENTS
    assert list(artifact.read_arguments(tmp_path)) == list(ARGUMENTS)
    with pytest.raises(StageError, match="does not say what was meant"):
        artifact.judge_arguments("1.2.1", ARGUMENTS | {"max_batch_size": 9}, tmp_path)


def test_arguments_that_upstream_would_refuse(tmp_path: Path) -> None:
    wrong = ARGUMENTS | {"sampler_type": "auto"}
    artifact.write_arguments("1.0.0", wrong, tmp_path)
    with pytest.raises(StageError, match=r"sampler_type = auto: is not an argument in TensorRT-LLM 1\.0\.0"):
        artifact.judge_arguments("1.0.0", wrong, tmp_path)
    (tmp_path / "llm_args.yaml").write_text("- 1")
    with pytest.raises(StageError, match="holds no settings"):
        artifact.read_arguments(tmp_path)
    (tmp_path / "llm_args.yaml").unlink()
    with pytest.raises(StageError, match=r"no llm_args\.yaml"):
        artifact.read_arguments(tmp_path)


def test_a_config_whose_decoder_lies_inside_is_packaged(source: Path, tmp_path: Path) -> None:
    """As models have it that take images, too."""
    config = json.loads((source / "config.json").read_text())
    inner = {key: config.pop(key) for key in list(config) if key not in ("architectures", "eos_token_id")}
    (source / "config.json").write_text(json.dumps({**config, "text_config": inner}))
    sources, needs = Engines(source, None, source), requirements()
    package_llmapi(
        "tiny", LlmapiSettings("1.2.1"), ARGUMENTS, LIMITS, needs, sources, tmp_path / "package", Silent()
    )
    assert Deployment.load(tmp_path / "package").end_id == 1

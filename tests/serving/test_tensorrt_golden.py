"""Configs of `tensorrt` repositories, as text; `PIPELINE_WRITE_GOLDEN=1 pytest` writes them after a change.

From a recipe and engine folders as the builder leaves them. Versions between which no name changed share a folder, and
every version is compared with its own. For all formats, what must hold is proven.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipeline.contracts.inflight_batcher import check, versions
from pipeline.models.token_ids import TokenIds
from pipeline.recipe import Recipe, load_recipe
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.model_repository import TensorRTSettings, engine_models, launch_spec
from pipeline.runtimes.tensorrt.triton_settings import engine_settings
from pipeline.triton.config import parameters_of, parse, render
from pipeline.triton.deployment import DeploymentLimits
from pipeline.triton.text_models import OURS
from tests.support.tensorrt import DRAFTED, make_engine

GOLDEN = Path(__file__).parent / "golden" / "tensorrt"
IDS = TokenIds(end=128001, pad=128001, stop=(128008, 128009), vocab_size=128256)
LIMITS = DeploymentLimits(
    max_input_tokens=8192, max_output_tokens=1024, max_concurrency=64, max_draft_tokens=5
)
GIB = 2**30

FORMATS = ("none", "fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4")


def recipe(version: str, quantization: str, size: int, draft: bool) -> Recipe:
    calibrated = f"quantization={{format: {quantization}, calibration: {{dataset: support}}}}"
    overrides = [
        f"runtime.version={version}",
        f"runtime.tensor_parallel={size}",
        "quantization={format: none}" if quantization == "none" else calibrated,
        *(DRAFTED if draft else ()),
    ]
    return load_recipe("llama-3.1-8b-fp8", overrides)


@cache
def engine(version: str, quantization: str, size: int, max_draft_len: int) -> EngineFolder:
    """As built; its plans are given the size that they would have."""
    kv_cache = "FP8" if quantization in ("fp8", "w4a8_awq") else None
    with TemporaryDirectory() as folder:
        path = make_engine(
            Path(folder) / "engine", version=version, quantization=quantization, kv_cache=kv_cache,
            tensor_parallel=size, max_draft_len=max_draft_len, vocab_size=IDS.vocab_size,
        )  # fmt: skip
        return replace(EngineFolder.read(path), rank_bytes=(16 * GIB // size,) * size)


def settings(version: str, quantization: str, size: int, draft: bool) -> TensorRTSettings:
    return engine_settings(
        recipe(version, quantization, size, draft),
        engine(version, quantization, size, 5 if draft else 0),
        engine(version, "none", 1, 0) if draft else None,
        80 * GIB,
    )


def assert_golden(folder: Path, configs: tuple[ModelConfig, ...], launch: str) -> None:
    files = {f"{config.name}/config.pbtxt": render(config) for config in configs} | {"launch.json": launch}
    for name, text in files.items():
        path = folder / name
        if os.environ.get("PIPELINE_WRITE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, path
    have = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert have == set(files)


def launch(chosen: TensorRTSettings) -> str:
    spec = launch_spec(chosen, LIMITS, IDS, 16 * GIB)
    return json.dumps(spec.model_dump(mode="json"), indent=2) + "\n"


@pytest.mark.parametrize("version", versions())
def test_fp8_on_two_gpus_with_a_draft(version: str) -> None:
    chosen = settings(version, "fp8", 2, True)
    assert_golden(GOLDEN / "1.0-fp8-tp2-draft", engine_models(chosen, IDS), launch(chosen))


@pytest.mark.parametrize("version", versions())
def test_int4_awq_on_one_gpu(version: str) -> None:
    chosen = settings(version, "int4_awq", 1, False)
    assert_golden(GOLDEN / "1.0-int4_awq-tp1", engine_models(chosen, IDS), launch(chosen))


@pytest.mark.parametrize(
    ("quantization", "size", "draft"),
    [*((quantization, 4, True) for quantization in FORMATS), ("fp8", 1, False), ("fp8", 4, False)],
)
def test_every_format(quantization: str, size: int, draft: bool) -> None:
    chosen = settings("1.2.1", quantization, size, draft)
    configs = {config.name: config for config in engine_models(chosen, IDS)}
    for name, config in configs.items():
        assert parse(render(config)) == config
        contract, ours = ("tensorrt_llm", ()) if config.backend == "tensorrtllm" else (name, OURS)
        assert check("1.2.1", contract, parameters_of(config), ours) == []
    target = parameters_of(configs["tensorrt_llm"])
    assert target["gpu_device_ids"] == ",".join(map(str, range(size)))
    assert ("tensorrt_llm_draft" in configs) == draft
    spec = launch_spec(chosen, LIMITS, IDS, 16 * GIB)
    assert spec.mode == ("orchestrator" if draft else "leader" if size > 1 else "single")
    assert spec.world_size == size
    if draft:
        other = parameters_of(configs["tensorrt_llm_draft"])
        assert other["gpu_device_ids"] == "0"
        key = "max_tokens_in_paged_kv_cache"
        assert target[key] == other[key]
        assert int(target[key]) >= 9216

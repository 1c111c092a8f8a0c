"""A package of TensorRT-LLM engines on disk: whole, proven, without a second copy of the plans."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds, token_ids
from pipeline.progress import Silent
from pipeline.runtimes import Engines
from pipeline.runtimes.tensorrt.model_repository import (
    EngineModelSettings,
    TensorRTSettings,
    engine_models,
    launch_spec,
    package_engines,
    xgrammar_tokenizer_info,
)
from pipeline.triton.config import parameters_of, parse
from pipeline.triton.deployment import Deployment, DeploymentLimits, Requirements
from pipeline.triton.repository import content_digest, verify
from tests.support import CHECKPOINTS
from tests.support.tensorrt import make_engine

TOKENIZER = CHECKPOINTS / "support-target"
LIMITS = DeploymentLimits(
    max_input_tokens=8192, max_output_tokens=1024, max_concurrency=64, max_draft_tokens=5
)
REQUIREMENTS = Requirements(
    tensorrt_llm="1.2.1", tensorrt="10.14.1", image="nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
    driver="580", gpu="h100-sxm-80g", sm=90, gpus=2,
)  # fmt: skip
SETTINGS = TensorRTSettings(
    version="1.2.1",
    target=EngineModelSettings(gpus=(0, 1), memory_fraction=0.8, max_kv_tokens=65536),
    draft=EngineModelSettings(gpus=(0,), memory_fraction=0.3, max_kv_tokens=65536),
    max_concurrency=64,
    kv_cache_reuse=True,
    chunked_context=True,
    policy="guaranteed_no_evict",
)
ALONE = replace(SETTINGS, draft=None)
ENGINES = ("tensorrt_llm", "tensorrt_llm_draft")


def sources(folder: Path, *, draft: bool = True, **target: Any) -> Engines:
    return Engines(
        target=make_engine(folder / "target", tensor_parallel=2, **target),
        draft=make_engine(folder / "draft") if draft else None,
        tokenizer=TOKENIZER,
    )


def package(into: Path, have: Engines, settings: TensorRTSettings = SETTINGS) -> Path:
    package_engines("support", settings, LIMITS, REQUIREMENTS, 2048, have, into, Silent())
    return into


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    return package(folder / "package", sources(folder))


def test_each_model_has_all_that_it_needs(packaged: Path) -> None:
    repository = packaged / "model_repository"
    files = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    assert {
        "tensorrt_llm/1/engine/config.json",
        "tensorrt_llm/1/engine/rank0.engine",
        "tensorrt_llm/1/engine/rank1.engine",
        "tensorrt_llm_draft/1/engine/config.json",
        "tensorrt_llm_draft/1/engine/rank0.engine",
        "preprocessing/1/tokenizer/tokenizer.json",
        "postprocessing/1/tokenizer/tokenizer.json",
        "tensorrt_llm_bls/1/tokenizer/chat_template.jinja",
        "tensorrt_llm_bls/1/shared/prompts.py",
        "ensemble/1/.keep",
    } <= files
    assert not any(file.startswith("tensorrt_llm/1/") and file.endswith(".py") for file in files)
    assert not any("xgrammar" in file for file in files), "guided decoding is off"
    for model, source in (("tensorrt_llm", "target"), ("tensorrt_llm_draft", "draft")):
        plan = packaged / f"model_repository/{model}/1/engine/rank0.engine"
        assert os.path.samefile(plan, packaged.parent / source / "rank0.engine")


def test_managed_weights_and_the_quantization_of_each_layer_travel_along(tmp_path: Path) -> None:
    have = sources(tmp_path, draft=False)
    (have.target / "rank0_managed_weights.safetensors").write_bytes(b"weights")
    (have.target / "quant_cfg.json").write_text("{}")
    engine = package(tmp_path / "package", have, ALONE) / "model_repository/tensorrt_llm/1/engine"
    assert (engine / "rank0_managed_weights.safetensors").read_bytes() == b"weights"
    assert (engine / "quant_cfg.json").is_file()


def test_the_deployment_says_what_it_needs_and_how_it_starts(packaged: Path) -> None:
    deployment = Deployment.load(packaged)
    assert deployment.runtime == "tensorrt"
    assert deployment.entry_model == "tensorrt_llm_bls"
    assert deployment.models[-1] == "tensorrt_llm_draft"
    assert deployment.requirements == REQUIREMENTS
    assert deployment.launch.mode == "orchestrator"
    assert deployment.launch.world_size == 2
    assert deployment.launch.engine_models == ("tensorrt_llm", "tensorrt_llm_draft")
    assert deployment.launch.gpu_device_ids == {"tensorrt_llm": ((0, 1),), "tensorrt_llm_draft": ((0,),)}
    assert deployment.versions["tensors"] == "1.2.1"
    assert deployment.digest == content_digest(packaged / "model_repository")
    assert (deployment.end_id, deployment.stop_token_ids) == (5, (2,))


@pytest.mark.parametrize(
    ("gpus", "draft", "mode"), [(1, False, "single"), (2, False, "leader"), (8, True, "orchestrator")]
)
def test_how_it_starts_follows_from_the_engines(gpus: int, draft: bool, mode: str) -> None:
    chosen = replace(
        SETTINGS if draft else ALONE, target=EngineModelSettings(gpus=tuple(range(gpus)), memory_fraction=0.9)
    )
    spec = launch_spec(chosen, LIMITS, TokenIds(2, 0, (), 128256), 64 * 2**30)
    assert (spec.mode, spec.world_size, spec.weights_gib) == (mode, gpus, 64.0)
    assert len(spec.gpu_device_ids) == len(spec.engine_models) == 1 + draft


def test_shared_memory_grows_with_the_tensors_in_flight() -> None:
    ids = TokenIds(2, 0, (), 128256)
    # 64 requests of 12 * 9216 + 4 * 128256 bytes
    assert launch_spec(ALONE, LIMITS, ids, 0).shm_mib == 3 * 64 + 39
    many = LIMITS.model_copy(update={"max_concurrency": 2048})
    assert launch_spec(ALONE, many, ids, 0).shm_mib > 1024


@pytest.mark.parametrize("missing", ["config.json", "rank1.engine"])
def test_an_engine_with_a_file_missing_is_refused(tmp_path: Path, missing: str) -> None:
    have = sources(tmp_path)
    (have.target / missing).unlink()
    with pytest.raises(StageError, match=f"target: no {missing}"):
        package(tmp_path / "package", have)


def test_a_value_that_the_backend_would_not_read_is_refused(tmp_path: Path) -> None:
    wrong = replace(ALONE, target=EngineModelSettings(gpus=(0, 1), memory_fraction=1.5))
    with pytest.raises(
        StageError,
        match=r"1\.2\.1 would not load .*kv_cache_free_gpu_mem_fraction = 1\.5: must be a number above 0",
    ):
        package(tmp_path / "package", sources(tmp_path, draft=False), wrong)


def test_what_does_not_read_back_is_found(packaged: Path, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    shutil.copytree(packaged / "model_repository", repository)
    configs = engine_models(SETTINGS, token_ids(TOKENIZER, 2048))
    verify(repository, configs)
    shutil.rmtree(repository / "tensorrt_llm_draft/1/engine")
    path = "/deployment/model_repository/tensorrt_llm_draft/1/engine"
    with pytest.raises(
        StageError, match=f"tensorrt_llm_draft: parameter gpt_model_path = {path}: no such file or folder"
    ):
        verify(repository, configs)


def test_guided_decoding_is_the_targets_and_has_the_tokenizers_facts(tmp_path: Path) -> None:
    """The file is what upstream's script writes of the same tokenizer, but that every end is a stop token."""
    made = package(tmp_path / "package", sources(tmp_path), replace(SETTINGS, guided_decoding=True))
    repository = made / "model_repository"
    configs = {name: parse((repository / name / "config.pbtxt").read_text()) for name in ENGINES}
    keys = ("guided_decoding_backend", "xgrammar_tokenizer_info_path")
    held, free = ([parameters_of(configs[name])[key] for key in keys] for name in ENGINES)
    file = "model_repository/tensorrt_llm/1/xgrammar_tokenizer_info.json"
    assert (held, free) == (["xgrammar", f"/deployment/{file}"], ["", ""])
    info = json.loads((made / file).read_text())
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    by_id = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda pair: pair[1])
    assert info["encoded_vocab"] == [token for token, _ in by_id]
    assert Tokenizer.from_str(info["tokenizer_str"]).get_vocab() == tokenizer.get_vocab()
    ids = token_ids(TOKENIZER, 2048)
    assert info["stop_token_ids"] == [ids.end, *ids.stop]
    assert Deployment.load(made).guided_decoding


def test_ids_with_gaps_keep_their_places(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 3}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    info = json.loads(xgrammar_tokenizer_info(tmp_path, TokenIds(end=3, pad=3, stop=(0,), vocab_size=4)))
    assert info["encoded_vocab"] == ["a", "", "", "b"]

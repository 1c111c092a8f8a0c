"""A package of the pytorch runtime on disk: golden config by version, self-contained, judged before it is published."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.contracts import llm_args
from pipeline.errors import StageError, UserError
from pipeline.progress import Silent
from pipeline.runtimes import Engines
from pipeline.runtimes.pytorch.model_repository import (
    LlmapiSettings,
    llmapi_model,
    model_yaml,
    package_llmapi,
)
from pipeline.serving.launch_gpu import launch_faults
from pipeline.triton.config import parameters_of, parse, render
from pipeline.triton.deployment import Deployment
from pipeline.triton.repository import content_digest
from tests.support.llmapi import ARGUMENTS, LIMITS, package, requirements, tiny

GOLDEN = Path(__file__).parent / "golden" / "llmapi"
SPECULATION = {
    "disable_overlap_scheduler": True,
    "speculative_config": {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "draft"},
}


def golden(name: str, text: str) -> None:
    """`PIPELINE_WRITE_GOLDEN=1 pytest` writes the file after a change."""
    path = GOLDEN / name
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("version", llm_args.versions())
def test_the_config_of_each_version(version: str) -> None:
    config = llmapi_model(LlmapiSettings(version, ranks=2))
    text = render(config)
    golden(f"{version}/config.pbtxt", text)
    assert parse(text) == config
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled
    assert "decoupled: true" in text


def test_whether_it_is_decoupled_stands_in_both_files() -> None:
    settings = LlmapiSettings("1.2.1", decoupled=False)
    assert "decoupled" not in render(llmapi_model(settings))
    assert model_yaml(settings, ARGUMENTS)["triton_config"]["decoupled"] is False


def test_several_instances_share_the_gpus() -> None:
    settings = LlmapiSettings("1.3.0rc29", ranks=2, instances=3)
    config = llmapi_model(settings)
    assert parameters_of(config)["gpu_device_ids"] == "0,1;2,3;4,5"
    assert config.instance_group[0].count == 3
    golden("1.3.0rc29/config-3-instances.pbtxt", render(config))
    with pytest.raises(
        UserError, match=r"runtime\.instances = 2: TensorRT-LLM 1\.2\.1 has one instance only"
    ):
        llmapi_model(LlmapiSettings("1.2.1", instances=2))


def test_the_models_own_settings_stand_in_model_yaml_too() -> None:
    made = model_yaml(LlmapiSettings("1.2.1", max_open_requests=12), ARGUMENTS)
    assert made["triton_config"] == {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": 100,
        "max_open_requests": 12,
        "ignored_sampling": ["presence_penalty", "frequency_penalty"],
    }
    assert {key: value for key, value in made.items() if key != "triton_config"} == ARGUMENTS


def test_a_package_has_all_that_it_needs(tmp_path: Path) -> None:
    made = package(tmp_path, draft=True, **SPECULATION)
    model = made / "model_repository" / "tensorrt_llm"
    version = model / "1"
    assert {path.name for path in (made / "model_repository").iterdir()} == {"tensorrt_llm"}
    for name in (
        "model.py",
        "llm_request_manager.py",
        "shared/tensors.py",
        "model.yaml",
        "tokenizer/tokenizer.json",
    ):
        assert (version / name).is_file(), name
    for role in ("checkpoint", "draft"):
        original = tmp_path / ("source" if role == "checkpoint" else "draft-source") / "model.safetensors"
        assert os.path.samefile(version / role / "model.safetensors", original)
    assert not [path for path in made.rglob("*") if "__pycache__" in path.parts or path.is_symlink()]
    content = yaml.safe_load((version / "model.yaml").read_text())
    assert content["model"] == "checkpoint"
    assert content["speculative_config"]["speculative_model"] == "draft"
    golden("1.2.1/model.yaml", (version / "model.yaml").read_text())
    golden("1.2.1/files.txt", "\n".join(sorted(
        path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file() and path.parent.name != "shared"
    )) + "\n")  # fmt: skip


def test_the_deployment(tmp_path: Path) -> None:
    made = package(tmp_path, LlmapiSettings("1.3.0rc29", ranks=2, instances=2), tensor_parallel_size=2)
    deployment = Deployment.load(made)
    assert (deployment.entry_model, deployment.runtime) == ("tensorrt_llm", "pytorch")
    assert (deployment.launch.mode, deployment.launch.world_size) == ("llmapi", 2)
    assert deployment.launch.gpu_device_ids == {"tensorrt_llm": ((0, 1), (2, 3))}
    assert deployment.requirements is not None
    assert deployment.requirements.gpus == 4
    assert (made / deployment.tokenizer_dir / "chat_template.jinja").is_file()
    assert (deployment.end_id, deployment.pad_id) == (1, 1)
    assert deployment.digest == content_digest(made / "model_repository")
    assert launch_faults(deployment) == []
    weights = (made / "model_repository/tensorrt_llm/1/checkpoint/model.safetensors").stat().st_size
    assert deployment.launch.weights_gib == round(2 * weights / 2**30, 3)


def sources(folder: Path) -> Engines:
    checkpoint = tiny(folder)
    return Engines(checkpoint, None, checkpoint)


def refusal(made: Engines, into: Path, **arguments: Any) -> str:
    settings = LlmapiSettings("1.2.1")
    with pytest.raises(StageError) as caught:
        package_llmapi(
            "x", settings, ARGUMENTS | arguments, LIMITS, requirements(), made, into / "package", Silent()
        )
    return str(caught.value)


def test_what_tensorrt_llm_would_refuse_is_not_packaged(tmp_path: Path) -> None:
    made = sources(tmp_path / "a")
    assert "max_batchsize = 1: is not an argument" in refusal(made, tmp_path / "1", max_batchsize=1)
    assert "draft: no such folder beside model.yaml" in refusal(made, tmp_path / "2", **SPECULATION)
    assert "elsewhere: no such folder" in refusal(made, tmp_path / "3", model="elsewhere")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_checkpoint_with_a_file_missing_is_refused(tmp_path: Path, missing: str) -> None:
    made = sources(tmp_path / "a")
    (made.target / missing).unlink()
    assert f"no {missing}" in refusal(made, tmp_path)


def test_it_is_the_same_when_it_is_made_again(tmp_path: Path) -> None:
    first, second = package(tmp_path / "1"), package(tmp_path / "2")
    assert content_digest(first) == content_digest(second)
    moved = tmp_path / "moved"
    shutil.copytree(first, moved)
    assert content_digest(moved) == content_digest(first)
    for path in moved.rglob("*"):
        if path.suffix in {".pbtxt", ".json", ".py", ".yaml"}:
            assert str(tmp_path) not in path.read_text(encoding="utf-8"), path

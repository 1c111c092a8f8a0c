"""A package on disk: whole, self-contained, movable, and the same when it is made again."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput, StageError
from pipeline.models.token_ids import token_ids
from pipeline.progress import Silent
from pipeline.runtimes import Engines
from pipeline.runtimes.cpu.model_repository import CpuSettings, cpu_models, package_cpu
from pipeline.serving.server import TritonServer
from pipeline.triton.config import parameters_of, parse
from pipeline.triton.deployment import Deployment
from pipeline.triton.repository import content_digest, verify
from tests.support.served import CHECKPOINTS, SETTINGS, package_support_pair

MODELS = {"preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"}


def sources(package: Path) -> Engines:
    return Engines(package.parent / "target", None, CHECKPOINTS / "support-target")


def test_each_model_has_all_that_it_needs(package: Path) -> None:
    repository = package / "model_repository"
    assert {path.name for path in repository.iterdir()} == MODELS
    for model in MODELS:
        assert (repository / model / "config.pbtxt").is_file()
        assert list((repository / model / "1").iterdir())  # no folder is empty: many tools do not copy those
    for model in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        assert (repository / model / "1/tokenizer/tokenizer.json").is_file()
        assert (repository / model / "1/shared/tokenizer.py").is_file()
    assert (repository / "tensorrt_llm/1/target/openvino_model.bin").is_file()
    assert (repository / "tensorrt_llm/1/engine/__init__.py").is_file()
    assert not [path for path in package.rglob("*") if "__pycache__" in path.parts or path.is_symlink()]
    weights = package / "model_repository/tensorrt_llm/1/target/openvino_model.bin"
    assert os.path.samefile(weights, package.parent / "target" / "openvino_model.bin"), (
        "it is not there twice"
    )
    for path in package.rglob("*"):
        if path.suffix in {".pbtxt", ".json", ".py"}:
            assert str(package.parent) not in path.read_text(encoding="utf-8"), (
                "no file knows where it was made"
            )


def test_it_is_the_same_when_it_is_made_again(package: Path, tmp_path: Path) -> None:
    package_cpu("support", SETTINGS, sources(package), tmp_path, Silent())
    assert content_digest(tmp_path) == content_digest(package)
    package_cpu(
        "support", replace(SETTINGS, max_concurrency=3), sources(package), tmp_path / "other", Silent()
    )
    assert Deployment.load(tmp_path / "other").digest != Deployment.load(package).digest


def test_the_deployment_says_what_clients_need(package: Path) -> None:
    deployment = Deployment.load(package)
    assert (deployment.entry_model, deployment.runtime, set(deployment.models)) == (
        "tensorrt_llm_bls",
        "cpu",
        MODELS,
    )
    assert (deployment.end_id, deployment.stop_token_ids) == (5, (2,))
    assert (package / deployment.tokenizer_dir / "chat_template.jinja").is_file()
    assert deployment.limits.max_input_tokens == SETTINGS.max_input_tokens
    assert deployment.digest == content_digest(package / "model_repository")


def test_a_package_that_is_none_is_refused(package: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no deployment\.json"):
        Deployment.load(tmp_path)
    content = json.loads((package / "deployment.json").read_text())
    (tmp_path / "deployment.json").write_text(json.dumps(content | {"schema": 9, "colour": "red"}))
    with pytest.raises(InvalidInput, match=r"2 faults[\s\S]*schema[\s\S]*colour"):
        Deployment.load(tmp_path)


@pytest.mark.parametrize("missing", ["openvino_model.bin", "engine.json"])
def test_an_engine_with_a_file_missing_is_refused(package: Path, tmp_path: Path, missing: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(package.parent / "target", target)
    (target / missing).unlink()
    with pytest.raises(StageError, match=f"no {missing}"):
        package_cpu("x", SETTINGS, replace(sources(package), target=target), tmp_path / "package", Silent())


def test_what_does_not_read_back_is_found(package: Path, tmp_path: Path) -> None:
    configs = cpu_models(SETTINGS, token_ids(CHECKPOINTS / "support-target", 2048))
    repository = tmp_path / "model_repository"
    shutil.copytree(package / "model_repository", repository)
    verify(repository, configs)
    with pytest.raises(StageError, match="does not say what was meant"):
        verify(repository, cpu_models(CpuSettings(1, 1, 1), token_ids(CHECKPOINTS / "support-target", 2048)))
    shutil.rmtree(repository / "preprocessing/1/tokenizer")
    with pytest.raises(
        StageError, match="preprocessing: parameter tokenizer_dir = 1/tokenizer: no such file or folder"
    ):
        verify(repository, configs)


def test_a_moved_package_serves_and_stays_as_it_is(package: Path, moved: Path, server: TritonServer) -> None:
    assert server.check_health().text is not None
    assert content_digest(moved) == content_digest(package)
    assert not list(moved.rglob("__pycache__"))
    assert not Path("gone").exists()


def parameters(settings: CpuSettings, model: str) -> dict[str, str]:
    made = cpu_models(settings, token_ids(CHECKPOINTS / "support-target", 2048))
    return next(parameters_of(config) for config in made if config.name == model)


def test_two_engines_share_what_one_would_have() -> None:
    given = replace(
        SETTINGS, max_draft_tokens=4, speculation="bls", threads=8, kv_cache_mib=100, draft_kv_share=0.2
    )
    target, draft = (parameters(given, model) for model in ("tensorrt_llm", "tensorrt_llm_draft"))
    assert (target["cpu_threads"], draft["cpu_threads"]) == ("6", "2")
    assert (target["cpu_kv_cache_mib"], draft["cpu_kv_cache_mib"]) == ("80", "20")
    assert (target["cpu_max_draft_tokens"], draft["cpu_max_draft_tokens"]) == ("4", "0")
    assert "cpu_draft_model_path" not in target
    for engine in (target, draft):  # a round sends the answer so far
        assert engine["cpu_max_input_tokens"] == str(256 + 700 - 1)
        assert engine["cpu_max_sequence_tokens"] == str(256 + 700)
    limits = parameters(given, "tensorrt_llm_bls")
    assert (limits["max_draft_tokens"], limits["max_input_tokens"], limits["max_output_tokens"]) == (
        "4",
        "256",
        "700",
    )


@pytest.mark.parametrize("changes", [{"max_draft_tokens": 4}, {"speculation": "bls"}])
def test_one_engine_where_the_bls_does_not_speculate(changes: dict[str, object]) -> None:
    made = cpu_models(replace(SETTINGS, **changes), token_ids(CHECKPOINTS / "support-target", 2048))  # type: ignore[arg-type]
    assert [config.name for config in made] == sorted(MODELS, key=[config.name for config in made].index)
    assert "tensorrt_llm_draft_model_name" not in made[-1].parameters


def test_a_draft_with_an_engine_of_its_own(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_draft_tokens=4, speculation="bls", kv_cache_mib=64)
    package = package_support_pair(tmp_path, draft=True, settings=settings)
    repository = package / "model_repository"
    assert {path.name for path in repository.iterdir()} == MODELS | {"tensorrt_llm_draft"}
    weights = repository / "tensorrt_llm_draft/1/target/openvino_model.bin"
    assert os.path.samefile(weights, tmp_path / "draft" / "openvino_model.bin")
    assert (repository / "tensorrt_llm_draft/1/engine/__init__.py").is_file()
    assert not (repository / "tensorrt_llm/1/draft").exists()
    deployment = Deployment.load(package)
    assert set(deployment.models) == MODELS | {"tensorrt_llm_draft"}
    assert deployment.limits.max_draft_tokens == 4
    sizes = [
        int(parameters_of(parse(text))["cpu_kv_cache_mib"])
        for text in (
            (repository / model / "config.pbtxt").read_text()
            for model in ("tensorrt_llm", "tensorrt_llm_draft")
        )
    ]
    assert sum(sizes) == 64
    assert sizes[0] > sizes[1] > 0

"""`pipeline build` for the pytorch runtime, from a recipe to a package that a real Triton serves (its LLM played)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.client import Client
from pipeline.contracts import llm_args
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from tests.e2e.conftest import pipeline
from tests.support import CHECKPOINTS
from tests.support.llmapi import served, statuses

RECIPE: dict[str, Any] = {
    "name": "tiny-pytorch",
    "model": {"source": f"local:{CHECKPOINTS / 'support-target'}"},
    "draft": {"source": f"local:{CHECKPOINTS / 'support-draft'}", "max_draft_tokens": 3},
    "runtime": {"kind": "pytorch", "version": "1.2.1", "gpu": "h100-sxm-80g"},
    "limits": {"max_input_tokens": 256, "max_output_tokens": 128, "max_concurrency": 4},
}
STEPS = {"fetch.target", "fetch.draft", "build.target", "build.draft", "package"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pytorch")


def build(folder: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """Step -> what `pipeline build --json` printed of it."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    sets = [argument for override in overrides for argument in ("--set", override)]
    done = pipeline("build", str(recipe), *sets, "--json", store=folder / "store")
    assert done.returncode == 0, done.stderr
    return {step["step"]: step for step in json.loads(done.stdout)["steps"]}


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, Path]:
    """Step -> its artifact."""
    return {name: Path(step["artifact"]) for name, step in build(folder).items()}


@pytest.mark.servers
def test_the_artifacts(built: dict[str, Path]) -> None:
    assert set(built) == STEPS
    target, draft = built["build.target"], built["build.draft"]
    arguments = yaml.safe_load((target / "llm_args.yaml").read_text())
    assert llm_args.check("1.2.1", arguments) == ()
    assert arguments["speculative_config"]["speculative_model"] == "draft"
    assert not (draft / "llm_args.yaml").exists()
    for folder in (target, draft):
        assert (folder / "checkpoint" / "model.safetensors").is_file()
        facts = json.loads((folder / "build.json").read_text())
        assert facts["quantization"] == "none"


@pytest.mark.servers
def test_the_package_is_served(built: dict[str, Path], tmp_path: Path) -> None:
    deployment = Deployment.load(built["package"])
    assert deployment.requirements is not None
    assert deployment.requirements.image == "pipeline-triton:1.2.1"
    assert (deployment.requirements.sm, deployment.requirements.gpus) == (90, 1)
    assert deployment.limits.max_draft_tokens == 3
    package = tmp_path / "package"
    shutil.copytree(built["package"], package)
    package.chmod(0o755)
    with (
        served(package, tmp_path / "status", tmp_path / "log") as server,
        Client(server.grpc_url, model=deployment.entry_model) as client,
        client.stream("where is my mail", max_tokens=40) as answer,
    ):
        assert len([chunk for chunk in answer if chunk.text]) > 1
        assert answer.finish_reason == "length"
        assert statuses(tmp_path / "status")[0]["tokens"] >= 40


@pytest.mark.servers
def test_only_what_depends_on_a_change_is_made_again(folder: Path, built: dict[str, Path]) -> None:
    assert built
    assert not any(step["made"] for step in build(folder).values())
    newer = build(folder, "runtime.version=1.1.0")
    assert {name for name, step in newer.items() if step["made"]} == {"build.target", "package"}
    changed = build(folder, "scheduler.max_queue_size=9")
    assert {name for name, step in changed.items() if step["made"]} == {"package"}
    assert not list(Store(folder / "store").root.glob("work/*"))


def test_what_the_version_cannot_do_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    done = pipeline("build", str(recipe), "--set", "runtime.instances=2", store=tmp_path / "store")
    assert done.returncode == 2, done.stderr
    assert "TensorRT-LLM 1.2.1 cannot spread instances over GPUs" in done.stderr
    assert not list((tmp_path / "store").glob("artifacts/*"))


@pytest.mark.servers
def test_a_migrated_recipe_builds_and_what_keeps_both_from_being_compared(
    built: dict[str, Path], folder: Path
) -> None:
    engines, new = folder / "engines.yaml", folder / "engines-pytorch.yaml"
    runtime = RECIPE["runtime"] | {"kind": "tensorrt"}
    engines.write_text("# ours\n" + yaml.safe_dump(RECIPE | {"runtime": runtime}))
    done = pipeline("migrate", str(engines), store=folder / "store")
    assert done.returncode == 0, done.stderr
    assert new.read_text().startswith("# ours\n")
    done = pipeline("build", str(new), "--json", store=folder / "store")
    assert done.returncode == 0, done.stderr
    steps = {step["step"]: Path(step["artifact"]) for step in json.loads(done.stdout)["steps"]}
    assert steps["package"] == built["package"], "the recipe says what one that was written by hand does"
    refused = pipeline("migrate", str(engines), "--check", store=folder / "store")
    assert refused.returncode == 2
    assert "runtime tensorrt: its package is not built" in refused.stderr
    assert "runtime pytorch: " in refused.stderr, "this machine has no such GPU, or no Docker that has one"

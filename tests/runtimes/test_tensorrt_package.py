"""From a recipe and built engines to a package in a store: planned, made, read back. The engines are a few bytes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.releases import container
from pipeline.errors import StageError, UserError
from pipeline.plan.plan import Plan, PlanFacts, make_plan
from pipeline.plan.preflight import GeneratedConfig
from pipeline.prepare import Prepared
from pipeline.progress import Silent
from pipeline.recipe import Recipe, TensorRTRuntime, load_recipe
from pipeline.runtimes.tensorrt.runtime import TensorRTBackend, requirements
from pipeline.serving.launch_gpu import launch_faults
from pipeline.stages.builder import Builder
from pipeline.store import Artifact, Json, Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.repository import content_digest
from tests.support import CHECKPOINTS
from tests.support.tensorrt import make_engine

LIMITS = "limits={max_input_tokens: 512, max_output_tokens: 256, max_concurrency: 16}"


def recipe(*overrides: str, version: str = "1.2.1") -> Recipe:
    """The small pair, as it is, on one H100."""
    runtime = f"runtime={{kind: tensorrt, version: {version}, gpu: h100-sxm-80g}}"
    return load_recipe("tiny-cpu", (runtime, "quantization={format: none}", LIMITS, *overrides))


def copy_checkpoint(into: Path) -> None:
    shutil.copytree(CHECKPOINTS / "support-target", into, dirs_exist_ok=True)


class Shop:
    """A store in which the engines of a recipe are built already."""

    def __init__(self, root: Path, chosen: Recipe) -> None:
        self.store, self.recipe = Store(root), chosen
        around = PlanFacts(
            sources={"target": {"sha256": "t"}, "draft": {"sha256": "d"}},
            dataset={},
            tools={},
            build={"target": {"runtime": "tensorrt"}, "draft": {"runtime": "tensorrt"}},
            package=TensorRTBackend().package_settings(chosen),
        )
        self.plan: Plan = make_plan(chosen, around)

    def stock(self, step: str, fill: Callable[[Path], object]) -> None:
        def make(into: Path) -> Mapping[str, Json]:
            fill(into)
            return {}

        self.store.obtain(self.plan[step].key, make, recipe=self.recipe.name, progress=Silent())

    def stock_all(self, *, draft: bool = True, **target: Any) -> None:
        assert isinstance(self.recipe.runtime, TensorRTRuntime)
        version = self.recipe.runtime.version
        for role in ("target", "draft") if draft else ("target",):
            self.stock(f"fetch.{role}", copy_checkpoint)
        built = {"version": version, "max_draft_len": 4 if draft else 0} | target
        self.stock("build.target", lambda into: make_engine(into / "engine", **built))
        if draft:
            self.stock("build.draft", lambda into: make_engine(into / "engine", version=version))

    def package(self) -> Artifact:
        prepared = Prepared(self.plan, {}, (), GeneratedConfig({}), frozenset())
        return Builder(prepared, self.store, Silent()).run()


def test_a_package_with_a_draft(tmp_path: Path) -> None:
    shop = Shop(tmp_path, recipe())
    shop.stock_all()
    package = shop.package()
    deployment = Deployment.load(package.path)
    assert deployment.name == "tiny-cpu"
    assert deployment.models == (
        "preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls", "tensorrt_llm_draft",
    )  # fmt: skip
    assert deployment.limits.max_draft_tokens == 4
    assert deployment.launch.mode == "orchestrator"
    assert launch_faults(deployment) == []
    assert deployment.requirements == requirements(recipe())
    assert deployment.requirements is not None
    assert deployment.requirements.image == container("1.2.1").image
    assert (deployment.requirements.sm, deployment.requirements.gpus) == (90, 1)
    assert deployment.digest == content_digest(package.path / "model_repository")
    built = shop.store.find(shop.plan["build.target"].key)
    assert built is not None
    assert os.path.samefile(
        package.path / "model_repository/tensorrt_llm/1/engine/rank0.engine",
        built.path / "engine/rank0.engine",
    )


def test_a_second_run_finds_it(tmp_path: Path) -> None:
    shop = Shop(tmp_path, recipe())
    shop.stock_all()
    first = shop.package()
    assert Shop(tmp_path, recipe()).package().path == first.path


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.2.0"])
def test_every_version_is_packaged_for_its_container(tmp_path: Path, version: str) -> None:
    shop = Shop(tmp_path, recipe("draft=null", "runtime.tensor_parallel=2", version=version))
    shop.stock_all(draft=False, tensor_parallel=2)
    deployment = Deployment.load(shop.package().path)
    assert deployment.requirements is not None
    assert deployment.requirements.tensorrt_llm == deployment.versions["tensors"] == version
    assert deployment.requirements.image == container(version).image
    assert deployment.requirements.gpus == 2
    assert deployment.launch.mode == "leader"
    assert launch_faults(deployment) == []


def test_engines_that_the_builder_changed_stop_the_build(tmp_path: Path) -> None:
    shop = Shop(tmp_path, recipe())
    shop.stock_all(paged_context_fmha=False, kv_cache="FP8")
    with pytest.raises(StageError, match="use_paged_context_fmha = false"):
        shop.package()
    assert shop.store.find(shop.plan["package"].key) is None


def test_the_package_depends_on_what_is_served_and_on_the_engines_only_by_their_key() -> None:
    settings = TensorRTBackend().package_settings(recipe())
    for override in (
        "limits.max_concurrency=8", "kv_cache.memory_fraction=0.5", "scheduler.policy=max_utilization",
        "serving.decoupled=false",
        "draft.max_draft_tokens=3", "runtime.tensor_parallel=2", "runtime.gpu=h200-sxm-141g", "name=other",
    ):  # fmt: skip
        assert TensorRTBackend().package_settings(recipe(override)) != settings, override
    assert TensorRTBackend().package_settings(recipe("slo.ttft_p95_ms=100")) == settings
    json.dumps(settings)


def test_what_the_contracts_do_not_know_is_refused_before_anything_is_built() -> None:
    with pytest.raises(UserError, match=r"1\.2\.9"):
        TensorRTBackend().package_settings(recipe(version="1.2.9"))
    with pytest.raises(UserError, match="h1000"):
        TensorRTBackend().package_settings(recipe("runtime.gpu=h1000"))

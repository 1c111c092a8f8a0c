"""From a checkpoint to a judged engine, by a trtllm-build that obeys the contract; and every way it can fail."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InvalidInput, StageError
from pipeline.plan.parallelism import parallelism
from pipeline.progress import Lines, Silent
from pipeline.recipe import Recipe, load_recipe
from pipeline.runtimes import AUTO, EngineBuildRequest, ExecutorChoice
from pipeline.runtimes.tensorrt.building import build_job
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.executors.base import BuiltElsewhere
from pipeline.runtimes.tensorrt.runtime import TensorRTBackend
from tests.support.tensorrt import DRAFTED, make_ranks
from tests.support.trtllm_build import FAILS, FAILURES, put_trtllm_build

NATIVE = ExecutorChoice("native")


def recipe(*overrides: str) -> Recipe:
    """Llama 3.1 8B in FP8 with an FP8 KV cache and a draft of 16 bits."""
    return load_recipe("llama-3.1-8b-fp8", (*DRAFTED, *overrides))


class Workshop:
    """A store's folders, a checkpoint for each role, and the stand-in first on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.count = 0
        self.install()

    def install(self, **machine: Any) -> None:
        put_trtllm_build(self.folder / "program", self.monkeypatch, **machine)

    def order(
        self, made: Recipe, role: str = "target", *, executor: ExecutorChoice = NATIVE, **checkpoint: Any
    ) -> EngineBuildRequest:
        self.count += 1
        place = self.folder / str(self.count)
        into = place / "build"
        into.mkdir(parents=True)
        if role == "target":
            checkpoint = {"weights": "fp8", "kv_cache": "FP8"} | checkpoint
        return EngineBuildRequest(
            recipe=made,
            role=role,
            checkpoint=place,
            ranks=make_ranks(place / "ranks", **{"sizes": parallelism(made, role)} | checkpoint),
            caches=self.folder / "caches",
            reports=self.folder / "reports",
            executor=executor,
            into=into,
            progress=Silent(),
        )

    def build(self, order: EngineBuildRequest, fails: str = "") -> Any:
        if fails:
            self.monkeypatch.setenv(FAILS, fails)
        return TensorRTBackend().build(order)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def test_a_target_and_its_draft(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    made = recipe()
    target, draft = workshop.order(made), workshop.order(made, "draft")
    facts = workshop.build(replace(target, progress=Lines(interval_s=0)))
    workshop.build(draft)
    first, second = (EngineFolder.read(order.into / "engine") for order in (target, draft))
    assert (first.max_seq_len, first.max_draft_len, first.verifies_drafts) == (9221, 5, True)
    assert (second.max_seq_len, second.max_draft_len, second.verifies_drafts) == (9216, 0, False)
    assert first.use_paged_context_fmha
    assert second.use_paged_context_fmha
    assert (first.quantization, second.quantization) == ("FP8", None)
    assert sorted(path.name for path in target.into.iterdir()) == ["build.json", "engine"]
    assert json.loads((target.into / "build.json").read_text()) == facts
    assert facts["limits"]["max_seq_len"] == 9221
    assert facts["rank_bytes"] == [3000]
    assert facts["build"]["executor"] == "native"
    said = capsys.readouterr().err
    assert "engine of 1 rank, 0.0 GiB: as asked for, by its config.json" in said
    assert said.count("trtllm-build warns: ") == 1, "what is always said is not repeated"
    assert "trtllm-build warns: Something that no contract knows" in said
    assert len(facts["build"]["warnings"]) > 3
    assert str(workshop.folder) not in json.dumps(facts), "an engine does not say where it was built"
    assert str(workshop.folder) not in (target.into / "engine" / "config.json").read_text()


@pytest.mark.parametrize("version", ["1.0.0", "1.2.0"])
def test_other_versions(workshop: Workshop, version: str) -> None:
    made = recipe(f"runtime.version={version}", "runtime.tensor_parallel=2")
    workshop.install(version=version)
    facts = workshop.build(workshop.order(made))
    assert facts["tensorrt_llm"] == version
    assert (facts["tensor_parallel"], len(facts["rank_bytes"])) == (2, 2)


@pytest.mark.parametrize(
    "overrides",
    [
        ("runtime.tensor_parallel=2", "runtime.pipeline_parallel=2"),
        ("runtime.tensor_parallel=4", "runtime.expert_parallel=2"),
    ],
)
def test_ranks(workshop: Workshop, overrides: tuple[str, ...]) -> None:
    facts = workshop.build(workshop.order(recipe(*overrides)))
    assert len(facts["rank_bytes"]) == facts["tensor_parallel"] * facts["pipeline_parallel"]


@pytest.mark.parametrize(
    ("weights", "kv_cache", "gpu", "sm"),
    [
        ("none", "auto", "a100-sxm-80g", 80),
        ("w4a8_awq", "fp8", "h100-sxm-80g", 90),
        ("nvfp4", "fp8", "b200-sxm-180g", 100),
    ],
)
def test_formats(workshop: Workshop, weights: str, kv_cache: str, gpu: str, sm: int) -> None:
    overrides = [
        "draft=null",
        f"quantization.format={weights}",
        f"quantization.kv_cache={kv_cache}",
        f"runtime.gpu={gpu}",
    ]
    overrides += ["quantization.calibration=null", "quantization.gate=null"] if weights == "none" else []
    workshop.install(sm=sm)
    order = workshop.order(recipe(*overrides), weights=weights, kv_cache={"fp8": "FP8"}.get(kv_cache))
    assert workshop.build(order)["use_paged_context_fmha"]


def test_a_format_for_each_layer(workshop: Workshop) -> None:
    """What the checkpoint says besides about its quantization does not come back, and is not missed."""
    made = recipe("draft=null", "quantization.format=auto", "quantization.kv_cache=auto",
                  "quantization.auto={effective_bits: 6.0}")  # fmt: skip
    order = workshop.order(made, weights="auto", kv_cache=None)
    assert order.ranks is not None
    config = json.loads((order.ranks / "config.json").read_text())
    config["quantization"] |= {"group_size": 128, "has_zero_point": False}
    (order.ranks / "config.json").write_text(json.dumps(config))
    assert workshop.build(order)["quantization"] == "MIXED_PRECISION"


def test_a_source_that_is_quantized_already(workshop: Workshop) -> None:
    made = recipe("draft=null", "quantization.format=none", "quantization.kv_cache=auto",
                  "quantization.calibration=null", "quantization.gate=null")  # fmt: skip
    order = workshop.order(made, weights="fp8", kv_cache="FP8")
    facts = workshop.build(order)
    assert (facts["quantization"], facts["kv_cache"]) == ("FP8", "FP8")
    config = json.loads((order.into / "engine" / "config.json").read_text())
    assert config["build_config"]["plugin_config"]["use_fp8_context_fmha"]


CRASHES = {
    "gpu_memory": "the GPU ran out of memory",
    "wrong_sm": "no kernels for the GPU",
    "tensorrt_version": "two versions of TensorRT meet",
    "unsupported": "does not do this combination",
    "killed": "out-of-memory killer",
}
DIFFERENCES = {
    "other_version": "version is '0.18.0', runtime.version is '1.2.1'",
    "other_mapping": "pretrained_config.mapping.tp_size is 3, the checkpoint has 2",
    "other_quantization": "pretrained_config.quantization.quant_algo is 'W8A16', the checkpoint has 'FP8'",
    "rewrite": r"use_paged_context_fmha is False, asked for True \(the builder says: FP8 Paged Context",
    "silent_rewrite": "max_num_tokens is 8224, asked for 8192",
    "told_rewrite": "use_paged_context_fmha was changed: the builder says: FP8 Paged Context FMHA is disabled",
    "missing_rank": "rank1.engine is missing",
    "empty_rank": "rank1.engine is empty",
    "truncated": "rank1.engine has 1000 bytes and cannot hold the weights of rank1.safetensors",
    "left_over": "rank2.engine is of no rank",
    "no_config": "config.json is missing",
    "broken_config": "config.json cannot be read",
    "bare_config": "config.json lacks one of version, pretrained_config, build_config",
    "nothing": r"config.json is missing\n  rank0.engine is missing\n  rank1.engine is missing",
}


def test_every_failure_is_tried() -> None:
    assert CRASHES.keys() | DIFFERENCES.keys() == FAILURES.keys()


@pytest.mark.parametrize(("fails", "cause"), CRASHES.items())
def test_a_builder_that_fails(workshop: Workshop, fails: str, cause: str) -> None:
    order = workshop.order(recipe())
    with pytest.raises(StageError, match=f"trtllm-build for llama-3.1-8b-fp8-target failed[\\s\\S]*{cause}"):
        workshop.build(order, fails)
    assert not (order.into / "build.json").exists()


@pytest.mark.parametrize(("fails", "difference"), DIFFERENCES.items())
def test_a_builder_that_leaves_something_else(workshop: Workshop, fails: str, difference: str) -> None:
    order = workshop.order(recipe("runtime.tensor_parallel=2"))
    told = f"something else than it was asked for:[\\s\\S]*{difference}[\\s\\S]*the builder's log: "
    with pytest.raises(StageError, match=told):
        workshop.build(order, fails)
    assert not (order.into / "build.json").exists()


def test_all_differences_at_once(workshop: Workshop) -> None:
    order = workshop.order(recipe())
    workshop.install(version="1.2.0")  # PATH has another one than the recipe asks for
    with pytest.raises(StageError) as caught:
        workshop.build(order, "rewrite")
    text = str(caught.value)
    assert "version is '1.2.0'" in text
    assert "use_paged_context_fmha" in text


def test_another_gpu_than_the_recipes(workshop: Workshop) -> None:
    """Where the driver cannot be asked, what the builder made of the other GPU is seen in its files."""
    workshop.install(sm=80)
    with pytest.raises(StageError, match="use_paged_context_fmha is False, asked for True"):
        workshop.build(workshop.order(recipe()))


@pytest.mark.parametrize(
    ("checkpoint", "what"),
    [
        ({"kv_cache": None}, "kv_cache_quant_algo is None, by the recipe 'FP8'"),
        ({"weights": "int4_awq"}, "quant_algo is 'W4A16_AWQ', by the recipe 'FP8'"),
    ],
)
def test_a_checkpoint_that_is_not_the_recipes(
    workshop: Workshop, checkpoint: dict[str, Any], what: str
) -> None:
    with pytest.raises(StageError, match=f"would not build[\\s\\S]*{what}"):
        workshop.build(workshop.order(recipe(), **checkpoint))


def test_a_checkpoint_for_other_ranks(workshop: Workshop) -> None:
    order = workshop.order(recipe("runtime.tensor_parallel=2"))
    config = json.loads((order.ranks / "config.json").read_text())  # type: ignore[operator]
    config["mapping"]["tp_size"] = 4
    (order.ranks / "config.json").write_text(json.dumps(config))  # type: ignore[operator]
    with pytest.raises(StageError, match=r"mapping\.tp_size is 4, by the recipe 2"):
        workshop.build(order)


def test_a_checkpoint_that_lacks_a_rank(workshop: Workshop) -> None:
    order = workshop.order(recipe("runtime.tensor_parallel=2"))
    (order.ranks / "rank1.safetensors").unlink()  # type: ignore[operator]
    with pytest.raises(StageError, match=r"the checkpoint lacks rank1\.safetensors"):
        workshop.build(order)


def test_formats_that_do_not_go_together_are_refused_first() -> None:
    made = recipe("quantization.format=int4_awq", "draft=null")
    with pytest.raises(InvalidInput, match="FP8 Paged Context FMHA is disabled"):
        TensorRTBackend().build_settings(made, "target")


def test_the_timing_cache_is_kept(workshop: Workshop) -> None:
    order = workshop.order(recipe())
    workshop.build(order)
    (kept,) = (workshop.folder / "caches").rglob("*.cache")
    assert kept.name == "1.2.1-h100-sxm-80g.cache"
    facts = workshop.build(workshop.order(recipe()))
    assert not any("timing cache" in line for line in facts["build"]["warnings"]), "the second build found it"


def test_a_job_for_another_machine_stays_the_same(workshop: Workshop) -> None:
    made = recipe("runtime.tensor_parallel=4")
    order = workshop.order(made, executor=ExecutorChoice("print"))
    with pytest.raises(BuiltElsewhere) as caught:
        workshop.build(order)
    job = caught.value.job
    assert (job.workers, job.gpus, job.sm) == (4, 4, 90)
    again = build_job(replace(order, executor=ExecutorChoice("adopt", folder=workshop.folder)))
    assert again.shown == job.shown
    assert not list(order.into.iterdir())


def test_the_job(workshop: Workshop) -> None:
    order = workshop.order(recipe(), executor=AUTO)
    job = build_job(order)
    assert job.image.startswith("nvcr.io/nvidia/tritonserver:")
    assert (job.name, job.version, job.gpu) == ("llama-3.1-8b-fp8-target", "1.2.1", "h100-sxm-80g")
    assert job.log.parent == order.reports
    assert job.output == order.into / "engine"
    assert shutil.which("trtllm-build") is not None

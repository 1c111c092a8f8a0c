"""A recipe for engines as one for the LLM API: validation and plan accept it, and each change is on record."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.cli.main import cli
from pipeline.cli.render.migrate import migration_json, migration_markdown, migration_text
from pipeline.contracts import llm_args, trtllm_build
from pipeline.contracts.releases import releases
from pipeline.documents import dump_yaml
from pipeline.errors import InvalidInput, UserError
from pipeline.prepare import check_recipe
from pipeline.prepare.facts import read_settings
from pipeline.prepare.migration import Migration, migrate
from pipeline.prepare.report import make_report
from pipeline.recipe import PyTorchRuntime, Recipe, TensorRTRuntime, load_recipe, packaged
from pipeline.store import Store
from tests.support import CHECKPOINTS

ENGINES = [name for name, file in packaged().items() if load_recipe(file).runtime.kind == "tensorrt"]
PLAIN = {
    "name": "x",
    "model": {"source": "hf:meta-llama/Llama-3.1-8B-Instruct"},
    "limits": {"max_input_tokens": 1024, "max_output_tokens": 256, "max_concurrency": 4},
    "runtime": {"kind": "tensorrt", "version": "1.2.1", "gpu": "h100-sxm-80g"},
}
DRAFT = {"source": "hf:meta-llama/Llama-3.2-1B-Instruct", "max_draft_tokens": 5}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))


def recipe(folder: Path, sections: Mapping[str, Any], *overrides: str) -> Recipe:
    file = folder / "own.yaml"
    file.write_text(dump_yaml({**PLAIN, **sections}), encoding="utf-8")
    return load_recipe(file, overrides)


def made(before: Recipe, folder: Path, store: Store, version: str | None = None) -> Migration:
    """The migration, whose text says what it should."""
    file = folder / "new.yaml"
    found = migrate(before, file, store, version=version)
    file.write_text(found.text, encoding="utf-8")
    assert load_recipe(file) == found.after
    assert isinstance(found.after.runtime, PyTorchRuntime)
    check_recipe(found.after)
    assert llm_args.check(found.after.runtime.version, read_settings(found.after).arguments) == ()
    return found


def records(found: Migration, effect: str) -> dict[str, Any]:
    return {change.key: change for change in found.changes if change.effect == effect}


@pytest.mark.parametrize("name", ENGINES)
def test_packaged_recipes_migrate_to_ones_that_fit(name: str, store: Store, tmp_path: Path) -> None:
    before = load_recipe(name)
    found = made(before, tmp_path, store)
    assert found.keeps_comments
    assert not found.reports[1].refused
    assert found.reports[1].memory is not None
    assert found.reports[1].memory.verdict == "fits"
    for part in ("name", "model", "quantization", "limits", "kv_cache", "scheduler", "slo", "draft"):
        assert getattr(found.after, part) == getattr(before, part)
    lines = set(found.text.splitlines())
    for line in packaged()[name].read_text().splitlines():
        assert line in lines or line.startswith(("runtime:", "# pipeline build", "# Over the machines")), line


def test_every_flag_of_the_engine_has_a_record(store: Store, tmp_path: Path) -> None:
    flags = "runtime.build_flags=[reduce_fusion=enable, fast_build, weight_sparsity]"
    before = recipe(tmp_path, {}, flags, "runtime.tensor_parallel=2")
    found = made(before, tmp_path, store)
    build = read_settings(before).build["target"]
    words = build["flags"]
    assert isinstance(words, list)
    named = trtllm_build.named_flags("1.2.1", [str(word) for word in words])
    told = {change.key.removeprefix("--") for change in found.changes if change.place == "engine"}
    removed = {change.key for change in found.changes if change.effect == "removed"}
    assert removed == {
        f"runtime.build_flags[{name}]" for name in ("reduce_fusion", "fast_build", "weight_sparsity")
    }
    assert told | {"reduce_fusion", "fast_build", "weight_sparsity"} == named
    assert all(change.reason and change.sources for change in found.changes if change.new_key is None)
    near = next(change for change in found.changes if change.key == "runtime.build_flags[reduce_fusion]")
    assert "allreduce_strategy" in near.reason
    assert "build_flags" not in found.text.replace("# without runtime.build_flags", "")


def test_values_are_those_of_both_runtimes(store: Store, tmp_path: Path) -> None:
    sections = {
        "kv_cache": {"memory_fraction": 0.8, "host_memory_gib": 4.0},
        "scheduler": {"policy": "max_utilization", "max_queue_size": 9, "max_queue_delay_us": 1500},
        "runtime": {**PLAIN["runtime"], "tensor_parallel": 2},  # type: ignore[dict-item]
        "guided_decoding": True,
    }
    found = made(recipe(tmp_path, sections), tmp_path, store)
    carried = {
        key: (change.before, change.new_key, change.after)
        for key, change in records(found, "carried over").items()
    }
    assert carried["--max_batch_size"] == (4, "max_batch_size", 4)
    cache = "kv_cache_config"
    assert carried["kv_cache_free_gpu_mem_fraction"] == (0.8, f"{cache}.free_gpu_memory_fraction", 0.8)
    # Of each rank.
    assert carried["kv_cache_host_memory_bytes"] == (4.0, f"{cache}.host_cache_size", 2 << 30)
    delay = carried["dynamic_batching.max_queue_delay_microseconds"]
    assert delay == (1500, "batch_wait_timeout_ms", 1.5)
    assert carried["dynamic_batching.default_queue_policy.max_queue_size"] == (
        9,
        "scheduler.max_queue_size",
        9,
    )
    assert carried["guided_decoding_backend"] == (True, "guided_decoding_backend", "xgrammar")


def test_what_an_older_release_lacks_is_left_out(store: Store, tmp_path: Path) -> None:
    before = recipe(tmp_path, {"scheduler": {"max_queue_delay_us": 1500}})
    found = made(before, tmp_path, store, "1.0.0")
    change = records(found, "removed")["scheduler.max_queue_delay_us"]
    assert (change.before, change.reason) == (1500, "TensorRT-LLM 1.0.0 has no batch_wait_timeout_ms")
    assert "\nscheduler:" not in found.text
    assert found.after.runtime == PyTorchRuntime(kind="pytorch", version="1.0.0", gpu="h100-sxm-80g")


QUANTIZED = {"calibration": {"dataset": "cnn_dailymail"}, "gate": {}}


@pytest.mark.parametrize(
    ("gpu", "quantization", "form", "gone"),
    [
        ("h100-sxm-80g", {"format": "int8_sq"}, "fp8", ()),
        ("a100-sxm-80g", {"format": "int8_sq"}, "int4_awq", ()),
        ("rtx-pro-6000-96g", {"format": "int4_awq", "awq_block_size": 64}, "nvfp4", ("awq_block_size",)),
        ("h100-sxm-80g", {"format": "int4_awq", "awq_block_size": 64}, "int4_awq", ()),
        ("h100-sxm-80g", {"format": "w4a8_awq", "kv_cache": "fp8"}, "w4a8_awq", ()),
    ],
)
def test_a_format_that_the_backend_has_not_there(
    gpu: str, quantization: dict[str, Any], form: str, gone: tuple[str, ...], store: Store, tmp_path: Path
) -> None:
    sections = {"quantization": QUANTIZED | quantization, "runtime": PLAIN["runtime"] | {"gpu": gpu}}  # type: ignore[operator]
    found = made(recipe(tmp_path, sections), tmp_path, store)
    assert found.after.quantization.format == form
    assert found.after.quantization.gate is not None
    assert {f"quantization.{name}" for name in gone} == set(records(found, "removed"))
    changed = records(found, "changed")
    assert ("quantization.format" in changed) is (form != quantization["format"])
    if "quantization.format" in changed:
        assert gpu in changed["quantization.format"].reason
        assert any("quantization.md" in text for text in changed["quantization.format"].sources)


def test_a_draft_takes_turns_and_one_that_cannot_run_is_left_out(store: Store, tmp_path: Path) -> None:
    runtime = PLAIN["runtime"] | {"tensor_parallel": 2}  # type: ignore[operator]
    sections = {"draft": DRAFT | {"tensor_parallel": 2}, "runtime": runtime}
    found = made(recipe(tmp_path, sections), tmp_path, store)
    assert found.after.draft is not None
    assert (found.after.draft.max_draft_tokens, found.after.draft.tensor_parallel) == (5, 1)
    assert "draft.tensor_parallel" in records(found, "removed")
    assert records(found, "means")["runtime.overlap_scheduler"].after is False
    assert records(found, "carried over")["--speculative_decoding_mode"].after == "DraftTarget"
    runtime = PLAIN["runtime"] | {"pipeline_parallel": 2}  # type: ignore[operator]
    quantized = {
        "draft": DRAFT | {"quantization": "fp8"},
        "quantization": {"calibration": {"dataset": "support"}},
    }
    found = made(recipe(tmp_path, {**quantized, "runtime": runtime}), tmp_path, store)
    assert found.after.draft is None
    assert found.after.quantization.calibration is None
    gone = records(found, "removed")["draft"]
    assert "pipeline" in gone.reason or "stages" in gone.reason
    assert any("issue 9009" in text for text in gone.sources)
    assert not {"--max_draft_len", "--speculative_decoding_mode"} & {change.key for change in found.changes}


def test_two_models_in_turns_hide_no_step(store: Store) -> None:
    def alone(*overrides: str) -> float:
        report = make_report(load_recipe("llama-3.1-8b-eagle3", overrides), store)
        assert report.performance is not None
        return report.performance.itl_ms.value

    small = 'draft={source: "hf:meta-llama/Llama-3.2-1B-Instruct", max_draft_tokens: 3}'
    assert (
        alone(small)
        == alone("draft=null", "runtime.overlap_scheduler=false")
        > alone("draft=null")
        == alone()
    )


def test_what_cannot_be_migrated(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tiny-cpu has runtime\.kind cpu"):
        migrate(load_recipe("tiny-cpu"), tmp_path / "x.yaml", store)
    before = recipe(tmp_path, {"serving": {"prompt_log_probs": True}, "kv_cache": {"reuse": False}})
    with pytest.raises(
        InvalidInput, match=r"with TensorRT-LLM 1\.1\.0 and runtime pytorch: 1 fault"
    ) as refused:
        migrate(before, tmp_path / "x.yaml", store, version="1.1.0")
    assert "serving.prompt_log_probs" in str(refused.value)
    with pytest.raises(UserError, match=r"TensorRT-LLM 9\.9\.9 is not known"):
        migrate(before, tmp_path / "x.yaml", store, version="9.9.9")


def test_what_requests_lose_depends_on_the_release(store: Store, tmp_path: Path) -> None:
    before = recipe(tmp_path, {})
    lost = records(made(before, tmp_path, store), "no counterpart")
    assert {"repetition_penalty", "bad_words", "presence_penalty"} <= set(lost)
    assert "num_draft_tokens" not in lost
    newest = [release.version for release in releases() if "pytorch" in release.tracks][-1]
    if newest != "1.2.1":
        assert not {"repetition_penalty", "presence_penalty"} & set(
            records(made(before, tmp_path, store, newest), "no counterpart")
        )


# Models whose sizes are known without a network, and one that is not.
models = st.sampled_from(["hf:a/b", *(str(load_recipe(name).model.source) for name in ENGINES)])
formats = st.sampled_from(["fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4"])
gpus = st.sampled_from(
    ["a100-sxm-80g", "l40s-48g", "h100-sxm-80g", "b200-sxm-180g", "b300-sxm-288g", "rtx-pro-6000-96g"]
)
flag = st.sampled_from(trtllm_build.tunable("1.2.1")).flatmap(
    lambda name: st.sampled_from(trtllm_build.entries_of(trtllm_build.flags("1.2.1")[name]))
)


@st.composite
def engine_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes of runtime tensorrt, most of which are valid."""
    drafted, form = draw(st.booleans()), draw(st.none() | formats)
    quantization: dict[str, Any] = {}
    if form is not None:
        quantization = {"format": form, "calibration": {"dataset": "support"}}
        quantization["kv_cache"] = draw(st.sampled_from(["auto", "fp8"]))
        quantization |= draw(
            st.fixed_dictionaries(
                {}, optional={"gate": st.just({}), "export_tensor_parallel": st.just([1, 2, 4, 8])}
            )
        )
    runtime = {
        "kind": "tensorrt",
        "version": draw(st.sampled_from(trtllm_build.versions())),
        "gpu": draw(gpus),
        "tensor_parallel": draw(st.sampled_from([1, 2, 4, 8])),
        "pipeline_parallel": draw(st.sampled_from([1, 2])),
        "build_flags": draw(
            st.lists(flag, max_size=1, unique_by=lambda override: override.partition("=")[0])
        ),
    }
    return {
        "name": "random",
        "model": {"source": draw(models)},
        "quantization": quantization,
        "runtime": runtime,
        "limits": {
            "max_input_tokens": draw(st.integers(1, 16384)),
            "max_output_tokens": draw(st.integers(17, 2048)),
            "max_concurrency": draw(st.integers(1, 64)),
        },
        "kv_cache": {"reuse": draw(st.booleans()) or drafted, "host_memory_gib": draw(st.sampled_from([0.0, 8.0]))},
        "scheduler": {
            "chunked_context": draw(st.booleans()),
            "policy": draw(st.sampled_from(["guaranteed_no_evict", "max_utilization"])),
            "max_queue_delay_us": draw(st.sampled_from([0, 500])),
        },
        **({"guided_decoding": True} if draw(st.booleans()) else {}),
        **({"draft": {"source": "hf:a/d", "max_draft_tokens": draw(st.integers(1, 8))}} if drafted else {}),
    }  # fmt: skip


@settings(max_examples=20)
@given(sections=engine_recipes())
def test_any_valid_recipe_migrates(
    sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("random")
    store = Store(folder / "store")
    try:
        before = recipe(folder, sections)
        check_recipe(before)
    except InvalidInput:
        assume(False)
    found = made(before, folder, store)
    assert isinstance(before.runtime, TensorRTRuntime)
    assert found.after.limits == before.limits
    assert found.after.runtime == PyTorchRuntime(
        kind="pytorch",
        version="1.2.1",
        gpu=before.runtime.gpu,
        tensor_parallel=before.runtime.tensor_parallel,
        pipeline_parallel=before.runtime.pipeline_parallel,
    )
    assert not found.reports[1].refused or found.reports[0].refused
    assert migration_text(found)
    assert migration_markdown(found).count("\n|") > 10
    assert len(json.loads(migration_json(found, None))["changes"]) == len(found.changes)


# As a user calls it


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["migrate", *words])


def test_files_are_written_once_and_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("# mine\n" + dump_yaml(PLAIN))
    shown = run("own.yaml", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert [path.name for path in tmp_path.glob("*.yaml")] == ["own.yaml"]
    done = run(
        "own.yaml", "--output", "changes.md", "--output", "changes.json", "--set", "limits.max_concurrency=2"
    )
    assert done.exit_code == 0, done.output
    new = tmp_path / "own-pytorch.yaml"
    assert f"wrote {new}" in done.stdout
    assert load_recipe(new).limits.max_concurrency == 2
    assert new.read_text().startswith("# mine\n")
    document = json.loads((tmp_path / "changes.json").read_text())
    assert document["file"] == str(new)
    assert document["yaml"] == new.read_text()
    table = (tmp_path / "changes.md").read_text()
    for change in document["changes"]:
        assert change["key"] in table
        assert change["key"] in done.stdout
    again = run("own.yaml")
    assert isinstance(again.exception, UserError)
    assert "own-pytorch.yaml exists; give --force" in str(again.exception)
    assert run("own.yaml", "--force", "--json").exit_code == 0
    assert load_recipe(new).limits.max_concurrency == 4


def test_another_folder_and_a_packaged_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    source = f"local:{os.path.relpath(CHECKPOINTS / 'support-target', tmp_path)}"
    (tmp_path / "own.yaml").write_text(dump_yaml({**PLAIN, "model": {"source": source}}))
    done = run("own.yaml", "--output", "sub/new.yaml")
    assert load_recipe("sub/new.yaml").model == load_recipe("own.yaml").model, done.output
    assert run("phi-4-fp8").exit_code == 0
    assert "pipeline build" in (tmp_path / "phi-4-fp8-pytorch.yaml").read_text()


def test_options_that_are_wrong() -> None:
    refused = run("phi-4-fp8", "--output", "a.txt", "--output", "b.yaml", "--output", "c.yaml")
    assert isinstance(refused.exception, InvalidInput)
    assert "must end in .yaml, .json or .md" in str(refused.exception)
    assert "names two files" in str(refused.exception)


def test_a_check_says_what_keeps_both_from_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("mixtral-8x7b", "--check")
    assert isinstance(refused.exception, InvalidInput)
    assert not list(tmp_path.glob("*.yaml"))
    for kind, words in (
        ("tensorrt", "mixtral-8x7b"),
        ("pytorch", str(tmp_path / "mixtral-8x7b-pytorch.yaml")),
    ):
        assert f"runtime {kind}: its package is not built (pipeline build {words}" in str(refused.exception)
    # Written without it, it may be there when the packages are built.
    assert run("mixtral-8x7b").exit_code == 0
    assert "not built" in str(run("mixtral-8x7b", "--check").exception)

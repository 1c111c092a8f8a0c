"""The packaged recipes, how a recipe is found, the JSON schema, and what importing costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.errors import InvalidInput, UserError
from pipeline.recipe import CpuRuntime, find_recipe, load_recipe, packaged
from pipeline.recipe.catalog import SCHEMA_FILE, copy_recipe, entries, schema_text


@pytest.mark.parametrize("name", packaged())
def test_packaged_recipe(name: str) -> None:
    file = packaged()[name]
    assert load_recipe(name) == load_recipe(file)
    assert load_recipe(name).name == name
    purpose, command, output = file.read_text().splitlines()[:3]
    assert purpose.startswith("# ")
    assert purpose.endswith(".")
    assert f"pipeline build recipes/{name}.yaml" in command
    assert output.startswith("# Output: ")


def test_tiny_cpu() -> None:
    recipe = load_recipe("tiny-cpu")
    assert recipe.runtime == CpuRuntime(threads=1)
    assert recipe.quantization.format == "fp8"
    assert recipe.quantization.calibration is not None
    assert recipe.quantization.calibration.samples == 128
    assert recipe.limits.max_sequence_tokens == 1024
    assert recipe.draft is not None
    for checkpoint, folder in ((recipe.model, "support-target"), (recipe.draft, "support-draft")):
        assert checkpoint.source.kind == "local"
        assert checkpoint.source.path == packaged()["tiny-cpu"].parent / "checkpoints" / folder
        assert (checkpoint.source.path / "config.json").is_file()


def test_every_runtime_has_a_recipe() -> None:
    assert {entry.runtime for entry in entries()} == {"cpu", "tensorrt", "pytorch"}


def message(path_or_name: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        find_recipe(path_or_name)
    (fault,) = caught.value.faults
    return str(fault)


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    assert message("tiny_cpu") == "tiny_cpu: is neither a packaged recipe nor a file (did you mean tiny-cpu?)"
    assert message("zzz").startswith(
        "zzz: is neither a packaged recipe nor a file (`pipeline recipes ls` lists"
    )
    assert message("mine.yml") == "mine.yml: there is no such file (near: mine.yaml)"
    assert message("recipes/tiny-cpu.yaml") == (
        "recipes/tiny-cpu.yaml: there is no such file (a packaged recipe is called tiny-cpu)"
    )
    assert message("no/such.yaml") == "no/such.yaml: there is no such file"
    assert message(".") == ".: is a folder (name a file in it: mine.yaml)"


def test_a_file_without_suffix_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("")
    (tmp_path / "tiny-cpu").write_text("")
    assert find_recipe("mine") == Path("mine")
    assert find_recipe("tiny-cpu") == packaged()["tiny-cpu"]
    assert find_recipe("./tiny-cpu") == Path("tiny-cpu")


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").symlink_to("/proc/self/mem")
    with pytest.raises(InvalidInput, match="cannot be read: Input/output error"):
        load_recipe(tmp_path / "r.yaml")


def test_copy_keeps_working(tmp_path: Path) -> None:
    copy = copy_recipe(packaged()["tiny-cpu"], str(tmp_path / "my.yaml"))
    assert load_recipe(copy) == load_recipe("tiny-cpu")
    lines = copy.read_text().splitlines()
    assert lines[0] == packaged()["tiny-cpu"].read_text().splitlines()[0]
    assert f"pipeline build {copy} && pipeline serve {copy}" in lines[1]


def test_copy_into_a_folder_and_of_a_copy(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    first = copy_recipe(packaged()["tiny-cpu"], f"{tmp_path}/a b/")
    assert first == tmp_path / "a b" / "tiny-cpu.yaml"
    assert f"pipeline build '{first}'" in first.read_text()
    second = copy_recipe(first, str(tmp_path / "second.yaml"))
    assert load_recipe(second) == load_recipe("tiny-cpu")


def test_copy_rewrites_every_local_path(small_file: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    copy = copy_recipe(small_file, str(tmp_path / "there"))
    assert load_recipe(copy) == load_recipe(small_file)
    assert "# a comment on the source: local:kept" in copy.read_text()


@pytest.fixture
def small_file(tmp_path: Path, small: str) -> Path:
    text = small.replace("local:target", "'local:été/target'  # a comment on the source: local:kept")
    text += "quantization: {format: fp8, calibration: {dataset: local:own.jsonl}}\n"
    text += 'draft: {source: "local:d", max_draft_tokens: 2}\n'
    (tmp_path / "r.yaml").write_text(text)
    return tmp_path / "r.yaml"


def test_copy_refuses(tmp_path: Path) -> None:
    source = packaged()["tiny-cpu"]
    target = tmp_path / "my.yaml"
    target.write_text("mine")
    with pytest.raises(UserError, match="exists; give --force"):
        copy_recipe(source, str(target))
    assert target.read_text() == "mine"
    copy_recipe(source, str(target), force=True)
    assert load_recipe(target).name == "tiny-cpu"
    with pytest.raises(UserError, match="is the recipe itself"):
        copy_recipe(target, str(target), force=True)
    with pytest.raises(UserError, match="none does not exist; make the folder first"):
        copy_recipe(source, f"{tmp_path}/none/")
    with pytest.raises(UserError, match="none does not exist; make the folder first"):
        copy_recipe(source, f"{tmp_path}/none/my.yaml")
    (tmp_path / "bad.yaml").write_text("name: 3")
    with pytest.raises(InvalidInput):
        copy_recipe(tmp_path / "bad.yaml", str(tmp_path / "copy.yaml"))


def test_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), f"run: pipeline recipes schema > {SCHEMA_FILE}"


def test_schema_describes_every_key() -> None:
    schema = json.loads(schema_text())
    sections = [schema, *(section for section in schema["$defs"].values() if "properties" in section)]
    assert all(section["additionalProperties"] is False for section in sections)
    bare = [
        key
        for section in sections
        for key, info in section["properties"].items()
        if "description" not in info
    ]
    assert bare == []


def test_import_is_light() -> None:
    heavy = ("torch", "openvino", "transformers", "numpy", "modelopt", "huggingface_hub", "tritonclient")
    code = (
        f"import sys, pipeline.recipe, pipeline.cli.recipes; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entry_of_a_broken_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.yaml").write_text("# What it is.\nname: 3\n")
    monkeypatch.setattr(
        "pipeline.resources.folder", lambda name: tmp_path if name == "recipes" else tmp_path / name
    )
    (entry,) = entries()
    assert (entry.name, entry.runtime, entry.quantization, entry.purpose) == (
        "bad",
        "not valid",
        "",
        "What it is.",
    )


def test_recipes_are_plain_yaml() -> None:
    for file in packaged().values():
        assert yaml.safe_load(file.read_text())["name"] == file.stem

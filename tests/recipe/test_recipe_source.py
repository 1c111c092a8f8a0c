"""Where a checkpoint or a data set comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.recipe import HubSource, LocalSource, NamedDataset, Recipe, load_recipe

Load = Callable[..., Recipe]


def test_local_paths_are_relative_to_the_file(load: Load, small: str, tmp_path: Path) -> None:
    assert load(small).model.source == LocalSource(tmp_path / "target")
    assert load(small, "model.source=local:../a/./b").model.source == LocalSource(tmp_path.parent / "a" / "b")
    assert load(small, "model.source=local:/a").model.source == LocalSource(Path("/a"))


def test_local_paths_do_not_depend_on_the_working_folder(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "r.yaml").write_text(small)
    monkeypatch.chdir(tmp_path)
    here = load_recipe("sub/r.yaml")
    monkeypatch.chdir("/")
    assert load_recipe(tmp_path / "sub" / "r.yaml") == here


def test_a_link_is_relative_to_the_file_it_points_to(small: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "r.yaml").write_text(small)
    (tmp_path / "link.yaml").symlink_to("real/r.yaml")
    assert load_recipe(tmp_path / "link.yaml").model.source == LocalSource(tmp_path / "real" / "target")


def test_home_is_expanded(load: Load, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    assert load(small, "model.source=local:~/m").model.source == LocalSource(Path("/home/x/m"))


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/3", "0e9e39f249a16976918f6564b8830bc894c89659"]
)
def test_hub(load: Load, small: str, revision: str) -> None:
    model = load(small, "model.source=hf:meta-llama/Llama-3.1-8B", f"model.revision={revision}").model
    assert model.source == HubSource("meta-llama/Llama-3.1-8B")
    assert model.revision == revision
    assert model.allow_pickle is False


def test_data_sets(load: Load, small: str, tmp_path: Path) -> None:
    quantized = ("quantization.format=fp8", "quantization.calibration.dataset={}")
    named, local = (
        load(small, *(text.format(value) for text in quantized)).quantization.calibration
        for value in ("support", "local:own.jsonl")
    )
    assert named is not None
    assert local is not None
    assert named.dataset == NamedDataset("support")
    assert local.dataset == LocalSource(tmp_path / "own.jsonl")


@pytest.mark.parametrize("source", ["hf:a/b", "local:/a/b c/é"])
def test_text_and_back(load: Load, small: str, source: str) -> None:
    assert str(load(small, f'model.source="{source}"').model.source) == source

"""Mapping of an engine's settings: every setting has an entry, and every argument that an entry names exists."""

from __future__ import annotations

from typing import get_args

import pytest

from pipeline.contracts import inflight_batcher, llm_args, migration, trtllm_build
from pipeline.recipe import PyTorchRuntime, Recipe
from pipeline.recipe.quantization import Format


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("flags", {name for version in trtllm_build.versions() for name in trtllm_build.flags(version)}),
        (
            "parameters",
            {
                name
                for version in inflight_batcher.versions()
                for name in inflight_batcher.parameters("tensorrt_llm", version)
            },
        ),
    ],
)
def test_every_setting_has_one_entry(kind: str, known: set[str]) -> None:
    names = [name for entry in migration._data()["settings"][kind] for name in entry["names"]]
    assert sorted(names) == sorted(known)


def test_arguments_exist_and_what_has_none_has_a_reason() -> None:
    for setting in migration.settings():
        for name in filter(None, (setting.argument, setting.near)):
            having = [version for version in llm_args.versions() if llm_args.has_argument(version, name)]
            assert having, name
            assert "1.2.1" in having, name
        assert setting.argument or setting.because, setting.name
        assert not (setting.argument and setting.near), setting.name
        assert all(setting.sources)


def test_keys_are_those_of_recipes() -> None:
    keys = {setting.key for setting in migration.settings() if setting.key is not None} | set(
        migration.removed_keys()
    )
    for key in keys - {"runtime.instances"}:
        section, _, name = key.partition(".")
        if name:
            annotation = Recipe.model_fields[section].annotation
            models = [kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")]
            assert any(name in model.model_fields for model in models), key
    assert "instances" in PyTorchRuntime.model_fields


def test_formats_are_those_of_recipes() -> None:
    for entry in migration._data()["formats"]:
        assert {entry["format"], *entry["instead"]} <= set(get_args(Format))
        assert entry["format"] not in entry["instead"]


def test_an_argument_inside_of_speculation_or_of_a_model() -> None:
    assert llm_args.has_argument("1.2.1", "speculative_config.max_draft_len")
    assert llm_args.has_argument("1.2.1", "speculative_config.decoding_type")
    assert not llm_args.has_argument("1.2.1", "speculative_config.max_batch_size")
    assert not llm_args.has_argument("1.2.1", "max_batch_size.inner")
    assert not llm_args.has_argument("1.0.0", "kv_cache_config.tokens_per_block")

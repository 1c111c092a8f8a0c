"""The configs of recipes/tiny-cpu.yaml, as text; `PIPELINE_WRITE_GOLDEN=1 pytest` writes them after a change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from pipeline.runtimes.cpu.runtime import serving_settings
from pipeline.triton.cpu_models import cpu_models
from pipeline.triton.pbtxt import checked, parse
from pipeline.triton.token_ids import token_ids
from tests.support.served import CHECKPOINTS

GOLDEN = Path(__file__).parent / "golden" / "tiny-cpu"
RECIPE = load_recipe(str(CHECKPOINTS.parent / "tiny-cpu.yaml"), ())
CONFIGS = cpu_models(serving_settings(RECIPE), token_ids(CHECKPOINTS / "support-target", vocab_size=2048))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_the_config_of_each_model(config) -> None:  # type: ignore[no-untyped-def]
    path = GOLDEN / config.name / "config.pbtxt"
    text = checked(config)
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert parse(text) == config


def test_nothing_else_is_there() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {config.name for config in CONFIGS}

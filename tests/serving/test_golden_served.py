"""The configs of recipes/tiny-cpu.yaml, its draft in the engine and as a model of its own.

`PIPELINE_WRITE_GOLDEN=1 pytest` writes them after a change.
"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipeline.models.token_ids import token_ids
from pipeline.recipe import load_recipe
from pipeline.runtimes.cpu.model_repository import cpu_models
from pipeline.runtimes.cpu.runtime import serving_settings
from pipeline.triton.config import parse, render
from tests.support import CHECKPOINTS

GOLDEN = Path(__file__).parent / "golden"
IDS = token_ids(CHECKPOINTS / "support-target", vocab_size=2048)


def configs(*overrides: str) -> tuple[ModelConfig, ...]:
    recipe = load_recipe(str(CHECKPOINTS.parent / "tiny-cpu.yaml"), overrides)
    return cpu_models(serving_settings(recipe), IDS)


KINDS = {"tiny-cpu": configs(), "tiny-cpu-bls": configs("runtime.speculation=bls")}
EACH = [
    pytest.param(kind, config, id=f"{kind}-{config.name}") for kind, made in KINDS.items() for config in made
]


@pytest.mark.parametrize(("kind", "config"), EACH)
def test_the_config_of_each_model(kind: str, config: ModelConfig) -> None:
    path = GOLDEN / kind / config.name / "config.pbtxt"
    text = render(config)
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert parse(text) == config


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_that_does_not_stream(kind: str) -> None:
    """Of the models, only whether they are decoupled differs; pre- and postprocessing never are."""
    speculation = ("runtime.speculation=bls",) if kind == "tiny-cpu-bls" else ()
    whole = configs("serving.decoupled=false", *speculation)
    assert whole != KINDS[kind]
    for config in KINDS[kind]:
        config = deepcopy(config)
        config.ClearField("model_transaction_policy")
        assert config in whole


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_is_there(kind: str) -> None:
    assert {path.name for path in (GOLDEN / kind).iterdir()} == {config.name for config in KINDS[kind]}

"""A small valid recipe, and a way to load variations of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput
from pipeline.recipe import Recipe, load_recipe

SMALL = """\
name: small
model:
  source: local:target
runtime:
  kind: cpu
limits:
  max_input_tokens: 512
  max_output_tokens: 64
  max_concurrency: 4
"""


@pytest.fixture
def small() -> str:
    """Lines: 1 name, 2 model, 3 source, 4 runtime, 5 kind, 6 limits, 7 to 9 its keys; append sections from line 10."""
    return SMALL


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Recipe]:
    def load(text: str | bytes, *overrides: str) -> Recipe:
        file = tmp_path / "r.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_recipe(file, overrides)

    return load


@pytest.fixture
def faults(load: Callable[..., Recipe], tmp_path: Path) -> Callable[..., list[str]]:
    """The messages of a recipe that is wrong, with the folder left out."""

    def faults(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(InvalidInput) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        return [str(fault).replace(f"{tmp_path}/", "") for fault in caught.value.faults]

    return faults

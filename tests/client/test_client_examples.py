"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import pipeline.client

MODULES = [module.name for module in pkgutil.walk_packages(pipeline.client.__path__, "pipeline.client.")]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0

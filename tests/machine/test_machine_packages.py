"""Packages of each extra."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from pipeline import resources
from pipeline.errors import UserError
from pipeline.machine.packages import Extra, Need, Package, read_extras, read_python, require


def test_a_version_fits_or_not() -> None:
    assert Package("torch", "==2.13.0", "2.13.0+cpu").fits
    assert Package("numpy", ">=1.26,<2", "1.26.4").fits
    assert not Package("numpy", ">=1.26,<2", "2.1.0").fits
    assert not Package("torch", "==2.13.0", None).fits
    assert Package("anything", "", "0.1rc1").fits


def test_an_extra_lacks_what_is_missing_and_what_is_of_another_version() -> None:
    extra = Extra("hub", (Package("a", ">=1", "1.0"), Package("b", ">=1", None), Package("c", "<2", "2.0")))
    assert [package.name for package in extra.lacking] == ["b", "c"]
    assert extra.install.endswith("[hub]'")


def test_this_environment_has_the_core() -> None:
    core = read_extras()[0]
    assert (core.name, core.lacking) == ("", ())
    assert {"click", "pydantic"} <= {package.name for package in core.packages}
    assert read_python().fits


def test_extras_are_those_of_the_project() -> None:
    checkout = resources.checkout()
    assert checkout is not None
    declared = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [extra.name for extra in read_extras()] == [
        "",
        *(name for name in declared if name not in ("all", "dev", "test")),
    ]


WHEEL = """\
Metadata-Version: 2.4
Name: trtllm-pipeline
Version: 0.1.0
Requires-Python: <3.13,>=3.11
Requires-Dist: click>=8.1
Requires-Dist: colorama; sys_platform == "nonesuch"
Provides-Extra: hub
Requires-Dist: huggingface-hub<2,>=1.0; extra == 'hub'
Requires-Dist: ml-dtypes>=0.5; extra == 'hub'
Provides-Extra: cpu
Requires-Dist: ml-dtypes>=0.5; extra == 'cpu'
Provides-Extra: all
Requires-Dist: trtllm-pipeline[cpu,hub]; extra == 'all'
Provides-Extra: server
Requires-Dist: nvidia-pytriton==0.7.0; python_version < '3.12' and extra == 'server'
"""


def test_an_installed_wheel_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trtllm_pipeline-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(WHEEL)
    monkeypatch.setattr(metadata, "metadata", lambda _: metadata.Distribution.at(folder).metadata)
    monkeypatch.setattr(resources, "checkout", lambda: None)
    names = {extra.name: [package.name for package in extra.packages] for extra in read_extras()}
    assert names == {
        "": ["click"],
        "hub": ["huggingface-hub", "ml-dtypes"],
        "cpu": ["ml-dtypes"],
        "server": ["nvidia-pytriton"],
    }
    assert set(read_python().wanted.split(",")) == {"<3.13", ">=3.11"}


def test_what_is_not_for_this_python_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = """
        [project]
        requires-python = ">=3.11,<3.14"
        dependencies = []
        optional-dependencies.server = ["nonesuch==0.7.0; python_version < '3.8' or python_version == '3.12'"]
    """
    monkeypatch.setattr(resources, "checkout", lambda: tmp_path)
    (tmp_path / "pyproject.toml").write_text(project)
    here = ".".join(map(str, sys.version_info[:2]))
    if here == "3.12":
        (tmp_path / "pyproject.toml").write_text(project.replace("3.12'", "3.13'"))
    other = "3.13" if here == "3.12" else "3.12"
    with pytest.raises(UserError) as caught:
        require("tiny", [Need("server", "serve")])
    assert str(caught.value) == f"tiny needs Python {other} for serve: nonesuch cannot be installed on {here}"
    assert read_extras()[1].install == f"make an environment with Python {other}"

"""GPUs and the formats that run on them: both sides of each edge."""

from __future__ import annotations

from typing import Literal

import pytest

from pipeline.contracts import gpus as gpus_module
from pipeline.contracts.gpus import gpu, gpus, support
from pipeline.errors import UserError

ERROR, WARNING = ["error"], ["warning"]


@pytest.mark.parametrize(
    ("name", "weights", "kv_cache", "track", "severities"),
    [
        ("a100-sxm-80g", "fp8", "auto", "tensorrt", ERROR),
        ("l40s-48g", "fp8", "auto", "tensorrt", []),
        ("a100-sxm-80g", "int4_awq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "int4_awq", "auto", "tensorrt", ERROR),
        ("b300-sxm-288g", "int4_awq", "auto", "tensorrt", ERROR),
        ("rtx-5090-32g", "int4_awq", "auto", "tensorrt", WARNING),
        ("b200-sxm-180g", "int4_awq", "auto", "pytorch", WARNING),
        ("a100-sxm-80g", "w4a8_awq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "w4a8_awq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "w4a8_awq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "int8_sq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "int8_sq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "int8_sq", "auto", "pytorch", ERROR),
        ("h200-sxm-141g", "nvfp4", "auto", "pytorch", ERROR),
        ("b200-sxm-180g", "nvfp4", "auto", "pytorch", []),
        ("b300-sxm-288g", "nvfp4", "auto", "pytorch", WARNING),
        ("gb300-288g", "fp8", "auto", "pytorch", WARNING),
        ("a10-24g", "none", "fp8", "tensorrt", WARNING),
        ("l4-24g", "none", "fp8", "tensorrt", []),
    ],
)
def test_support(
    name: str, weights: str, kv_cache: str, track: Literal["tensorrt", "pytorch"], severities: list[str]
) -> None:
    found = support(gpu(name), weights, kv_cache, track)
    assert [finding.severity for finding in found] == severities
    assert all(name in finding.reason and finding.sources for finding in found)


def test_an_unknown_gpu_names_those_of_the_chip() -> None:
    with pytest.raises(
        UserError, match="h100-sxm-96g is not known; known: h100-sxm-80g, h100-pcie-80g, h100-nvl-94g"
    ):
        gpu("h100-sxm-96g")


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [
        ("b300-sxm-288g", "1.0.0", True), ("b300-sxm-288g", "1.1.0", False), ("b300-sxm-288g", "1.3.0rc14", False),
        ("rtx-5090-32g", "0.19.0", True), ("rtx-5090-32g", "0.20.0", False),
        ("b200-sxm-180g", "0.19.0", False), ("h100-sxm-80g", "0.19.0", False),
    ],
)  # fmt: skip
def test_a_release_older_than_the_gpu(name: str, version: str, refused: bool) -> None:
    found = support(gpu(name), "none", "auto", "tensorrt", version)
    assert [finding.severity for finding in found] == (ERROR if refused else [])
    assert all(finding.subject == "gpu" for finding in found)


def test_every_packaged_gpu_runs_bfloat16_and_reports_a_little_less_memory_than_is_sold() -> None:
    for one in gpus():
        assert not support(one, "none", "auto", "tensorrt")
        assert 0.93 < one.usable_gib / one.memory_gib < 1.02


def test_a_gpu_is_added_by_adding_data(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gpus_module._data()
    new = {
        "name": "x1-1g",
        "chip": "X1",
        "architecture": "Old",
        "sm": 75,
        "memory_gib": 1,
        "driver_mib": 1000,
    }
    more = {**facts, "gpus": [*facts["gpus"], new]}
    monkeypatch.setattr(gpus_module, "_data", lambda: more)
    assert gpu("x1-1g").capability == "7.5"
    assert [found.subject for found in support(gpu("x1-1g"), "none", "auto", "pytorch")] == ["weights"]


def test_names_are_unique_and_say_the_memory() -> None:
    names = [one.name for one in gpus()]
    assert len(set(names)) == len(names)
    assert all(one.name.endswith(f"-{one.memory_gib:g}g") for one in gpus())

"""GPUs and the formats that run on them: both sides of each edge."""

from __future__ import annotations

from typing import Literal

import pytest

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
        ("rtx-5090-32g", "int4_awq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "int4_awq", "auto", "pytorch", WARNING),
        ("a100-sxm-80g", "w4a8_awq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "w4a8_awq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "w4a8_awq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "int8_sq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "int8_sq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "int8_sq", "auto", "pytorch", ERROR),
        ("h200-sxm-141g", "nvfp4", "auto", "pytorch", ERROR),
        ("b200-sxm-180g", "nvfp4", "auto", "pytorch", []),
        ("a10-24g", "none", "fp8", "tensorrt", WARNING),
        ("l4-24g", "none", "fp8", "tensorrt", []),
        ("h100-sxm-80g", "fp8", "int8", "pytorch", ERROR),
        ("b200-sxm-180g", "fp8", "int8", "tensorrt", ERROR),
        ("b200-sxm-180g", "int4_awq", "int8", "tensorrt", [*ERROR, *ERROR]),
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


def test_names_are_unique_and_say_the_memory() -> None:
    names = [one.name for one in gpus()]
    assert len(set(names)) == len(names)
    assert all(one.name.endswith(f"-{one.memory_gib:g}g") for one in gpus())

"""GPUs and the formats that run on them: both sides of each edge."""

from __future__ import annotations

from typing import Literal

import pytest

from pipeline.contracts import gpus as gpus_module
from pipeline.contracts.gpus import Gpu, format_issues, gpu, gpu_generation, gpu_rates, gpus
from pipeline.contracts.models import known_model
from pipeline.errors import UserError
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import ModelSpec
from pipeline.plan.performance import EngineSpeed
from pipeline.plan.performance.constants import efficiency, fitted_constants

ERROR, WARNING = ["error"], ["warning"]
SIZES = known_model("meta-llama/Llama-3.2-1B-Instruct")
assert isinstance(SIZES, ModelSizes)
MODEL = ModelSpec("target", SIZES)


@pytest.mark.parametrize(
    ("name", "weights", "kv_cache", "track", "severities"),
    [
        ("a100-sxm-80g", "fp8", "auto", "tensorrt", ERROR),
        ("l40s-48g", "fp8", "auto", "tensorrt", []),
        ("b200-sxm-180g", "int4_awq", "auto", "tensorrt", ERROR),
        ("rtx-5090-32g", "int4_awq", "auto", "tensorrt", WARNING),
        ("b200-sxm-180g", "int4_awq", "auto", "pytorch", []),
        ("h100-sxm-80g", "w4a8_awq", "auto", "tensorrt", []),
        ("b200-sxm-180g", "w4a8_awq", "auto", "tensorrt", ERROR),
        ("h100-sxm-80g", "int8_sq", "auto", "tensorrt", []),
        ("h100-sxm-80g", "int8_sq", "auto", "pytorch", ERROR),
        ("h200-sxm-141g", "nvfp4", "auto", "pytorch", ERROR),
        ("b200-sxm-180g", "nvfp4", "auto", "pytorch", []),
        ("b300-sxm-288g", "nvfp4", "auto", "pytorch", []),
        ("gb300-288g", "fp8", "auto", "pytorch", []),
        ("a10-24g", "none", "fp8", "tensorrt", WARNING),
        ("l4-24g", "none", "fp8", "tensorrt", []),
        ("h200-sxm-141g", "fp8_block", "auto", "pytorch", []),
        ("l40s-48g", "fp8_block", "auto", "pytorch", WARNING),
        ("a100-sxm-80g", "fp8_block", "auto", "pytorch", ERROR),
        ("b200-sxm-180g", "fp8_row", "auto", "pytorch", WARNING),
        ("h200-sxm-141g", "mxfp4", "auto", "pytorch", WARNING),
        ("gb300-288g", "mxfp4", "auto", "pytorch", []),
    ],
)
def test_support(
    name: str, weights: str, kv_cache: str, track: Literal["tensorrt", "pytorch"], severities: list[str]
) -> None:
    found = format_issues(gpu(name), weights, kv_cache, track)
    assert [finding.severity for finding in found] == severities
    assert all(name in finding.reason and finding.sources for finding in found)


def test_an_unknown_gpu_names_those_of_the_chip() -> None:
    with pytest.raises(
        UserError, match="h100-sxm-96g is not known; near: h100-sxm-80g, h100-pcie-80g, h100-nvl-94g"
    ):
        gpu("h100-sxm-96g")


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [
        ("b300-sxm-288g", "1.0.0", True), ("b300-sxm-288g", "1.1.0", False), ("b300-sxm-288g", "1.3.0rc29", False),
        ("h100-sxm-80g", "1.0.0", False),
    ],
)  # fmt: skip
def test_a_release_older_than_the_gpu(name: str, version: str, refused: bool) -> None:
    found = format_issues(gpu(name), "none", "auto", "tensorrt", version)
    assert [finding.severity for finding in found] == (ERROR if refused else [])
    assert all(finding.subject == "gpu" for finding in found)


def test_formats_that_a_release_added() -> None:
    b200 = gpu("b200-sxm-180g")
    assert [issue.severity for issue in format_issues(b200, "w4a8_awq", "auto", "pytorch", "1.2.1")] == ERROR
    assert [
        issue.severity for issue in format_issues(b200, "int4_awq", "auto", "pytorch", "1.2.1")
    ] == WARNING
    for version in ("1.3.0rc29", None):
        for form in ("w4a8_awq", "int4_awq"):
            assert not format_issues(b200, form, "auto", "pytorch", version)


def test_every_packaged_gpu_runs_bfloat16_and_reports_a_little_less_memory_than_is_sold() -> None:
    for product in gpus():
        assert not format_issues(product, "none", "auto", "tensorrt")
        assert 0.93 < product.usable_gib / product.memory_gib < 1.02


@pytest.mark.parametrize("product", gpus(), ids=lambda product: product.name)
def test_rates_are_plausible_and_there_for_each_format_that_runs(product: Gpu) -> None:
    rates, data = gpu_rates(product.name), gpus_module._data()
    assert set(rates.unverified) <= set(data["gpus"][0]["rates"]) | {"nvlink_gb_s"}
    assert 100 < rates.memory_gb_s < 10_000
    assert rates.tflops["bf16"] > 0
    # Dense rates: twice as fast a step, no more, from bf16 to fp8 and from fp8 to fp4 (Blackwell Ultra gives FP4 more).
    assert rates.tflops.get("fp8", rates.tflops["bf16"] * 2) <= rates.tflops["bf16"] * 2.1
    assert rates.link_gb_s(1) >= 0
    assert rates.machines(1024) > 1
    assert rates.peer_gb_s(1024) <= min(rates.network_gb_s, rates.link_gb_s(1024))
    assert rates.network_gb_s in data["network_gb_s"].values()
    for form, arithmetic in (("fp8", "fp8"), ("nvfp4", "fp4")):
        issues = format_issues(product, form, "auto", "pytorch")
        assert (arithmetic in rates.tflops) == all(found.severity != "error" for found in issues)


def test_cards_are_bridged_in_pairs_only() -> None:
    card = gpu_rates("h100-pcie-80g")
    assert card.link_gb_s(2) == 300
    assert card.link_gb_s(4) == 64
    unbridged = gpu_rates("l40s-48g")
    assert unbridged.link_gb_s(2) == unbridged.pcie_gb_s


def test_machines_are_joined_by_a_network_and_racks_by_nvlink() -> None:
    hopper, rack = gpu_rates("h100-sxm-80g"), gpu_rates("gb200-186g")
    assert [hopper.machines(gpus) for gpus in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    assert hopper.peer_gb_s(8) == hopper.link_gb_s(16) == 450
    assert hopper.peer_gb_s(16) == 50
    assert (rack.machines(72), rack.peer_gb_s(72), rack.peer_gb_s(73)) == (1, 900, 50)
    assert gpu_rates("h100-pcie-80g").link_gb_s(16) == 64


def test_a_gpu_is_added_by_adding_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gpus_module._data()
    rates = {
        "memory_gb_s": 900,
        "tflops": {"bf16": 100},
        "pcie": 5,
        "network": "ndr",
        "tdp_w": 70,
        "source": [],
    }
    new = {
        "name": "x1-1g",
        "chip": "X1",
        "architecture": "New",
        "sm": 89,
        "memory_gib": 1,
        "driver_mib": 1000,
    }
    more = {**facts, "gpus": [*facts["gpus"], {**new, "rates": rates}]}
    monkeypatch.setattr(gpus_module, "_data", lambda: more)
    assert gpu("x1-1g").capability == "8.9"
    assert format_issues(gpu("x1-1g"), "none", "auto", "pytorch") == ()
    assert efficiency("x1-1g", "pytorch") == efficiency("l4-24g", "pytorch")
    assert EngineSpeed.of(MODEL, "x1-1g", "pytorch").decode(1, 100) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm": 75}, r"x1-1g: compute capability 7.5 .* generations in contracts/data/gpus.yaml"),
        ({"rates": {"pcie": 6}}, r"x1-1g: the rate of PCIe 6 .* pcie_gb_s in contracts/data/gpus.yaml"),
        ({"rates": {"pcie": 5, "network": "wan"}}, r"x1-1g: the rate of network wan .* network_gb_s in"),
        ({"rates": None}, r"x1-1g: its peak rates are not known.*contracts/data/gpus.yaml"),
    ],
)
def test_what_an_entry_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    facts = gpus_module._data()
    new = {**facts["gpus"][0], "name": "x1-1g", **changes}
    if new["rates"] is None:
        del new["rates"]
    monkeypatch.setattr(gpus_module, "_data", lambda: {**facts, "gpus": [new]})
    assert format_issues(gpu("x1-1g"), "none", "fp8", "tensorrt")
    with pytest.raises(UserError, match=message):
        EngineSpeed.of(MODEL, "x1-1g", "tensorrt")


def test_names_are_unique_and_say_the_memory_and_generations_have_constants() -> None:
    names = [product.name for product in gpus()]
    assert len(set(names)) == len(names)
    for product in gpus():
        assert product.name.endswith(f"-{product.memory_gib:g}g")
        assert gpu_generation(product.name).constants in fitted_constants()["constants"]["families"]

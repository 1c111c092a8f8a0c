"""Peak rates of GPUs: complete, sourced, and dense."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from pipeline.contracts.gpus import all_rates, gpu_rates, gpus, support
from pipeline.errors import UserError

DATA = yaml.safe_load((resources.files("pipeline.contracts") / "data" / "gpu_rates.yaml").read_text("utf-8"))


def test_every_gpu_has_rates_and_nothing_else_has() -> None:
    assert {one.gpu for one in all_rates()} == {one.name for one in gpus()}


@pytest.mark.parametrize("one", all_rates(), ids=lambda one: one.gpu)
def test_rates_are_sourced_and_plausible(one) -> None:  # type: ignore[no-untyped-def]
    assert one.sources
    assert set(one.sources) <= set(DATA["sources"])
    assert set(one.unverified) <= set(DATA["rates"][0]) | {"nvlink_gb_s"}
    assert 100 < one.memory_gb_s < 10_000
    assert one.tflops["bf16"] > 0
    # Dense rates: twice as fast a step, no more, from bf16 to fp8 and from fp8 to fp4 (Blackwell Ultra gives FP4 more).
    assert one.tflops.get("fp8", one.tflops["bf16"] * 2) <= one.tflops["bf16"] * 2.1
    assert one.link_gb_s(1) >= 0
    assert one.link_gb_s(1024) <= 64


@pytest.mark.parametrize("one", gpus(), ids=lambda one: one.name)
def test_formats_that_a_gpu_can_run_have_a_rate(one) -> None:  # type: ignore[no-untyped-def]
    for form, arithmetic in (("fp8", "fp8"), ("nvfp4", "fp4")):
        refused = [found for found in support(one, form, "auto", "pytorch") if found.severity == "error"]
        assert (arithmetic in gpu_rates(one.name).tflops) == (not refused)


def test_cards_are_bridged_in_pairs_only() -> None:
    card = gpu_rates("h100-pcie-80g")
    assert card.has_nvlink(2)
    assert not card.has_nvlink(4)
    assert card.link_gb_s(2) == 300
    assert card.link_gb_s(4) == 64
    assert not gpu_rates("l40s-48g").has_nvlink(2)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="not known"):
        gpu_rates("h100-sxm-96g")

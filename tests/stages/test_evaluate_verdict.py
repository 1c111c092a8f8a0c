"""The gate: each budget on both sides, what is advised, and the report that is kept."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StageError
from pipeline.recipe import Gate
from pipeline.stages.evaluate.gate import judge, render, write_report
from pipeline.stages.evaluate.results import (
    BootstrapEstimate,
    EvaluationMetrics,
    KlHistogram,
    WorstPosition,
    read_metrics,
    write_metrics,
)

NASTY = "</td><script>alert('x')</script> & \"안녕\" 😀 \n"
METRICS = EvaluationMetrics(
    files="trtllm-tp1",
    format="int4_awq",
    group_size=128,
    kv_cache="FP8",
    kv_scale=None,
    samples=64,
    positions=4731,
    calibration_samples=128,
    reference_perplexity=45.591,
    quantized_perplexity=46.5,
    perplexity_increase=BootstrapEstimate(0.0199, 0.015, 0.025),
    top1_agreement=BootstrapEstimate(0.97, 0.965, 0.975),
    mean_kl=BootstrapEstimate(0.003, 0.002, 0.004),
    p99_kl=0.05,
    max_kl=0.7,
    histogram=KlHistogram((1e-6, 1e-3, 1.0), (4000, 700), 31),
    worst=(WorstPosition(3, 17, 0.7, NASTY, NASTY, "a", 0.9, "b", 0.4),),
)
BUDGETS = {"max_perplexity_increase": 0.02, "min_top1_agreement": 0.97, "max_kl": 0.004}


def test_at_the_limits_it_passes() -> None:
    verdict = judge([METRICS], Gate(**BUDGETS))
    assert verdict.passed
    assert [check.passed for check in verdict.checks] == [True, True, True]
    assert str(verdict) == f"trtllm-tp1: {verdict.summary['trtllm-tp1']}"
    assert "45.59 -> 46.5 (+1.99%)" in str(verdict)
    assert "4731 positions of 64 samples" in str(verdict)


def test_every_export_is_held_to_the_budgets_and_named() -> None:
    worse = dataclasses.replace(METRICS, files="hf", top1_agreement=BootstrapEstimate(0.969, 0.96, 0.98))
    verdict = judge([METRICS, worse], Gate(**BUDGETS))
    assert list(verdict.summary) == ["trtllm-tp1", "hf"]
    assert [(check.files, check.key) for check in verdict.checks if not check.passed] == [
        ("hf", "min_top1_agreement")
    ]
    assert "OVER    hf: top-1 agreement 96.90%" in str(verdict)
    assert "within  trtllm-tp1: top-1 agreement 97.00%" in str(verdict)


@pytest.mark.parametrize(
    ("budget", "limit"),
    [("max_perplexity_increase", 0.0198), ("min_top1_agreement", 0.971), ("max_kl", 0.0029)],
)
def test_one_budget_that_is_exceeded_is_enough(budget: str, limit: float) -> None:
    verdict = judge([METRICS], Gate(**{**BUDGETS, budget: limit}))
    assert not verdict.passed
    assert [check.key for check in verdict.checks if not check.passed] == [budget]
    assert "OVER" in str(verdict)
    assert f"quantization.gate.{budget}" in verdict.advice[-1]


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_wider_budget_never_turns_a_pass_into_a_fail(first: float, second: float) -> None:
    narrow, wide = sorted((first, second))
    if judge([METRICS], Gate(**{**BUDGETS, "max_perplexity_increase": narrow})).passed:
        assert judge([METRICS], Gate(**{**BUDGETS, "max_perplexity_increase": wide})).passed


def test_without_a_gate_nothing_is_refused() -> None:
    verdict = judge([METRICS], None)
    assert verdict.passed
    assert verdict.checks == ()


def test_what_is_advised_fits_what_was_done() -> None:
    tight = Gate(max_perplexity_increase=0.001)
    text = "\n".join(judge([METRICS], tight).advice)
    for part in (
        "kv_cache: auto",
        "awq_block_size: 64",
        "format: fp8",
        "samples: 512 (more of them, now 128)",
    ):
        assert part in text
    w4a8 = "\n".join(judge([dataclasses.replace(METRICS, format="w4a8_awq")], tight).advice)
    assert "awq_block_size" not in w4a8
    assert "format: int4_awq" in w4a8
    fp8 = dataclasses.replace(METRICS, format="fp8", group_size=None, kv_cache=None, calibration_samples=512)
    text = "\n".join(judge([fp8], tight).advice)
    assert "kv_cache" not in text
    assert "awq_block_size" not in text
    assert "samples: 512" not in text
    assert "format: int8_sq" in text


def test_a_limit_within_the_error_is_said_to_be() -> None:
    verdict = judge([METRICS], Gate(max_perplexity_increase=0.018, min_top1_agreement=0.5))
    (increase, agreement) = verdict.checks
    assert increase.close
    assert not agreement.close
    assert any("gate.samples: more" in advice for advice in verdict.advice)


def test_metrics_are_read_back_as_they_were(tmp_path: Path) -> None:
    both = (METRICS, dataclasses.replace(METRICS, files="hf", kv_scale=1.0))
    write_metrics(both, tmp_path)
    assert read_metrics(tmp_path) == both


def test_figures_of_another_version_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps({"schema": 1, "format": "fp8"}))
    with pytest.raises(StageError, match="evaluate again"):
        read_metrics(tmp_path)


class Page(HTMLParser):
    """The tags of a page, and whether they nest."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str | None] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("gate", [None, Gate(**BUDGETS), Gate(max_perplexity_increase=0.001)])
def test_the_report_is_whole_and_needs_nothing_else(tmp_path: Path, gate: Gate | None) -> None:
    verdict = judge([METRICS], gate)
    write_report([METRICS, dataclasses.replace(METRICS, files="hf")], verdict, tmp_path / "new/report")
    content = json.loads((tmp_path / "new/report/report.json").read_text(encoding="utf-8"))
    assert content["verdict"]["passed"] is verdict.passed
    assert [metric["files"] for metric in content["metrics"]] == ["trtllm-tp1", "hf"]
    assert content["metrics"][1]["positions"] == 4731
    text = (tmp_path / "new/report/report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == ["html"]
    assert "script" not in page.tags
    assert page.addresses == []
    assert page.tags.count("rect") == 2 * 2
    assert "trtllm-tp1 and hf" in text
    assert "url(" not in text
    assert "안녕" in text
    for advice in verdict.advice:
        assert advice.split("(")[0].replace("&", "&amp;").strip() in re.sub(r"\s+", " ", text)


def test_the_verdict_is_the_first_thing_on_the_page() -> None:
    over = render([METRICS], judge([METRICS], Gate(max_perplexity_increase=0.001)))
    within = render([METRICS], judge([METRICS], Gate(**BUDGETS)))
    assert ">over budget<" in over
    assert ">within budget<" in within
    assert "not judged" in render([METRICS], judge([METRICS], None))

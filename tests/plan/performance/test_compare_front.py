"""Deployments side by side: the ranking, the front, and how both are drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidInput, UserError
from pipeline.plan.model_facts import known_sizes
from pipeline.plan.performance import Workload
from pipeline.plan.performance.compare import Comparison, Question, compare
from pipeline.plan.performance.front import front
from pipeline.plan.performance.plots import front_lines, front_page, front_picture
from pipeline.plan.performance.plots.axes import Axis
from pipeline.plan.performance.workload import read_asked
from pipeline.recipe import Recipe, Slo, load_recipe

DEVICES = ("h100-sxm-80g", "l40s-48g", "a100-sxm-80g", "l4-24g")
QUESTION = Question(Workload(1000, 200), DEVICES, dict(zip(DEVICES, (2.5, 1.0, 1.5, 0.5), strict=True)), 0.8)


@cache
def recipe() -> Recipe:
    return load_recipe("llama-3.1-8b-fp8", ())


def ask(question: Question = QUESTION, of: Recipe | None = None) -> Comparison:
    chosen = of or recipe()
    return compare(chosen, known_sizes(chosen), question)


@cache
def found() -> Comparison:
    return ask()


def test_every_combination_is_ranked_or_refused_with_a_reason() -> None:
    seen = found()
    labels = [option.label for option in (*seen.serving, *seen.refused)]
    assert len(set(labels)) == len(labels)
    assert {option.gpu for option in (*seen.serving, *seen.refused)} == set(DEVICES)
    assert "1 x l40s-48g fp8 + draft" in labels
    assert "1 x a100-sxm-80g fp8" not in labels  # Ampere has no FP8
    assert all(option.reasons and option.best is None for option in seen.refused)
    assert all(not option.reasons and option.cost for option in seen.serving)
    costs = [option.cost.per_million_output for option in seen.serving if option.cost]
    assert costs == sorted(costs)


def test_the_best_loads_meet_the_slo() -> None:
    slo = recipe().slo
    assert slo.ttft_p95_ms
    assert slo.itl_p95_ms
    for place in found().places:
        assert place.load.ttft_ms <= slo.ttft_p95_ms
        assert place.load.itl_p95_ms <= slo.itl_p95_ms
    for option in found().serving:
        assert option.best
        assert 1 <= option.best.batch <= min(option.sequences, recipe().limits.max_concurrency)


def test_nothing_beats_the_front() -> None:
    seen = found()
    assert seen.front
    for kept in seen.front:
        for other in seen.places:
            assert not (other.load.itl_ms < kept.load.itl_ms and other.spent < kept.spent)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_a_front_is_what_no_other_point_beats(points: list[tuple[int, int]]) -> None:
    kept = front(points, lambda point: point[0], lambda point: point[1])
    for point in points:
        beaten = any(p != point and p[0] <= point[0] and p[1] <= point[1] for p in points)
        assert (point in kept) == (not beaten)
    assert kept == sorted(set(kept))


def test_a_price_moves_the_ranking_and_nothing_else() -> None:
    dear = ask(replace(QUESTION, prices={**QUESTION.prices, "h100-sxm-80g": 250.0}))
    assert dear.serving[0].gpu != "h100-sxm-80g"
    assert {option.label for option in dear.serving} == {option.label for option in found().serving}


def test_without_prices_gpu_time_ranks_and_without_acceptance_no_draft_is_there() -> None:
    seen = ask(replace(QUESTION, prices={"l4-24g": 0.5}, acceptance=None))
    times = [option.gpu_seconds for option in seen.serving]
    assert times == sorted(times)
    assert not any(option.draft for option in (*seen.serving, *seen.refused))
    assert [option.gpu for option in seen.serving if option.cost] == ["l4-24g"] * sum(
        option.gpu == "l4-24g" for option in seen.serving
    )


def test_an_slo_that_nothing_meets_is_said_to_be_missed() -> None:
    strict = recipe().model_copy(update={"slo": Slo(itl_p95_ms=0.001)})
    seen = ask(of=strict)
    assert not seen.serving
    assert not seen.front
    assert list(front_lines(seen, 100)) == []
    assert "Nothing serves" in front_page(seen)
    with pytest.raises(UserError, match=r"nothing to draw|matplotlib"):
        front_picture(seen)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.circles: list[dict[str, str | None]] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "circle":
            self.circles.append(dict(attrs))
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_draws_each_load_and_needs_nothing_else() -> None:
    page = _Page()
    page.feed(front_page(found()))
    assert not page.open
    assert not page.links
    assert len(page.circles) == len(found().places)
    assert sum(one["class"] == "front" for one in page.circles) == len(found().front)
    for one in page.circles:
        assert 80 <= float(one["cx"] or 0) <= 940
        assert 20 <= float(one["cy"] or 0) <= 480
    text = " ".join(page.text)
    assert all(place.option.label in text for place in found().places)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_the_whole_front(width: int) -> None:
    lines = list(front_lines(found(), width))
    drawn = lines[1 : lines.index(next(line for line in lines if "+--" in line))]
    assert all(len(line) <= max(width, 34) for line in drawn)
    assert all(any(place.option.label in line for line in lines) for place in found().front)


def test_a_picture_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert front_picture(found()).startswith(b"\x89PNG")


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"\[plot\].*\.html"):
        front_picture(found())


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20))
def test_an_axis_holds_all_values(values: list[float]) -> None:
    axis = Axis.over(values)
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert all(axis.low <= mark <= axis.high for mark in axis.marks())


def test_words_are_read_with_every_fault_at_once() -> None:
    asked = read_asked(devices="h100,l4-24g", prices=["h100=2.5", "h100-pcie-80g=2"], acceptance=1.0)
    assert asked.devices == ("h100-sxm-80g", "h100-pcie-80g", "h100-nvl-94g", "l4-24g")
    assert asked.prices == {"h100-sxm-80g": 2.5, "h100-pcie-80g": 2.0, "h100-nvl-94g": 2.5}
    with pytest.raises(InvalidInput) as raised:
        read_asked(
            devices="h101,",
            prices=["h100", "h100=-1", "h100=nan", "k80=1"],
            prompt_tokens=0,
            output_tokens=-5,
            acceptance=1.5,
        )
    assert len(raised.value.faults) == 9
    assert {fault.key for fault in raised.value.faults} == {
        "--gpus", "--price", "--prompt-tokens", "--output-tokens", "--acceptance",
    }  # fmt: skip


def test_devices_are_those_asked_for_then_those_with_a_price_then_all() -> None:
    limits = recipe().limits
    assert read_asked(devices="l4", prices=["h200=3"]).question(limits).devices == ("l4-24g",)
    assert read_asked(prices=["h200=3"]).question(limits).devices == ("h200-sxm-141g",)
    assert len(read_asked().question(limits).devices) > 20
    assert read_asked().question(limits).work == Workload(8192, 1024)

"""A comparison of deployments drawn: in the terminal, as a page, and as a picture."""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.render.front import Axis, draw, front_lines, front_page, front_png
from pipeline.errors import UserError
from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.performance import Workload
from pipeline.plan.performance.compare import Comparison, ComparisonSettings, compare
from pipeline.recipe import Slo, load_recipe

DEVICES = ("h100-sxm-80g", "l40s-48g", "a100-sxm-80g", "l4-24g")
QUESTION = ComparisonSettings(
    Workload(1000, 200), DEVICES, dict(zip(DEVICES, (2.5, 1.0, 1.5, 0.5), strict=True)), 0.8
)


@cache
def found() -> Comparison:
    recipe = load_recipe("llama-3.1-8b-fp8", ())
    return compare(recipe, offline_sizes(recipe), QUESTION)


def test_nothing_is_drawn_where_nothing_serves() -> None:
    pytest.importorskip("matplotlib")
    recipe = load_recipe("llama-3.1-8b-fp8", ()).model_copy(update={"slo": Slo(itl_p95_ms=0.001)})
    seen = compare(recipe, offline_sizes(recipe), QUESTION)
    assert list(front_lines(seen, 100)) == []
    assert "Nothing serves" in front_page(seen)
    with pytest.raises(UserError, match="nothing to draw"):
        front_png(seen)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag != "meta":
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    assert not parser.open
    assert all(link.startswith("#") for link in parser.links), "nothing is loaded from elsewhere"
    return parser


def test_the_page_draws_each_load_with_a_tooltip() -> None:
    pytest.importorskip("matplotlib")
    page = front_page(found())
    assert page.count("<title>") == 1 + len(found().places)
    assert "<svg" in page
    text = " ".join(read(page).text)
    assert all(place.option.label in text for place in found().places)


def test_labels_do_not_overlap() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw(found())
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [label.get_window_extent(renderer) for label in figure.axes[0].texts]
    assert boxes
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_a_picture_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert front_png(found()).startswith(b"\x89PNG")


def test_without_matplotlib_the_page_has_the_drawing_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"\[plot\].*\.html"):
        front_png(found())
    page = front_page(found())
    assert "<pre " in page
    assert "<svg" not in page
    assert any("[plot]" in text for text in read(page).text)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_the_whole_front(width: int) -> None:
    lines = list(front_lines(found(), width))
    drawn = lines[1 : lines.index(next(line for line in lines if "+--" in line))]
    assert all(len(line) <= max(width, 34) for line in drawn)
    assert all(any(place.option.label in line for line in lines) for place in found().front)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20))
def test_an_axis_holds_all_values(values: list[float]) -> None:
    axis = Axis.over(values)
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert all(axis.low <= mark <= axis.high for mark in axis.marks())

"""The page of a run: it loads nothing, says what a person needs, and stands whatever a run came to."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.bench.load_settings import Load
from pipeline.bench.page import page, write_page
from pipeline.bench.result import BenchForecast, BenchResult, ForecastPoint, LevelResult
from pipeline.bench.verdict import verdict, warnings
from tests.support.benched import failed_level, level, result
from tests.support.browser import opened
from tests.support.downloads import Unavailable, chromium

LOADS = (1, 4, 16, 32)
FORECAST = BenchForecast(
    device="h100-sxm-80g",
    source="published figures",
    points=(
        *(
            ForecastPoint(
                concurrency=load,
                ttft_p95_ms=30 + load,
                tpot_mean_ms=11,
                itl_p95_ms=14,
                output_tokens_per_s=70 * load,
            )
            for load in LOADS[:-1]
        ),
        None,
    ),
)


def levels(loads: Sequence[float] = LOADS, kind: str = "concurrency") -> list[LevelResult]:
    return [level(Load(kind, load), spread=0.2, seconds=4) for load in loads]  # type: ignore[arg-type]


class Read(HTMLParser):
    """What a page refers to, what it names, and how it describes its pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.alts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("src", "href", "xlink:href") if name in found]
        self.links += re.findall(r"url\(([^)]*)\)", " ".join(found.values()))
        if tag == "svg":
            assert found["role"] == "img"
            self.alts.append(found["aria-label"])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of tables alone, which is made at once."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture(scope="module")
def drawn() -> str:
    pytest.importorskip("matplotlib")
    return page(result(levels((1, 16, 32)), forecast=FORECAST))


def test_it_loads_nothing_and_describes_its_pictures(drawn: str) -> None:
    read = Read(drawn)
    assert not {"script", "link", "iframe", "img"} & set(read.tags)
    assert "@import" not in drawn
    assert len(read.ids) == len(set(read.ids))
    assert {link.removeprefix("#") for link in read.links} <= set(read.ids)
    assert len(read.alts) == 4 + 2 + 4 + 3
    assert all(any(f"{load} at a time" in alt for alt in read.alts) for load in (1, 16, 32))


def test_a_browser_shows_it_on_a_narrow_screen_without_the_network(drawn: str, tmp_path: Path) -> None:
    try:
        browser = chromium()
    except Unavailable as error:
        pytest.skip(f"Chromium: {error}")
    file = tmp_path / "bench.html"
    file.write_text(drawn, encoding="utf-8")
    with opened(browser) as shown:
        shown.resize(390, 800)
        shown.load(file.as_uri())
        assert shown.text("h1") == "tiny-cpu under load"
        assert shown.value("performance.getEntriesByType('resource').length") == 0
        assert shown.value("document.documentElement.scrollWidth <= innerWidth")
        assert shown.value(
            "[...document.querySelectorAll('figure svg')].every(one => one.clientHeight > 100)"
        )


@pytest.mark.usefixtures("undrawn")
def test_measured_stands_beside_forecast() -> None:
    run = result(levels(), forecast=FORECAST)
    tokens_per_s, computed = run.levels[0].output_tokens_per_s, 70.0
    text = page(run)
    assert f"{computed / tokens_per_s - 1:+.0%}"[:-1] in text
    assert "published figures" in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_forecast_says_why() -> None:
    assert "There is none: this is a test." in page(result(levels((1,))))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("made", "tone", "words"),
    [
        (lambda: result(levels((1, 4))), "good", "holds at all loads"),
        (lambda: result(levels()), "mixed", r"holds with 16 at a time.*With 32 at a time, .*ITL p95 is .* of 50 ms"),
        (lambda: result(levels((32, 64))), "bad", "does not hold at any load: with 32 at a time"),
        (lambda: result([level(Load("concurrency", 1), seconds=4, slo=None)], slo=None), "none", "has no SLO"),
        (lambda: result([failed_level(Load("rate", 2), "gone")]), "bad", "Not one request"),
    ],
)  # fmt: skip
def test_a_sentence_says_what_came_of_it(made: object, tone: str, words: str) -> None:
    run = made()  # type: ignore[operator]
    assert isinstance(run, BenchResult)
    found, sentence = verdict(run)
    assert found == tone
    assert re.search(words, sentence)
    assert sentence.split(":")[0] in page(run)


@pytest.mark.usefixtures("undrawn")
def test_warnings_that_differ_in_numbers_alone_are_one() -> None:
    run = result(levels((1, 4)))
    late = [
        level.model_copy(update={"warnings": (f"it was {ms} ms late at the 99th percentile",)})
        for level, ms in zip(run.levels, (12.5, 9), strict=True)
    ]
    run = run.model_copy(update={"levels": tuple(late), "warnings": ("the prompts are few",)})
    assert list(warnings(run)) == [
        "the prompts are few",
        "with 1 and 4 at a time: it was 9 to 12.5 ms late at the 99th percentile",
    ]
    assert "It was 9 to 12.5" not in page(run)
    assert "With 1 and 4 at a time: it was 9 to 12.5 ms late" in page(run)


@pytest.mark.slow
def test_any_run_has_a_page() -> None:
    pytest.importorskip("matplotlib")
    odd = [
        failed_level(Load("concurrency", 4), "<script>alert(1)</script> & 'more'"),
        level(Load("trace", 1), lambda _: (1e-3, 1e-3), seconds=1e-3),
        *levels((2,), "rate"),
    ]
    text = page(result(odd, name="<b>bold</b>"))
    assert "<script" not in text
    assert "<b>bold" not in text
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


@pytest.mark.usefixtures("undrawn")
def test_without_matplotlib_there_are_tables(tmp_path: Path) -> None:
    write_page(result(levels((1, 4))), tmp_path / "bench.html")
    text = (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "[bench]" in text
    assert "4 at a time" in text

"""The page at /, as somebody sees it who opens it in Chromium and asks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pipeline.client.testing import Ending, Reply
from tests.gateway.conftest import Start
from tests.support.browser import Page, Unavailable, chromium, opened

LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
IDLE = "document.querySelector('#send').textContent === 'Send'"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    try:
        browser = chromium()
    except Unavailable as error:
        pytest.skip(f"Chromium: {error}")
    with opened(browser) as page:
        yield page


def ask(page: Page, text: str) -> None:
    page.wait_for("document.querySelector('#model').value === 'tiny'")
    page.click("#text")
    page.type(text)


def test_an_answer_streams_with_its_figures_and_comes_from_the_cache_next_time(
    page: Page, start: Start
) -> None:
    running = start(Reply(["On ", "its ", "<b>way</b>", "."], delay_s=0.25), cached=True)
    page.load(running.url)
    ask(page, "Where is my parcel?")
    page.wait_for(f"{LAST}?.textContent === 'On '")
    assert page.text("#send") == "Stop", "the answer is shown while it comes"
    page.wait_for(IDLE)
    assert page.text(".user") == "Where is my parcel?"
    assert page.text(".assistant").startswith("On its <b>way</b>.TTFT")
    assert re.fullmatch(r"\d+\.\d ms", page.text("#ttft"))
    assert float(page.text("#p50").removesuffix(" ms")) > 100
    assert len(page.value("document.querySelector('#line').getAttribute('points')").split()) == 3
    assert page.text("#cached") == "no"
    page.click("#clear")
    ask(page, "Where is my parcel?")
    page.wait_for("document.querySelector('#cached').textContent === 'hit (exact)'")
    page.wait_for(IDLE)
    assert page.text(".assistant").startswith("On its <b>way</b>.TTFT")
    assert page.text(".assistant").endswith("cache: hit (exact)")
    assert len(running.upstream.requests) == 1


def test_an_error_is_shown_and_stop_stops(page: Page, start: Start) -> None:
    running = start([Reply(["a"], ending=Ending.ERROR, error="it broke"), Reply(["a"], ending=Ending.HANG)])
    page.load(running.url)
    ask(page, "One")
    page.wait_for("document.querySelector('.error')?.textContent.includes('it broke')")
    ask(page, "Two")
    page.wait_for(f"{LAST}.textContent === 'a' && !({IDLE})")
    page.click("#send")
    page.wait_for(IDLE)
    assert running.upstream.requests[1].cancelled.wait(20)

"""The page at /, as somebody sees it who opens it in Chromium and asks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pipeline.client.testing import Ending, Reply
from pipeline.gateway.api import model_answer
from tests.gateway.conftest import Running, Start, keyed
from tests.support.browser import Page, opened
from tests.support.downloads import Unavailable, chromium

LAST = "[...document.querySelectorAll('.assistant .body')].at(-1)"
IDLE = "document.querySelector('#send').textContent === 'Send'"
HANGING = Reply(["a"], ending=Ending.HANG)


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


def answered(page: Page, text: str, times: int = 1) -> None:
    """Ask, and wait for the end of the answer."""
    ask(page, text)
    page.wait_for(f"{IDLE} && document.querySelectorAll('.assistant .note').length === {times}")


def button(text: str) -> str:
    return f"[...document.querySelectorAll('.note button')].find(one => one.textContent === '{text}')"


def prompts(running: Running) -> list[str]:
    return [request.prompt for request in running.upstream.requests]


def test_an_answer_streams_with_its_figures_and_comes_from_the_cache_next_time(
    page: Page, start: Start
) -> None:
    running = start(Reply(["On ", "its ", "<b>way</b>", "."], delay_s=0.25), cached=True)
    page.load(running.url)
    ask(page, "Where is my parcel?")
    page.wait_for(IDLE)
    assert page.text(".user") == "Where is my parcel?"
    assert page.text(".assistant .body") == "On its <b>way</b>."
    assert page.text(".note").startswith("TTFT")
    assert re.fullmatch(r"\d+\.\d ms", page.text("#ttft"))
    assert float(page.text("#p50").removesuffix(" ms")) > 100
    # Of the gaps between four tokens; a busy machine may show some of them at once.
    assert 1 <= len(page.value("document.querySelector('#line').getAttribute('points')").split()) <= 3
    assert page.text("#cached") == "no"
    page.click("#clear")
    ask(page, "Where is my parcel?")
    page.wait_for("document.querySelector('#cached').textContent === 'hit (exact)'")
    page.wait_for(IDLE)
    assert page.text(".assistant .body") == "On its <b>way</b>."
    assert "cache: hit (exact)" in page.text(".note")
    assert len(running.upstream.requests) == 1


def test_signs_of_life_are_no_part_of_an_answer(
    page: Page, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_answer, "KEEP_ALIVE_S", 0.05)
    running = start(Reply(["late"], first_delay_s=0.5))
    page.load(running.url)
    page.click("#clear")
    ask(page, "Where is my parcel?")
    page.wait_for(IDLE)
    assert page.text(".assistant .body") == "late"


def test_stop_keeps_question_and_partial_answer_also_over_a_reload(page: Page, start: Start) -> None:
    running = start([HANGING, Reply(["b"]), HANGING])
    page.load(running.url)
    page.click("#adjust")
    page.value("document.querySelector('#system').value = 'Be brief.'")
    ask(page, "One")
    page.wait_for(f"{LAST}?.textContent === 'a'")
    assert page.text("#send") == "Stop", "the answer is shown while it comes"
    page.press("Escape")
    page.wait_for(IDLE)
    assert running.upstream.requests[0].cancelled.wait(20)
    assert page.text(".note").startswith("stopped")
    page.load(f"{running.url}/?again")
    assert page.text(".assistant .body") == "a"
    answered(page, "Two", times=2)
    assert prompts(running)[1] == "system: Be brief.\nuser: One\nassistant: a\nuser: Two\n"
    ask(page, "Three")
    page.wait_for("document.querySelectorAll('.user').length === 3")
    page.wait_for(f"{LAST}.textContent === 'a'")
    page.click("#clear")
    assert running.upstream.requests[2].cancelled.wait(20), (
        "a new conversation ends the answer of the old one"
    )
    assert page.value(f"{IDLE} && document.querySelectorAll('article').length") == 0


def test_an_error_keeps_the_question_and_offers_a_retry(page: Page, start: Start) -> None:
    running = start([Reply(["a"], ending=Ending.ERROR, error="it broke"), Reply(["b"])])
    page.load(running.url)
    page.click("#clear")
    ask(page, "word " * 60)
    page.wait_for("document.querySelector('.error')?.textContent.includes('at most 50 tokens')")
    page.value(f"{button('Edit')}.click()")
    assert page.value("document.querySelector('#text').value").startswith("word word")
    page.value("document.querySelector('#text').value = ''")
    ask(page, "One")
    page.wait_for("document.querySelector('.error')?.textContent.includes('it broke')")
    assert (page.text(".user"), page.text(".assistant .body")) == ("One", "a")
    page.value(f"{button('Retry')}.click()")
    page.wait_for(f"{IDLE} && {LAST}.textContent === 'b'")
    assert page.value("document.querySelector('.error')") is None
    assert prompts(running)[0] == prompts(running)[1]


def test_the_page_begins_with_its_model_and_questions_to_try(page: Page, start: Start) -> None:
    running = start(Reply(["a"]), aliases=("small",))
    page.load(running.url)
    page.click("#clear")
    page.wait_for("document.querySelector('#start b')?.textContent === 'tiny'")
    page.value("document.querySelector('#model').value = 'small'")
    page.value("document.querySelector('#model').dispatchEvent(new Event('change'))")
    assert page.text("#start b") == "small"
    assert page.value("document.querySelectorAll('#start button').length") == 3
    page.click("#start button")
    page.wait_for(f"{IDLE} && document.querySelectorAll('.assistant .note').length === 1")
    assert page.text(".user") == "How do I reset my password?"
    assert page.value("document.querySelector('#start')") is None
    assert prompts(running) == ["user: How do I reset my password?\n"]


def test_missing_key_is_asked_for(page: Page, start: Start) -> None:
    running = start(Reply(["a"]), tenants=keyed("secret"))
    page.load(running.url)
    for key, told in (
        ("wrong", "This gateway asks for an API key."),
        ("secret", "Incorrect API key provided"),
    ):
        page.wait_for(
            f"document.querySelector('#unlock').open && document.querySelector('#why').textContent === '{told}'"
        )
        page.click("#key")
        page.type(key)
    answered(page, "One")
    assert page.text(".assistant .body") == "a"
    page.load(f"{running.url}/?again")
    page.wait_for("document.querySelector('#model').value === 'tiny'")
    assert page.value("document.querySelector('#unlock').open") is False
    page.value("sessionStorage.setItem('key', 'wrong')")
    ask(page, "Two")
    page.wait_for("document.querySelector('#unlock').open")
    page.click("#key")
    page.type("secret")
    page.wait_for(
        f"{IDLE} && document.querySelectorAll('.note').length === 2 && !document.querySelector('.error')"
    )
    assert len(running.upstream.requests) == 2


MARKDOWN = """## Head
Some **bold `x`** and [a link](javascript:alert(1)).
<img src=x onerror=alert(1)>

- one
  - two
1. three
```html
<b>**raw**</b>
```
end"""
NODES = (
    "<h3>Head</h3><p>Some <strong>bold <code>x</code></strong> and [a link](javascript:alert(1)).\n"
    "&lt;img src=x onerror=alert(1)&gt;</p><ul><li>one</li><li>two</li></ul><ol><li>three</li></ol>"
    "<pre><code>&lt;b&gt;**raw**&lt;/b&gt;\n</code></pre><p>end</p>"
)


def test_markdown_becomes_nodes_and_never_html(page: Page, start: Start) -> None:
    running = start(Reply([MARKDOWN]))
    page.load(running.url)
    page.click("#clear")
    answered(page, "One")
    html = page.value("document.querySelector('.assistant .body').innerHTML")
    assert re.sub(r' (style|value|tabindex)="[^"]*"', "", html) == NODES
    page.value("navigator.clipboard.writeText = async text => { window.copied = text }")
    page.value(f"{button('Copy')}.click()")
    page.wait_for(f"{button('Copied')} !== undefined")
    assert page.value("window.copied") == MARKDOWN


def test_it_keeps_to_its_policy_and_everything_has_a_name(page: Page, start: Start) -> None:
    """Nothing of it comes from elsewhere; most of a phone's screen is the conversation."""
    page.load(start().url)
    page.wait_for("document.querySelector('#model').value === 'tiny'")
    inject = (
        "const s = document.createElement('script'); s.text = 'window.injected = 1'; document.body.append(s)"
    )
    assert page.value(f"{inject}; window.injected") is None
    blocked = "fetch('http://localhost:1').then(() => 'sent', () => 'not sent')"
    violation = (
        "new Promise(done => document.addEventListener('securitypolicyviolation', "
        "one => done(one.effectiveDirective)))"
    )
    assert page.value(f"(() => {{ const seen = {violation}; {blocked}; return seen }})()") == "connect-src"
    nameless = (
        "[...document.querySelectorAll('button, input, select, textarea')].filter(one => "
        "!(one.ariaLabel || one.labels.length || one.textContent.trim())).map(one => one.id)"
    )
    assert page.value(nameless) == []
    try:
        page.resize(390, 664)
        height, width = page.value(
            "[document.querySelector('#talk').clientHeight / innerHeight, document.body.scrollWidth]"
        )
    finally:
        page.resize(800, 600)
    assert (height > 0.7, width <= 390) == (True, True), (height, width)

"""Fetch the browser, so that the tests that follow need no network."""

from __future__ import annotations

from tests.support.browser.install import Unavailable, chromium

try:
    print(chromium().program)
except Unavailable as error:
    print(f"{error}: tests of pages will be skipped")

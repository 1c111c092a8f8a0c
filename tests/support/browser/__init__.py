"""Headless Chromium for tests of pages: put on this machine without installing it, and told what to do by DevTools."""

from __future__ import annotations

from tests.support.browser.install import Unavailable, chromium
from tests.support.browser.page import Page, opened

__all__ = ["Page", "Unavailable", "chromium", "opened"]

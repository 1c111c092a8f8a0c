"""Fetch what is named, by default everything, so that the tests that follow need no network."""

from __future__ import annotations

import sys

from tests.support.servers.install import DEBIAN, WHEELS, Unavailable, installed

for name in sys.argv[1:] or (*WHEELS, *DEBIAN):
    try:
        print(installed(name))
    except Unavailable as error:
        print(f"{error}: tests of {name} will be skipped")

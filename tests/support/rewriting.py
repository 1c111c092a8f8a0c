"""Rewriting of assertions, half of what a first collection takes, shared by the processes of a run.

Each process reads all tests, and would rewrite all of them.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, number: int, count: int) -> None:
    """Rewrite every `count`-th file of tests of which pytest keeps nothing yet; it finds them when it imports them."""
    # What fails here pytest does itself, and tells of: a file with a fault; a later release that does it otherwise.
    with suppress(AttributeError, TypeError, SyntaxError, OSError):
        state = config.stash[rewrite.assertstate_key]
        named = [config.invocation_params.dir / name.partition("::")[0] for name in config.args]
        files = {file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])}
        for source in sorted(files)[number::count]:
            kept = rewrite.get_cache_dir(source) / f"{source.stem}{rewrite.PYC_TAIL}"
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                stat, code = rewrite._rewrite_test(source, config)
                rewrite._write_pyc(state, code, stat, kept)

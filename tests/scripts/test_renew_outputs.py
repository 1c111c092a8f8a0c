"""scripts/renew_outputs before pages with blocks of both kinds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "renew_outputs"
PAGE = """# A page

<!-- output: echo right -->
```text
{always}
```

<!-- output (varies): echo took 1.5 s -->
```text
{varies}
```
"""


@pytest.mark.parametrize(
    ("always", "varies", "words", "code"),
    [
        ("right", "anything", (), 0),
        ("wrong", "took 7 s", (), 1),
        ("right", "took 27.31 s", ("--all",), 0),
        ("right", "lasted 1.5 s", ("--all",), 1),
    ],
)
def test_a_check_changes_nothing_and_says_what_is_stale(
    always: str, varies: str, words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    text = PAGE.format(always=always, varies=varies)
    page.write_text(text)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check", *words, page],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, page.read_text()) == (code, text), done.stderr
    shown = "+right" if always == "wrong" else "+took 1.5 s"
    assert (shown in done.stdout) == bool(code)

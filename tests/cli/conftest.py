"""The command line as a user calls it, run in this process."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.main import main
from pipeline.store import Store


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code, and all that it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    return Store.default()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`run("store", "ls", stdin="…")`, by the entry point, with the store `tmp_path/store`."""
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))

    def run(*words: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["pipeline", *words])
        typed = io.BytesIO(stdin.encode())
        typed.name = "<stdin>"  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, "utf-8"))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as caught:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Done(int(caught.value.code or 0), out, err)

    return run

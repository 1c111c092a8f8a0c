"""Files that are not what they should be, met by the commands: one message that names them, and exit code 2."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import resources
from pipeline.cli.main import main

CHECKPOINT = resources.folder("recipes") / "checkpoints" / "support-draft"


@dataclass(frozen=True)
class Ended:
    """What a command left."""

    code: int
    out: str
    err: str


class Commands:
    """Runs `pipeline` in this process, with a store and a recipe of one local checkpoint."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.checkpoint = folder / "model"
        shutil.copytree(CHECKPOINT, self.checkpoint)
        self.store = folder / "store"
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(
            f"name: r\nmodel: {{source: 'local:{self.checkpoint}'}}\nruntime: {{kind: cpu, threads: 1}}\n"
            "limits: {max_input_tokens: 64, max_output_tokens: 16, max_concurrency: 2}\n"
        )
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("PIPELINE_STORE", str(self.store))

    def run(self, *arguments: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["pipeline", *arguments])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, said.out, said.err)

    def refused(self, *arguments: str) -> str:
        """The one message of a command that is given something wrong."""
        ended = self.run(*arguments)
        assert ended.code == 2, (ended.out, ended.err)
        assert "Traceback" not in ended.err
        assert ended.err.count("pipeline: ") == 1
        return ended.err


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


def test_nothing_hangs_on_a_pipe_or_leaves_the_folder(commands: Commands) -> None:
    """A config.json that is a named pipe: today's commands wait for somebody who writes into it, for ever."""
    for name in ("config.json", "tokenizer_config.json"):
        (commands.checkpoint / name).unlink(missing_ok=True)
        os.mkfifo(commands.checkpoint / name)
    (commands.checkpoint / "tokenizer.json").unlink()
    (commands.checkpoint / "tokenizer.json").symlink_to("/etc/hostname")
    recipe = str(commands.recipe)
    for verb in (
        ["plan", recipe],
        ["build", recipe],
        ["build", recipe, "--dry-run"],
        ["serve", recipe, "--build"],
    ):
        told = commands.refused(*verb)
        for name in ("config.json", "tokenizer_config.json"):
            assert f"model/{name}: is a named pipe, not a regular file" in told
        assert "model/tokenizer.json: is a link to /etc/hostname, outside of the folder" in told
    commands.run("recipes", "validate", recipe)
    commands.run("doctor", recipe)
    assert not (commands.store / "artifacts").exists()

"""The stand-in Docker, set up: images that are here or in a registry, and the Triton that its containers run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.serving.launch_embedded import Installation

DIGEST = "sha256:" + "ab" * 32


class StandInDocker:
    """What it was called with is in `calls`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        programs = folder / "bin"
        programs.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("docker"), programs / "docker")
        (programs / "docker").chmod(0o755)
        self.folder, self.programs = folder, programs
        installation = Installation.find()
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        for file in (*installation.backend.iterdir(), installation.stub):
            (backend / file.name).symlink_to(file.resolve())
        server = {
            "binary": str(installation.binary),
            "backends": str(backend.parent),
            "caches": str(installation.caches),
        }
        (folder / "server.json").write_text(json.dumps(server))
        (folder / "registry.json").write_text("{}")
        self.has({})
        environment = installation.environment()
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{environment['PATH']}")
        monkeypatch.setenv("LD_LIBRARY_PATH", environment["LD_LIBRARY_PATH"])
        monkeypatch.setenv("STAND_IN_DOCKER", str(folder))

    def has(self, images: dict[str, str | None]) -> None:
        """Images of this machine, with their digests."""
        (self.folder / "images.json").write_text(json.dumps(images))

    def can_pull(self, images: dict[str, str | None]) -> None:
        """Images of the registry."""
        (self.folder / "registry.json").write_text(json.dumps(images))

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls.jsonl"
        lines: list[Any] = file.read_text().splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]

    def called(self, *words: str) -> list[list[str]]:
        """Calls that begin with these words."""
        return [call for call in self.calls if call[: len(words)] == list(words)]

"""A builder to kill: `builder.py ROOT NAME MODE [resumable]`.

It prints "making" when `make` has written its first file, and the artifact's path when it is published.
MODE `go` makes at once; `stall` waits for a line on standard input in the middle of `make`, and once more
after publishing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.progress import Lines
from pipeline.store import ArtifactKey, Store


def main(root: str, name: str, mode: str, *flags: str) -> None:
    def make(directory: Path) -> dict[str, int]:
        with (directory / "first.bin").open("ab") as file:
            file.write(b"1" * 1000)
        (directory / "folder").mkdir(exist_ok=True)
        print("making", flush=True)
        if mode == "stall":
            sys.stdin.readline()
        (directory / "folder" / "second.bin").write_bytes(b"2" * 1000)
        return {"parts": 2}

    key = ArtifactKey("slow", {"name": name}, resumable="resumable" in flags)
    artifact = Store(Path(root)).obtain(key, make, recipe="test", progress=Lines())
    print(artifact.path, flush=True)
    if mode == "stall":
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])

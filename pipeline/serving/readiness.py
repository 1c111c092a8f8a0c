"""The file that says a container is ready: there after the warm-up, gone when the server is ill or ending.

    python -m pipeline.serving.readiness      exit 0 if the file is there and a generation comes back, else 1

Triton's own /v2/health/ready is green before the first generation, and stays so when the process of a model is dead.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.serving.health import generate

FILE_VARIABLE, DEFAULT_FILE = "PIPELINE_READY_FILE", "/tmp/pipeline/ready.json"
_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What is needed to ask the server."""

    grpc_url: str
    entry_model: str

    def write(self, file: Path) -> None:
        """Make the file, at once and whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        draft.replace(file)


def ready_file() -> Path:
    """Where the file lies."""
    return Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE)


def main() -> int:
    """Ask the server; the exit code."""
    try:
        ready = Ready(**json.loads(ready_file().read_text(encoding="utf-8")))
    except FileNotFoundError:
        print("not ready: it starts, is ill, or ends", file=sys.stderr)
        return 1
    try:
        answer = generate(ready.grpc_url, ready.entry_model, "Hello", max_tokens=1, timeout_s=_DEADLINE_S)
    except ServerError as error:
        print(f"ill: {error}", file=sys.stderr)
        return 1
    print(f"ready: a first token after {answer.first_s * 1000:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())

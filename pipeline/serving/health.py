"""The file that says that a container is ready, and the command that looks at it.

    python -m pipeline.serving.health           exit 0 if everything is ready, else 1
    python -m pipeline.serving.health alive     exit 1 if the supervisor hangs, else 0, also while it starts or restarts

The supervisor asks every model for a token about once a second (`monitor`), and while they answer it renews the file;
it takes it away when they do not, and when it stops. Whoever probes (Docker's HEALTHCHECK, a startup or readiness probe
of Kubernetes) therefore only reads it: that takes milliseconds, so it may be done every second, and does not add load.
A file that was not renewed for some seconds counts for nothing: the supervisor is dead or stopped. A liveness probe
asks for `alive`: what dies or hangs inside is started again by the supervisor, so that only a supervisor that hangs
itself has to be replaced from outside, which a file shows that stays and is not renewed.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_VARIABLE, DEFAULT_FILE = "PIPELINE_READY_FILE", "/tmp/pipeline/ready.json"
_STALE_S = 5.0
_HANGS_S = 60.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Content of the file.

    Attributes:
        grpc_url: Address of Triton's gRPC, host:port.
        entry_model: Model that clients ask.
        confirmed: Time at which the supervisor last found it ready, by the clock that all processes share
            (CLOCK_MONOTONIC), in seconds.
    """

    grpc_url: str
    entry_model: str
    confirmed: float

    def write(self, file: Path) -> None:
        """Make the file, at once and whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        draft.replace(file)


def main(arguments: Sequence[str]) -> int:
    """Look at the file. Returns the exit code."""
    alive = list(arguments) == ["alive"]
    try:
        ready = Ready(
            **json.loads(Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE).read_text(encoding="utf-8"))
        )
    except FileNotFoundError:
        print("not ready: it starts, is ill, or ends", file=sys.stderr)
        return 0 if alive else 1
    age_s = time.monotonic() - ready.confirmed
    if age_s > (_HANGS_S if alive else _STALE_S):
        print(f"not ready: the supervisor has not said so for {age_s:.0f} s", file=sys.stderr)
        return 1
    print(f"ready: {ready.entry_model} at {ready.grpc_url}, as of {age_s:.1f} s ago")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

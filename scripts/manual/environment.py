"""The environment variables that the package reads, found in its source; what each does is written here."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MEANING = {
    "PIPELINE_STORE": "Folder of the store. Default: `~/.cache/pipeline/store`.",
    "PIPELINE_CACHE_KEY": "Key of an encrypted response cache: 32 bytes, base64.",
    "PIPELINE_CACHE_PASSWORD": "Password of the Redis, Valkey or PostgreSQL server of a response cache, and of the one "
    "of gateway.limits_redis.",
    "PIPELINE_LIMITS_REDIS": "Server in which gateways share limits, for recipes without gateway.limits_redis.",
    "PIPELINE_API_KEY": "Key of the gateway that `bench`, `compare`, `stream`, `chat` and `generate` ask.",
    "PIPELINE_VERIFY_KEY": "File of public Ed25519 keys (PEM), by one of which packages must be signed that are pulled "
    "or served; `pipeline deploy --target kubernetes` gives it to pods.",
    "PIPELINE_PACKAGE": "Container only: folder of the package that is served. Default: `/deployment`.",
    "PIPELINE_READY_FILE": "Container only: file that is there while the server is ready.",
    "PIPELINE_ADDRESS": "Container only: address that Triton listens on.",
    "PIPELINE_HTTP_PORT": "Container only: opens Triton's HTTP, at this port.",
    "PIPELINE_ALLOWED_HOSTS": "Container only: names by which HTTP requests may call it, with commas between them.",
    "PIPELINE_GRPC_PORT": "Container only: Triton's gRPC port.",
    "PIPELINE_METRICS_PORT": "Container only: port of Triton's metrics.",
    "PIPELINE_START_TIMEOUT_S": "Container only: time in which the server must be ready.",
    "PIPELINE_STOP_TIMEOUT_S": "Container only: time to end after SIGTERM, all but 30 s of it for answers under way.",
    "PIPELINE_HEALTH_INTERVAL_S": "Container only: time between checks by inference.",
    "PIPELINE_HANG_TIMEOUT_S": "Container only: time without any progress after which a model counts as hung.",
    "PIPELINE_MAX_RESTARTS": "Container only: restarts within the window; one failure more ends the container.",
    "PIPELINE_RESTART_WINDOW_S": "Container only: seconds for which failures count.",
    "PIPELINE_GROUP_GPUS": "Container only: GPUs of each machine, where several share a model (LeaderWorkerSet).",
    "PIPELINE_SSH_FOLDER": "Container only: folder with the key by which they reach each other. Default: "
    "`/etc/pipeline/ssh`.",
    "PIPELINE_TRITON_GRPC": "Set by us for Triton's models: the gRPC address of the very server that runs them.",
    "PIPELINE_TRITON_START": "Set by us on the processes of a server, so that a stop finds them all.",
    "PIPELINE_SUPERVISOR": "Set by us on all processes of a deployment, so that a stop finds them all.",
}
OTHERS = {
    "HF_TOKEN": "Token for gated and private repositories of the Hugging Face Hub.",
    "HF_ENDPOINT": "Another hub, such as a mirror.",
    "HF_HUB_OFFLINE": "1: ask no hub, use what the store has; of `init`, `plan`, `build`, `serve` and all others.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "OTLP/HTTP receiver of spans, unless gateway.traces names one.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "The same, as the URL of traces itself: http://host:4318/v1/traces.",
    "CUDA_VISIBLE_DEVICES": "GPUs that `compare`, `tune` and `accept` may use; otherwise all that are needed.",
    "NO_COLOR": "Any value: no colours.",
}


def page() -> str:
    """Markdown. A variable of the source without a meaning here stops the build of the manual."""
    lines = ["# Environment variables", "", "| variable | meaning |", "| --- | --- |"]
    for name in sorted(used()):
        lines.append(f"| `{name}` | {MEANING[name]} |")
    lines += ["", "Variables of other programs:", "", "| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in OTHERS.items()]
    return "\n".join(lines) + "\n"


def used() -> set[str]:
    """Names of the variables in the sources of the package and of its Triton models."""
    found = set()
    for folder in ("pipeline", "model_repo"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\bPIPELINE_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    return found

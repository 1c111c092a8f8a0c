"""Sections about the programs around a package: the gateway, Triton, and what `pipeline deploy` writes files for.

No package depends on them, so that a change builds nothing. `pipeline serve`, `pipeline gateway` and `pipeline deploy`
read them when they start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.document_faults import refusal
from pipeline.recipe.response_cache import RedisUrl
from pipeline.recipe.sections import RecipeSection, beside_recipe, matching

Spread = Literal["affinity", "least-load", "random"]
MetricNames = Literal["vllm", "gen_ai"]
Port = Annotated[int, Field(ge=1, le=65_535)]


def _host(text: str) -> str:
    """A host, without its port: that of requests does not matter."""
    name, colon, port = text.rpartition(":")
    host = name if colon and port.isdecimal() else text
    if not host or "/" in host:
        raise refusal("is not a host", "write a name, such as gateway.example or *.example")
    return host


def _origin(text: str) -> str:
    """An origin as browsers send it."""
    scheme, mark, host = text.lower().rstrip("/").partition("://")
    if text in ("*", "null"):
        return text
    if not (scheme and mark and host) or "/" in host:
        raise refusal("is not an origin", "write SCHEME://HOST or SCHEME://HOST:PORT")
    return f"{scheme}://{host}"


FilePlace = Annotated[Path, AfterValidator(beside_recipe)]


class GatewaySection(RecipeSection):
    """Limits, state and logs of the OpenAI API. A gateway in front of several recipes needs them to agree."""

    allowed_hosts: tuple[Annotated[str, AfterValidator(_host)], ...] = Field(
        default=(),
        strict=False,
        description="Hosts that requests may name besides loopback, such as gateway.example, `*.example` or `*` (any). "
        "Where --host is no loopback address, IP addresses are allowed, too.",
        examples=[["gateway.example"]],
    )
    allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        default=(),
        strict=False,
        description="Web pages that may send requests, such as https://chat.example, or `*` (any); by default only the "
        "gateway's own.",
        examples=[["https://chat.example"]],
    )
    max_waiting: int = Field(
        default=256, ge=0, description="Requests that may wait for a model; more are answered by 429."
    )
    max_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that a request waits while a model is not ready, such as during a restart of its server; "
        "then it is answered by 503.",
    )
    idle_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds without a token after which an answer is given up and its request gets an error; 0 is "
        "never.",
    )
    drain_s: int = Field(default=30, ge=0, description="Seconds that requests may still take after a stop.")
    workers: int = Field(
        default=1,
        ge=1,
        description="Processes that serve the gateway together, with the same limits, queues and metrics; about one "
        "for each core that is to be used.",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Connections open at once, divided among the workers; beyond that, one without a request is "
        "closed, or else the new one.",
    )
    spread: Spread = Field(
        default="affinity",
        description="How requests are spread over several servers. affinity: all turns of a conversation go to the "
        "server that has their KV cache, unless it has more than twice its share of the requests in flight. "
        "least-load: to the server with the fewest requests in flight.",
    )
    limits_redis: RedisUrl | None = Field(
        default=None,
        description="Redis or Valkey server in which several gateways share limits of tenants and stored responses; by "
        "default $PIPELINE_LIMITS_REDIS. Password: $PIPELINE_CACHE_PASSWORD. While it does not answer, each gateway "
        "counts by itself. Files and batches then need PostgreSQL (cache.backend), or batch_folder.",
        examples=["redis://limits:6379/0"],
    )
    batch_folder: FilePlace | None = Field(
        default=None,
        strict=False,
        description="Folder of uploaded files and batches, on a local disk; relative to the folder of the recipe. "
        "Gateways that share it share their batches. By default they are in PostgreSQL, if cache.backend names it; "
        "refused, with limits_redis; else in batches/ of the store.",
    )
    batch_slots: int | None = Field(
        default=None,
        ge=1,
        description="Requests of batches that a model answers at once, in slots that other requests leave; by default "
        "half of its slots.",
    )
    max_file_mib: int = Field(default=200, ge=1, description="Largest file that may be uploaded, in MiB.")
    max_stored_mib: int = Field(
        default=4096,
        ge=1,
        description="All files of a tenant together, in MiB; more are refused until some are deleted.",
    )
    stored_responses: int = Field(
        default=1000,
        ge=0,
        description="Responses of /v1/responses that are stored for each tenant, for previous_response_id and "
        "GET /v1/responses/ID; the longest unused are forgotten first. 0 stores none. They are on the server that "
        "cache.backend or limits_redis names, else in memory.",
    )
    stored_responses_mib: int = Field(
        default=32, ge=1, description="Most MiB of JSON that the stored responses of each tenant take."
    )
    stored_responses_s: float = Field(
        default=3600.0, gt=0, description="Seconds after which an unused response is forgotten."
    )
    traces: str | None = Field(
        default=None,
        min_length=1,
        description="OTLP/HTTP receiver of spans of the gateway and Triton; by default $OTEL_EXPORTER_OTLP_ENDPOINT.",
        examples=["http://localhost:4318"],
    )
    metric_names: tuple[MetricNames, ...] = Field(
        default=(),
        strict=False,
        description="Show the metrics at /metrics under these names, too: vllm, gen_ai (OpenTelemetry's).",
        examples=[["vllm", "gen_ai"]],
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of the log line of each request, on standard error."
    )
    log_prompts: Literal["redacted", "full"] | None = Field(
        default=None,
        description="Log the texts of prompts and answers, too. redacted: without those that hold keys, e-mail "
        "addresses, payment cards, bank accounts, national ids or telephone numbers.",
    )


class TritonSection(RecipeSection):
    """Addresses, resources and supervision of the Triton server."""

    address: str = Field(default="127.0.0.1", min_length=1, description="Address of Triton's ports.")
    http_port: Port | None = Field(
        default=None,
        description="Port of Triton's HTTP, where serving.http opens it; by default 8000, or a free one.",
    )
    grpc_port: Port | None = Field(
        default=None, description="Port of Triton's gRPC; by default 8001, or a free one if that is taken."
    )
    metrics_port: Port | None = Field(
        default=None, description="Port of Triton's metrics; by default 8002, or a free one."
    )
    image: str | None = Field(
        default=None, min_length=1, description="Another image than the one that the package was made for."
    )
    container: bool | None = Field(
        default=None,
        description="Run Triton in a container, or as processes; by default what the package needs.",
    )
    memory: (
        Annotated[str, *matching(r"[1-9]\d*[KMGT]", "write a number and K, M, G or T, like 64G")] | None
    ) = Field(
        default=None,
        description="Limit of Triton's host memory in files of `pipeline deploy`; by default none, and in a cluster "
        "what the weights need.",
        examples=["64G"],
    )
    start_timeout_s: float | None = Field(
        default=None,
        ge=1,
        description="Time limit of a start; by default 120 s, and more for large models.",
    )
    pull_timeout_s: float = Field(default=3600.0, gt=0, description="Time limit for pulling an image.")
    health_interval_s: float = Field(
        default=1.0, ge=0, description="Time between checks by inference; 0: none."
    )
    hang_timeout_s: float | None = Field(
        default=None,
        ge=0.5,
        description="Time without an answer and without progress after which a model counts as hung; by default 3, "
        "and more where one step of the engine may take longer.",
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Restarts of Triton, and of the gateway, within restart_window_s; after more it is tried again "
        "about once a minute.",
    )
    restart_window_s: float = Field(default=300.0, ge=0, description="Time for which failures count.")
    log: FilePlace | None = Field(
        default=None,
        strict=False,
        description="Triton's own log, relative to the folder of the recipe; by default a file in the store's folder "
        "logs.",
    )


class DeploySection(RecipeSection):
    """Settings of what `pipeline deploy` and `pipeline monitoring` write, whatever the target."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address of the gateway, for compose and systemd."
    )
    port: Port = Field(default=8080, description="Port of the gateway, for compose and systemd.")
    gateway_image: str | None = Field(
        default=None,
        min_length=1,
        description="Image of the gateway, for compose and kubernetes; by default that of the Dockerfile.",
    )
    user: str = Field(default="pipeline", min_length=1, description="User of the systemd unit.")
    runbook_url: str = Field(
        default="how-to/alerts.html",
        min_length=1,
        description="Page that alerts link to; the documentation has it.",
    )


class KubernetesSection(RecipeSection):
    """Settings of a deployment in Kubernetes."""

    namespace: (
        Annotated[
            str,
            *matching(
                "[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "write at most 63 lower-case letters, digits and hyphens"
            ),
        ]
        | None
    ) = Field(default=None, description="Namespace of all objects; by default the name of the recipe.")
    min_replicas: int = Field(
        default=1, ge=1, description="Servers, or groups of machines; with scaling the least number."
    )
    max_replicas: int = Field(default=4, ge=1, description="Most servers, with scaling.")
    gateways: int = Field(default=2, ge=1, description="Least number of gateways.")
    gpus_per_node: int = Field(
        default=8,
        ge=1,
        description="GPUs of one machine. A model that needs more is spread over several, by a LeaderWorkerSet.",
    )
    hostname: (
        Annotated[str, *matching("[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "write a name, like llm.example")]
        | None
    ) = Field(default=None, description="Name by which clients outside of the cluster reach the gateway.")
    expose: (
        Annotated[
            str,
            *matching(
                "ingress:[a-z0-9][a-z0-9.-]*|gateway:([a-z0-9-]+/)?[a-z0-9][a-z0-9.-]*",
                "write ingress:CLASS, or gateway:NAME or gateway:NAMESPACE/NAME",
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Access from outside: an Ingress of this class, or an HTTPRoute of this Gateway.",
        examples=["ingress:nginx", "gateway:infra/web"],
    )
    packages: (
        Annotated[
            str,
            *matching(r"(s3|gs|az|https?)://[^\s/]+(/\S*)?", "write s3://bucket/folder, or gs, az, https"),
        ]
        | None
    ) = Field(
        default=None,
        description="Object store with the packages, from which each pod fetches its own; by default a volume. "
        "`pipeline store push` sends them there, and takes the same addresses.",
        examples=["s3://models/packages"],
    )
    storage_class: str | None = Field(
        default=None,
        min_length=1,
        description="Storage class of the packages' volume; by default the cluster's own.",
    )
    build_image: str | None = Field(
        default=None, min_length=1, description="Image of the Job that builds the package."
    )
    redis: (
        Annotated[
            str, *matching(r"(redis|valkey)s?://[^\s/@]+", "write redis://HOST:PORT, or rediss:// for TLS")
        ]
        | None
    ) = Field(
        default=None,
        description="Redis or Valkey server that gateways share; by default one is part of the manifests.",
        examples=["redis://limits:6379"],
    )
    prometheus: Annotated[str, *matching(r"https?://\S+", "write http://HOST:PORT")] = Field(
        default="http://prometheus-operated.monitoring.svc:9090",
        description="Prometheus server that scaling asks.",
    )

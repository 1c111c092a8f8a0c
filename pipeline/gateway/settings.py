"""Settings of a gateway: options of `pipeline gateway` and `pipeline serve`, and the message to each of its processes.

This module needs nothing but the core's distributions: a command line is read before the extra `gateway` is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field, FilePath, field_validator

from pipeline.settings import Option, Settings

MetricNames = Literal["vllm", "gen_ai"]
Spread = Literal["affinity", "least-load", "random"]
# Environment variables that name the receiver of spans.
TRACES_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _parse_host(text: str) -> str:
    """Read a host, without its port: that of requests does not matter."""
    name, colon, port = text.rpartition(":")
    host = name if colon and port.isdecimal() else text
    if not host or "/" in host:
        raise ValueError("is not a host")
    return host


def _parse_origin(text: str) -> str:
    """Read an origin as browsers send it."""
    scheme, mark, rest = text.lower().rstrip("/").partition("://")
    if text in ("*", "null"):
        return text
    if not (scheme and mark and rest) or "/" in rest:
        raise ValueError("is not SCHEME://HOST or SCHEME://HOST:PORT")
    return f"{scheme}://{rest}"


def _parse_endpoint(text: str) -> tuple[str, str]:
    """Read [NAME=]HOST:PORT or [NAME=]dns:NAME:PORT; the name is empty if there is none."""
    from pipeline.client.endpoints import parse_target
    from pipeline.client.errors import Refused

    name, mark, url = text.rpartition("=")
    if ":" not in url or (mark and not name):
        raise ValueError("is not NAME=HOST:PORT")
    try:
        return name, parse_target(url)
    except Refused as error:
        raise ValueError(str(error)) from error


class GatewaySettings(Settings):
    """Addresses, limits, state and logs of a gateway, whatever it serves."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, description="Port to listen on; 0 takes a free one.")
    keys: Annotated[FilePath | None, Option(metavar="FILE")] = Field(
        default=None,
        description="Tenants with their API keys and limits (YAML); without it no key is needed.",
    )
    limits_redis: Annotated[str | None, Option(metavar="URL", envvar="PIPELINE_LIMITS_REDIS")] = Field(
        default=None,
        description="Redis or Valkey server, such as redis://limits:6379/0, of a deployment with several gateways: "
        "those with the same one share the requests and tokens that a tenant may use in a minute, its requests at "
        "once, and stored responses; password: $PIPELINE_CACHE_PASSWORD. While it does not answer, each gateway "
        "counts by itself. Files and batches then need PostgreSQL (the recipe's cache.backend), or --batch-folder.",
    )
    allowed_hosts: Annotated[tuple[str, ...], Option("--allowed-host", metavar="NAME", parse=_parse_host)] = (
        Field(
            default=(),
            description="Host that requests may name besides loopback, such as gateway.example, *.example or * (any). "
            "Where --host is no loopback address, IP addresses are allowed, too.",
        )
    )
    allowed_origins: Annotated[
        tuple[str, ...], Option("--allowed-origin", metavar="ORIGIN", parse=_parse_origin)
    ] = Field(
        default=(),
        description="Web pages that may send requests, such as https://chat.example, or * (any); by default only the "
        "gateway's own.",
    )
    max_waiting: int = Field(
        default=256, ge=0, description="Requests that may wait for a model; more are answered by 429."
    )
    max_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that a request waits while a model is not ready, because its server is started again "
        "for example; then it is answered by 503.",
    )
    idle_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds without a token after which an answer is given up and its request gets an error; 0 is "
        "never.",
    )
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
    drain_s: int = Field(default=30, description="Seconds that requests may still take after a stop.")
    batch_folder: Annotated[Path | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Folder of uploaded files and batches, on a local disk. Gateways that share it share their "
        "batches. By default they are in PostgreSQL, if the recipe's cache.backend names it; refused, with "
        "--limits-redis; else in batches/ of the store.",
    )
    batch_slots: Annotated[int | None, Option(metavar="N")] = Field(
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
        "the recipe's cache.backend or --limits-redis names, else in memory.",
    )
    stored_responses_mib: int = Field(
        default=32, ge=1, description="Most MiB of JSON that the stored responses of each tenant take."
    )
    stored_responses_s: float = Field(
        default=3600.0, gt=0, description="Seconds after which an unused response is forgotten."
    )
    traces: Annotated[str | None, Option(metavar="URL")] = Field(
        default=None,
        description="OTLP/HTTP receiver for spans, such as http://localhost:4318; by default "
        "$OTEL_EXPORTER_OTLP_ENDPOINT. `pipeline serve` hands it to Triton, too.",
    )
    metric_names: Annotated[tuple[MetricNames, ...], Option(metavar="NAMES", separator=",")] = Field(
        default=(),
        description="Show the metrics at /metrics under these names, too: vllm, gen_ai (OpenTelemetry's), or "
        "vllm,gen_ai.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of the log line of each request, on standard error."
    )
    log_prompts: Literal["no", "redacted", "full"] = Field(
        default="no",
        description="Log the texts of prompts and answers, too. redacted: without those that hold keys, e-mail "
        "addresses, payment cards, bank accounts, national ids or telephone numbers.",
    )

    @field_validator("limits_redis")
    @classmethod
    def _check_redis(cls, url: str | None) -> str | None:
        if url:
            from pipeline.cache.redis_server import RedisAddress

            RedisAddress.parse(url)
        return url or None

    @field_validator("metric_names", mode="before")
    @classmethod
    def _check_metric_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(filter(None, (name.strip() for name in names))))
        if unknown := [name for name in names if name not in ("vllm", "gen_ai")]:
            raise ValueError(f"{', '.join(unknown)}: there are vllm and gen_ai")
        return names

    @field_validator("batch_folder")
    @classmethod
    def _check_batch_folder(cls, folder: Path | None) -> Path | None:
        if folder is not None and folder.is_file():
            raise ValueError("is a file; name a folder")
        return folder


class ModelSources(Settings):
    """Models of a gateway that stands apart from their servers, and the servers that run them."""

    package: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Serve the model of this package, with --endpoint; a RECIPE beside it gives settings, such as its "
        "cache.",
    )
    endpoints: Annotated[
        tuple[tuple[str, str], ...],
        Option("--endpoint", metavar="[NAME=]HOST:PORT", parse=_parse_endpoint),
    ] = Field(
        default=(),
        description="gRPC address of a Triton server elsewhere that runs a recipe, by its name unless there is one "
        "only. Repeat it for several servers; dns:NAME:PORT is every address that a DNS name has, asked again every "
        "few seconds.",
    )
    wait_s: Annotated[float, Option(metavar="S")] = Field(
        default=0.0,
        ge=0,
        description="Seconds to wait until `pipeline serve` runs the recipes. With --endpoint it starts at once; see "
        "/readyz.",
    )
    spread: Spread = Field(
        default="affinity",
        description="Server, of several, that gets a request. affinity: all turns of a conversation go to the same "
        "one, which has their KV cache, unless it has more than twice its share of the requests in flight. "
        "least-load: the one with the fewest requests in flight.",
    )


class WorkerPlace(Settings):
    """Place of one process among those that serve a gateway together.

    Attributes:
        number: from 0; a worker that is started again has the same.
        workers: number of workers.
        link: descriptor of the worker's end of a socket pair with its parent.
        usage: descriptor of the memory with the limits of tenants.
        metrics: folder of the files with counters and histograms.
    """

    number: int
    workers: int
    link: int
    usage: int
    metrics: Path


class GatewayStart(Settings):
    """Everything a gateway's process needs to know: from its command line, or as a message from the process above it.

    Attributes:
        recipes: names or files of recipes, or names of running deployments.
        overrides: fields of the recipes, as in `--set`.
        store: root of the store; None: the usual one.
        sockets: descriptors of bound sockets that the process inherits; empty: it binds its own.
        parent: process id of the one above it, without which it ends; None if it runs by itself.
        worker: its place, if it is one of several; None: it serves the gateway, or is the parent of those that do.
    """

    recipes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    store: Path | None = None
    sources: ModelSources = ModelSources()
    settings: GatewaySettings = GatewaySettings()
    sockets: tuple[int, ...] = ()
    parent: int | None = None
    worker: WorkerPlace | None = None

"""Settings of `pipeline deploy`, besides those of the launch itself, and the package that it deploys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.settings import Option, Settings
from pipeline.triton.deployment import Deployment

if TYPE_CHECKING:
    from pipeline.plan.artifact_sizes import ArtifactSizes
    from pipeline.recipe import Recipe


def _matching(pattern: str, fix: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(fix)
        return text

    return check


class Exposure(Settings):
    """Way from outside of the cluster to the gateway."""

    kind: Literal["ingress", "gateway"] = Field(description="An Ingress, or an HTTPRoute of the Gateway API.")
    name: str = Field(description="Class of the Ingress; or the Gateway, as name or namespace/name.")


def _exposure(text: str) -> Exposure:
    kind, _, name = text.partition(":")
    match kind:
        case "ingress" if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
            return Exposure(kind="ingress", name=name)
        case "gateway" if re.fullmatch(r"([a-z0-9-]+/)?[a-z0-9][a-z0-9.-]*", name):
            return Exposure(kind="gateway", name=name)
    raise ValueError("write ingress:CLASS, or gateway:NAME or gateway:NAMESPACE/NAME")


class Replicas(Settings):
    """Bounds of the number of servers, or of groups of machines."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def _replicas(text: str) -> Replicas:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
        raise ValueError("write a number of servers, or LEAST:MOST, such as 1:4")
    return Replicas(least=int(least), most=int(most or least))


class DeploySettings(Settings):
    """Settings of a deployment besides the launch of Triton itself."""

    port: int = Field(default=8080, ge=1, le=65535, description="Port of the gateway, on --address.")
    gateway_image: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None,
        description="Image of the gateway, for compose and kubernetes; by default that of the Dockerfile.",
    )
    memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            parse=_matching(r"[1-9]\d*[KMGT]", "write a number and K, M, G or T, like 64G"),
        ),
    ] = Field(
        default=None,
        description="Most host memory that Triton may take, such as 64G; by default all, and in a cluster what the "
        "weights need.",
    )
    user: str = Field(default="pipeline", description="User of the systemd unit.")


class ScalingPolicy(Settings):
    """When servers are added and taken away."""

    requests: float = Field(
        default=0.7,
        description="Target of running and waiting requests, as a share of those that a server answers at once.",
    )
    spare: int = Field(default=1, description="Servers on top of those that the requests ask for.")
    queue_time: float = Field(
        default=0.5,
        description="Wait for a slot (p95), as a share of the target of the time to first token (p95).",
    )
    kv_cache: float = Field(default=0.8, description="Share of the KV cache in use.")
    interval_s: int = Field(default=15, description="Time from one look to the next.")
    up_window_s: int = Field(
        default=0, description="Time for which the least demand counts before servers are added."
    )
    up_percent: int = Field(
        default=100,
        description="Most servers added in a minute, in percent of those there are; or `up_pods`, if more.",
    )
    up_pods: int = Field(default=4, description="See `up_percent`.")
    down_window_s: int = Field(
        default=600, description="Time for which the greatest demand counts before servers are taken away."
    )
    down_percent: int = Field(
        default=10, description="Most servers taken away in a minute, in percent; or `down_pods`, if more."
    )
    down_pods: int = Field(default=1, description="See `down_percent`.")
    max_waiting: float = Field(
        default=0.25,
        description="Requests that may wait in all gateways, as a share of those that the least number of servers "
        "answers at once; more get 429.",
    )
    lost_node_s: int = Field(
        default=30,
        description="Time after which pods of a node that does not answer are made anew elsewhere.",
    )
    gateway_cpu: int = Field(
        default=70,
        description="Mean use of the processors that gateways request, in percent, above which some are added.",
    )


_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"


class ClusterSettings(Settings):
    """Settings of a deployment in Kubernetes besides `DeploySettings`."""

    namespace: Annotated[
        str | None,
        Option(
            metavar="NAME",
            parse=_matching(_LABEL, "write at most 63 lower-case letters, digits and hyphens"),
        ),
    ] = Field(
        default=None,
        description="Kubernetes: namespace of all objects; by default the name of the recipe.",
    )
    replicas: Annotated[Replicas, Option(metavar="N|LEAST:MOST", parse=_replicas)] = Field(
        default=Replicas(least=1, most=4),
        description="Kubernetes: servers; with scaling between these bounds, else the least.",
    )
    gateways: int = Field(default=2, ge=1, description="Kubernetes: least number of gateways.")
    gpus_per_node: int = Field(
        default=8,
        ge=1,
        description="Kubernetes: GPUs of one machine. A model that needs more is spread over several, by a "
        "LeaderWorkerSet.",
    )
    hostname: Annotated[
        str | None,
        Option(metavar="NAME", parse=_matching(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "is no host name")),
    ] = Field(
        default=None,
        description="Kubernetes: name by which clients outside of the cluster reach the gateway.",
    )
    expose: Annotated[Exposure | None, Option(metavar="ingress:CLASS|gateway:NAME", parse=_exposure)] = Field(
        default=None,
        description="Kubernetes: way in for them: an Ingress of this class, or an HTTPRoute of this Gateway.",
    )
    packages: Annotated[
        str | None,
        Option(
            metavar="URL",
            parse=_matching(
                r"(s3|gs|az|https?)://[^\s/]+(/\S*)?", "write s3://bucket/folder, or gs, az, https"
            ),
        ),
    ] = Field(
        default=None,
        description="Kubernetes: object store with the packages, from which each pod fetches its own; by default a "
        "volume. `pipeline store push` sends them there, and takes the same addresses.",
    )
    build_image: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="Kubernetes: image of the Job that builds the package."
    )
    storage_class: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="Kubernetes: class of that volume; by default the cluster's own."
    )
    redis: Annotated[
        str | None,
        Option(
            metavar="URL",
            parse=_matching(r"(redis|valkey)s?://[^\s/@]+", "write redis://HOST:PORT, or rediss:// for TLS"),
        ),
    ] = Field(
        default=None,
        description="Kubernetes: Redis or Valkey server that gateways share; by default one is part of the manifests.",
    )
    prometheus: Annotated[
        str, Option(metavar="URL", parse=_matching(r"https?://\S+", "write http://HOST:PORT"))
    ] = Field(
        default="http://prometheus-operated.monitoring.svc:9090",
        description="Kubernetes: Prometheus server that scaling asks.",
    )
    runbook_url: Annotated[str, Option(metavar="URL")] = Field(
        default="how-to/alerts.html",
        description="Kubernetes: page that alerts link to; the documentation has it.",
    )


@dataclass(frozen=True, slots=True)
class DeployedPackage:
    """The package that is deployed.

    Attributes:
        deployment: Its deployment.json, also where it is not built yet.
        folder: Its folder on this machine; the name is that of the artifact.
        recipe: Recipe that it is served with; None where only the package is known and the target does not need it.
        recipe_text: The recipe, all values resolved, as YAML; None where only the package is known.
        questions: Text of the recipe's golden questions, for a build in the cluster; None for none.
        sizes: Bytes of the recipe's artifacts; None where only the weights of the package are known.
        content: SHA-256 (hex) of the package's manifest, which has those of all its files; None while it is not built.
        verify_key: Public key that signatures of packages are held against, as PEM; None takes unsigned ones.
    """

    deployment: Deployment
    folder: Path
    recipe: Recipe | None = None
    recipe_text: str | None = None
    questions: str | None = None
    sizes: ArtifactSizes | None = None
    content: str | None = None
    verify_key: str | None = None

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.deployment.name

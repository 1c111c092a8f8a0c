"""The package that `pipeline deploy` writes files for, and the policy by which a cluster adds servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from pipeline.plan.artifact_sizes import ArtifactSizes
from pipeline.recipe import Recipe
from pipeline.settings import Settings
from pipeline.triton.deployment import Deployment


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


@dataclass(frozen=True, slots=True)
class DeployedPackage:
    """The package that is deployed.

    Attributes:
        deployment: Its deployment.json, also where it is not built yet.
        folder: Its folder on this machine; the name is that of the artifact.
        recipe: Recipe that it is served with; its sections say how it is deployed.
        recipe_text: Text of what gateways and builds need of the recipe, as YAML; None where only the package is known.
        questions: Text of the recipe's golden questions, for a build in the cluster; None for none.
        sizes: Bytes of the recipe's artifacts; None where only the weights of the package are known.
        content: SHA-256 (hex) of the package's manifest, which has those of all its files; None while it is not built.
        verify_key: Public key that signatures of packages are held against, as PEM; None takes unsigned packages.
    """

    deployment: Deployment
    folder: Path
    recipe: Recipe
    recipe_text: str | None = None
    questions: str | None = None
    sizes: ArtifactSizes | None = None
    content: str | None = None
    verify_key: str | None = None

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.deployment.name

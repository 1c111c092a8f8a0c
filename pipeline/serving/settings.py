"""Settings of a served package and of its exchange. Light to import, for help and completion of verbs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from pipeline.errors import UserError
from pipeline.plan.settings import Devices
from pipeline.settings import Option, Settings

if TYPE_CHECKING:
    from pipeline.keeper import RestartPolicy
    from pipeline.recipe.sections import ServingPolicy
    from pipeline.serving.ports import Ports


class LaunchSettings(Settings):
    """Addresses and resources of a Triton server, wherever it runs."""

    address: str = Field(default="127.0.0.1", description="Address of Triton's ports.")
    http_port: Annotated[int | None, Option(metavar="PORT")] = Field(
        default=None,
        description="Port of Triton's HTTP, where the recipe opens it (serving.http); by default 8000, or a free one.",
    )
    grpc_port: Annotated[int | None, Option(metavar="PORT")] = Field(
        default=None, description="Port of Triton's gRPC; by default 8001, or a free one if that is taken."
    )
    metrics_port: Annotated[int | None, Option(metavar="PORT")] = Field(
        default=None, description="Port of Triton's metrics; by default 8002, or a free one."
    )
    image: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="Another image than the one that the package was made for."
    )
    gpus: Devices = Field(default=(), description="GPUs that may be used; by default all that are needed.")
    start_timeout_s: Annotated[float | None, Option(metavar="SECONDS")] = Field(
        default=None,
        ge=1,
        description="Give up when it is not ready by then; by default 120, and more for large models.",
    )

    def choose_ports(self, serving: ServingPolicy) -> Ports:
        """Choose the ports of a deployment: those that are asked for, else Triton's usual ones, else free ones.

        Args:
            serving: Section of the recipe that says which protocols are open.

        Raises:
            UserError: A port is asked for of a protocol that is not open.
        """
        from pipeline.serving.ports import Ports

        for name, port, opens in (
            ("http", self.http_port, serving.http),
            ("grpc", self.grpc_port, serving.grpc),
        ):
            if port and not opens:
                raise UserError(
                    f"--{name}-port: the recipe does not open it: say `serving: {{{name}: true}}` there, or "
                    f"--set serving.{name}=true"
                )
        return Ports.choose(
            self.address, http=self.http_port, grpc=self.grpc_port, metrics=self.metrics_port,
            opens_http=serving.http, opens_grpc=serving.grpc,
        )  # fmt: skip


class SupervisionSettings(Settings):
    """Watching, restarting and logging of a Triton server that runs on this machine."""

    container: Annotated[bool | None, Option("--container/--no-container")] = Field(
        default=None,
        description="Run Triton in a container, or as processes; by default what the package needs.",
    )
    pull_timeout_s: float = Field(default=3600.0, description="Time in which an image must have been pulled.")
    health_interval_s: float = Field(
        default=1.0, ge=0, description="Time between checks by inference; 0: none."
    )
    hang_timeout_s: Annotated[float | None, Option(metavar="SECONDS")] = Field(
        default=None,
        ge=0.5,
        description="Time without an answer and without progress after which a model counts as hung; by default 3, "
        "and more where one step of the engine may take longer.",
    )
    log: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None, description="Triton's own log; by default a file in the store's folder logs."
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Restarts of what died or hung within the window; after them it is tried again about once a "
        "minute, and all else goes on.",
    )
    restart_window_s: Annotated[float, Option(metavar="SECONDS")] = Field(
        default=300.0, ge=0, description="Failures that are older do not count."
    )

    @field_validator("log")
    @classmethod
    def _check_log(cls, log: Path | None) -> Path | None:
        if log is not None and log.is_dir():
            raise ValueError("is a folder; name a file")
        return log

    @property
    def restart_policy(self) -> RestartPolicy:
        """Restart policy of a server that this machine keeps."""
        from pipeline.keeper import RestartPolicy

        return RestartPolicy(self.max_restarts, self.restart_window_s)


class ExchangeSettings(Settings):
    """Way in which a package is exchanged, for `pipeline rollout` and `pipeline rollback`."""

    skip_golden: bool = Field(default=False, description="Do not ask the package's golden questions.")
    in_place: bool = Field(
        default=False,
        description="End the old Triton first, for two that do not fit in memory. Requests wait meanwhile.",
    )
    drain_s: Annotated[float, Option(metavar="SECONDS")] = Field(
        default=120.0,
        ge=0,
        description="Time for requests that the old package has under way; then they are cut off.",
    )

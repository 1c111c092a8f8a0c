"""What is measured: a deployment of this machine, or any server of OpenAI's API or Triton."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from pipeline.bench.targets import OpenAITarget, Target, TritonTarget
from pipeline.errors import UserError
from pipeline.recipe import Recipe, Slo
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer

Way = Literal["gateway", "triton"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        name: Of the deployment, or the address.
        way: Through an OpenAI gateway, or straight to Triton.
        url: Of the way: http://host:port, or host:port of gRPC.
        model: Name that requests give.
        tokenizer: Folder with tokenizer.json and the chat template; None where it is not known.
        max_prompt: Tokens that a prompt may have, those of the chat template included.
        max_answer: Tokens that an answer may have.
        default_answer: Tokens that an answer may have where nothing says how many; None for `max_answer`.
        slo: Of the recipe.
        triton_metrics: Triton's page of metrics; None where it is not known.
        gateway_url: Whose page of metrics is read, too; None without one.
        about: Of the result's `target`: package digest, runtime, versions.
        headers: Of requests to a gateway, such as Authorization.
        dataset: Calibration set of its recipe; None where there is none.
        recipe: That it is served with, which `pipeline plan` forecasts; None where it is not known.
        store: Where calibrations of the forecast lie.
    """

    name: str
    way: Way
    url: str
    model: str
    tokenizer: Path | None
    max_prompt: int
    max_answer: int
    default_answer: int | None = None
    slo: Slo | None = None
    triton_metrics: str | None = None
    gateway_url: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    dataset: NamedDataset | LocalSource | None = None
    recipe: Recipe | None = None
    store: Store | None = None

    @classmethod
    def of_record(cls, record: RunningServer, slo: Slo | None, way: Way | None = None) -> Subject:
        """A deployment that runs on this machine.

        Args:
            record: Its record.
            slo: Of its recipe.
            way: How to ask it; None for its gateway where it has one.

        Raises:
            UserError: It has no gateway, and one was asked for.
        """
        package = record.deployment.parent
        deployment = Deployment.load(package)
        if way == "gateway" and not record.gateway_url:
            raise UserError(f"{deployment.name} runs without a gateway: --way triton asks Triton itself")
        chosen: Way = way or ("gateway" if record.gateway_url else "triton")
        return cls(
            name=deployment.name,
            way=chosen,
            url=record.gateway_url if chosen == "gateway" else record.target,
            model=deployment.name if chosen == "gateway" else deployment.entry_model,
            tokenizer=package / deployment.tokenizer_dir,
            max_prompt=deployment.limits.max_input_tokens,
            max_answer=deployment.limits.max_output_tokens,
            slo=slo,
            triton_metrics=record.metrics_url,
            gateway_url=record.gateway_url or None,
            about={
                "package": deployment.digest,
                "runtime": deployment.runtime,
                "versions": deployment.versions,
                "started": record.started,
                **(
                    {}
                    if deployment.requirements is None
                    else {"gpu": deployment.requirements.gpu, "gpus": deployment.requirements.gpus}
                ),
            },
        )

    def target(self, timeout_s: float, *, chat: bool) -> Target:
        """Make a client of it."""
        if self.way == "gateway":
            return OpenAITarget(self.url, self.model, timeout_s=timeout_s, headers=self.headers)
        return TritonTarget(self.url, self.model, self.tokenizer if chat else None, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ComparedDeployment:
    """One of the two, while it runs.

    Attributes:
        subject: How its speed is measured.
        package: Folder that it is served from.
        grpc_url: gRPC target of its Triton.
    """

    subject: Subject
    package: Path
    grpc_url: str

    @property
    def asked_directly(self) -> Subject:
        """The same past its gateway, which may have a response cache."""
        entry = Deployment.load(self.package).entry_model
        return replace(self.subject, way="triton", url=self.grpc_url, model=entry)


class DeploymentSource(Protocol):
    """Where one of the two comes from."""

    @property
    def given(self) -> str:
        """As on the command line."""
        ...

    @property
    def package(self) -> Path:
        """Folder that it is served from."""
        ...

    def up(self) -> AbstractContextManager[ComparedDeployment]:
        """Have it run inside the block."""
        ...


@dataclass(frozen=True, slots=True)
class RunningSource:
    """A deployment that runs, and goes on running.

    Attributes:
        given: As on the command line.
        subject: How it is measured.
        record: Where it runs.
    """

    given: str
    subject: Subject
    record: RunningServer

    @property
    def package(self) -> Path:
        return self.record.deployment.parent

    @contextmanager
    def up(self) -> Iterator[ComparedDeployment]:
        yield ComparedDeployment(self.subject, self.package, self.record.target)


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A package, served by `pipeline serve` as a process of its own.

    Attributes:
        given: As on the command line.
        package: Its folder.
        slo: For goodput.
        way: Whether a gateway is in front.
        devices: GPUs that it may use; empty for all that it needs.
    """

    given: str
    package: Path
    slo: Slo | None = None
    way: Way = "triton"
    devices: tuple[int, ...] = ()

    @contextmanager
    def up(self) -> Iterator[ComparedDeployment]:
        deployment = Deployment.load(self.package)
        with tempfile.TemporaryDirectory(prefix="pipeline-compare-") as folder:
            # A store of its own: two packages of one name can then run at a time.
            store = Store(Path(folder))
            words = ["--package", str(self.package.absolute()), *store.words]
            words += ["--no-gateway"] if self.way == "triton" else []
            words += ["--gpus", ",".join(map(str, self.devices))] if self.devices else []
            served = ServedDeployment.start(
                words,
                deployment.name,
                store.running,
                Path(folder) / "logs",
                deadline_s=deployment.start_deadline_s,
            )
            try:
                subject = Subject.of_record(served.record, self.slo, self.way)
                yield ComparedDeployment(subject, self.package, served.record.target)
            finally:
                served.stop()

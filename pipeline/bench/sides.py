"""Where the two that are compared come from: a deployment that runs, or a package that is served meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipeline.bench.subject import Subject, Way
from pipeline.recipe import Slo
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer

__all__ = ["ComparedDeployment", "DeploymentSource", "PackageSource", "RunningSource"]


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

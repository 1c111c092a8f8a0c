"""The two of a comparison: stored runs, deployments that run, or packages that are served meanwhile."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.bench.compare.judge import Judge
from pipeline.bench.compare.settings import CompareCriteria, CompareSettings, source_kind
from pipeline.bench.settings import SubjectSettings
from pipeline.bench.subject import Subject, Way, find_subject
from pipeline.bench.targets import only_model
from pipeline.errors import Fault, InvalidInput
from pipeline.golden import GoldenBudgets, GoldenSet
from pipeline.machine.gpus import allowed_devices
from pipeline.prepare import prepare
from pipeline.recipe import Recipe, Slo
from pipeline.serving.deployments import find_deployment
from pipeline.serving.dry_run import dry_run
from pipeline.serving.launch import ServeOptions
from pipeline.serving.ports import Ports
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer


@dataclass(frozen=True, slots=True)
class ComparedDeployment:
    """One of two compared deployments, while it runs.

    Attributes:
        package: Folder that it is served from; None of an address.
        grpc_url: gRPC target of its Triton; empty of an address.
    """

    subject: Subject
    package: Path | None
    grpc_url: str

    @property
    def asked_directly(self) -> Subject:
        """The same past its gateway, which may have a response cache."""
        return replace(self.subject, way="triton", url=self.grpc_url, model=self.served.entry_model)

    @property
    def served(self) -> Deployment:
        """Description of its package, which an address does not have."""
        assert self.package is not None, "golden questions are not asked of an address"
        return Deployment.load(self.package)


@dataclass(frozen=True, slots=True)
class RunningSource:
    """A deployment that runs already, and goes on running."""

    given: str
    subject: Subject
    record: RunningServer

    @property
    def package(self) -> Path:
        """Folder that it is served from."""
        return self.record.deployment.parent

    @contextmanager
    def up(self) -> Iterator[ComparedDeployment]:
        """Context in which it runs."""
        yield ComparedDeployment(self.subject, self.package, self.record.target)


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A package, served by `pipeline serve` as a process of its own.

    Attributes:
        slo: Targets for goodput.
        way: Whether a gateway is started in front of it.
        devices: GPUs that it may use; empty for all that it needs.
    """

    given: str
    package: Path
    slo: Slo | None = None
    way: Way = "triton"
    devices: tuple[int, ...] = ()

    @contextmanager
    def up(self) -> Iterator[ComparedDeployment]:
        """Context in which it runs."""
        deployment = Deployment.load(self.package)
        with tempfile.TemporaryDirectory(prefix="pipeline-compare-") as folder:
            # A store of its own: two packages of one name can then run at a time.
            store = Store(Path(folder))
            argv = ["--package", str(self.package.absolute()), *store.argv]
            argv += ["--no-gateway"] if self.way == "triton" else []
            argv += ["--gpus", ",".join(map(str, self.devices))] if self.devices else []
            server = ServedDeployment.start(
                argv,
                deployment.name,
                store.running,
                Path(folder) / "logs",
                deadline_s=deployment.start_deadline_s,
            )
            try:
                subject = Subject.of_record(server.record, self.slo, self.way)
                yield ComparedDeployment(subject, self.package, server.record.target)
            finally:
                server.stop()


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A server of OpenAI's API at an address: any program that has it.

    Attributes:
        given: Address as on the command line, with the model after a #.
        subject: How it is measured.
    """

    given: str
    subject: Subject
    package: None = None

    @contextmanager
    def up(self) -> Iterator[ComparedDeployment]:
        """Context in which it runs."""
        yield ComparedDeployment(self.subject, None, "")


DeploymentSource = RunningSource | PackageSource | UrlSource


def find_source(name: str, settings: CompareSettings, store: Store) -> DeploymentSource:
    """Find a package, a deployment that runs, or the server of an address.

    Args:
        name: Folder of the package, name of the deployment, or `http://host:port#model`.

    Raises:
        ServerError: The deployment does not run.
        InvalidInput: There is no such deployment.
    """
    if source_kind(name) == "package":
        slo = Slo(**dict(settings.slo)) if settings.slo else None
        return PackageSource(name, Path(name), slo, settings.way, allowed_devices())
    if source_kind(name) == "url":
        url, _, model = name.partition("#")
        reached = SubjectSettings(
            url=url, model=model or only_model(url), tokenizer=settings.tokenizer, slo=settings.slo
        )
        return UrlSource(name, find_subject(None, reached, store))
    record = find_deployment(name, (), store).require_server(store)
    reach = SubjectSettings(way=settings.way, slo=settings.slo)
    return RunningSource(name, find_subject(name, reach, store), record)


def servable_packages(recipes: Sequence[Recipe], store: Store) -> tuple[Path, ...]:
    """Find the packages of recipes, all of which this machine can serve.

    Raises:
        InvalidInput: With each package that is not built, and all that keeps this machine from serving one.
    """
    faults, packages = list[Fault](), list[Path]()
    for recipe in recipes:
        key = f"{recipe.name}, runtime {recipe.runtime.kind}"
        artifact = store.find(prepare(recipe, store).plan["package"].key)
        if artifact is None:
            build = shlex.join(("pipeline", "build", *recipe.build_argv, *store.argv))
            faults.append(Fault("its package is not built", key=key, fix=build))
            continue
        packages.append(artifact.path)
        ports = Ports.choose(recipe, usual=False)
        stopping = (
            finding for finding in dry_run(artifact.path, ServeOptions(ports)).findings if finding.stops
        )
        faults += [
            Fault(finding.problem, key=f"{key}: {finding.keys[0]}", fix=finding.fix, rule=finding.rule)
            for finding in stopping
        ]
    if faults:
        raise InvalidInput("these cannot be compared on this machine", faults)
    return tuple(packages)


def golden_questions(criteria: CompareCriteria, a: DeploymentSource, b: DeploymentSource) -> GoldenSet | None:
    """Read the golden questions, with the budgets of the criteria in place of their own; None asks none.

    Raises:
        InvalidInput: Budgets need golden questions, and there are none.
    """
    if criteria.skip_golden:
        return None
    if criteria.questions is not None:
        golden: GoldenSet | None = GoldenSet.read(criteria.questions)
    else:
        packages = [side.package for side in (b, a) if side.package is not None]
        # Questions are asked of Triton, which an address is not that of.
        golden = next(filter(None, map(GoldenSet.load, packages)), None) if len(packages) == 2 else None
    budgets = {
        name: value for name in GoldenBudgets.model_fields if (value := getattr(criteria, name)) is not None
    }
    if golden is not None:
        return GoldenSet(golden.questions, golden.budgets.model_copy(update=budgets))
    needing = [*budgets, *(["judge"] if criteria.judge else [])]
    if needing or not criteria.rounds:
        fix = "neither package carries any: give --criteria questions=FILE"
        fault = Fault("needs golden questions", key=", ".join(needing), fix=fix)
        raise InvalidInput("pipeline compare", [fault])
    return None


def answer_judge(criteria: CompareCriteria) -> Judge | None:
    """Make the judge of answers; None for none."""
    if criteria.judge is None or criteria.judge_model is None:
        return None
    return Judge(criteria.judge, criteria.judge_model, os.environ.get(criteria.judge_key_env, ""))

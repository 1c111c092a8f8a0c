"""`pipeline deploy`: what others run a deployment by: a docker script, a compose file, a systemd unit, Kubernetes."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import note, print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.errors import UserError
from pipeline.plan.settings import PackageSettings
from pipeline.serving.settings import LaunchSettings

if TYPE_CHECKING:
    from pipeline.plan.artifact_sizes import ArtifactSizes
    from pipeline.serving.manifests import Exposure, KubernetesOptions, ManifestTarget
    from pipeline.stages.served_package import ChosenPackage
    from pipeline.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])


def _target(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value == "local":
        raise click.BadParameter("this machine is what `pipeline serve` serves on")
    return value


def _replicas(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
        raise click.BadParameter(f"{text}: write a number of servers, or LEAST:MOST, such as 1:4")
    return int(least), int(most or least)


def _exposure(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Exposure | None:
    if text is None:
        return None
    from pipeline.serving.manifests import Exposure

    kind, _, name = text.partition(":")
    match kind:
        case "ingress" if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
            return Exposure("ingress", name)
        case "gateway" if re.fullmatch(r"([a-z0-9-]+/)?[a-z0-9][a-z0-9.-]*", name):
            return Exposure("gateway", name)
    raise click.BadParameter(f"{text}: write ingress:CLASS, or gateway:NAME or gateway:NAMESPACE/NAME")


def _matching(pattern: str, fix: str) -> Callable[..., str | None]:
    def check(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
        if text is not None and not re.fullmatch(pattern, text):
            raise click.BadParameter(f"{text}: {fix}")
        return text

    return check


_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_KUBERNETES = (
    click.option(
        "--namespace",
        metavar="NAME",
        callback=_matching(_LABEL, "write at most 63 lower-case letters, digits and hyphens"),
        help="Kubernetes: where everything lies; by default a namespace with the name of the recipe.",
    ),
    click.option(
        "--replicas",
        default="1:4",
        show_default=True,
        metavar="N|LEAST:MOST",
        callback=_replicas,
        help="Kubernetes: servers; with scaling between these bounds, else the least.",
    ),
    click.option(
        "--gateways",
        type=click.IntRange(min=1),
        default=2,
        show_default=True,
        help="Kubernetes: least number of gateways.",
    ),
    click.option(
        "--gpus-per-node",
        type=click.IntRange(min=1),
        default=8,
        show_default=True,
        help="Kubernetes: GPUs of one machine. A model that needs more is spread over several, by a LeaderWorkerSet.",
    ),
    click.option(
        "--hostname",
        metavar="NAME",
        callback=_matching(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "is no host name"),
        help="Kubernetes: name by which clients outside of the cluster reach the gateway.",
    ),
    click.option(
        "--expose",
        metavar="ingress:CLASS|gateway:NAME",
        callback=_exposure,
        help="Kubernetes: what leads them there: an Ingress of this class, or an HTTPRoute of this Gateway.",
    ),
    click.option(
        "--packages",
        metavar="URL",
        callback=_matching(
            r"(s3|gs|az|https?)://[^\s/]+(/\S*)?", "write s3://bucket/folder, or gs, az, https"
        ),
        help="Kubernetes: object store with the packages, from which each pod fetches its own; by default a volume. "
        "`pipeline store push` sends them there, and takes the same addresses.",
    ),
    click.option(
        "--build-image", metavar="NAME", help="Kubernetes: image of the Job that builds the package."
    ),
    click.option(
        "--storage-class", metavar="NAME", help="Kubernetes: of that volume; by default the cluster's own."
    ),
    click.option(
        "--redis",
        metavar="URL",
        callback=_matching(r"(redis|valkey)s?://[^\s/@]+", "write redis://HOST:PORT, or rediss:// for TLS"),
        help="Kubernetes: Redis or Valkey server that gateways share; by default one is part of the manifests.",
    ),
    click.option(
        "--prometheus",
        metavar="URL",
        default="http://prometheus-operated.monitoring.svc:9090",
        show_default=True,
        callback=_matching(r"https?://\S+", "write http://HOST:PORT"),
        help="Kubernetes: Prometheus server that scaling asks.",
    ),
    click.option(
        "--runbook-url",
        metavar="URL",
        default="how-to/alerts.html",
        show_default=True,
        help="Kubernetes: page that alerts link to; the documentation has it.",
    ),
)
_OF_KUBERNETES = (
    "namespace", "replicas", "gateways", "gpus_per_node", "hostname", "expose", "packages", "build_image",
    "storage_class", "redis", "prometheus", "runbook_url",
)  # fmt: skip


def _kubernetes_options(command: Command) -> Command:
    """What only a cluster is given."""
    for option in reversed(_KUBERNETES):
        command = option(command)
    return command


@click.command(name="deploy")
@click.argument("recipe", metavar="[RECIPE]", required=False, shell_complete=complete_recipe)
@set_option
@store_option
@click.option(
    "--target",
    type=click.Choice(["docker", "compose", "systemd", "kubernetes", "local"]),
    callback=_target,
    metavar="docker|compose|systemd|kubernetes",
    help="A script with the `docker run` line of Triton; a compose file, or a systemd unit, of Triton and the gateway; "
    "a folder for kustomize with as many of both as are needed. By default docker, and systemd for a CPU.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write into this folder; by default it is printed.",
)
@click.option("--dry-run", is_flag=True, help="Write nothing; also of a recipe that is not built yet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the file's text.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8080,
    show_default=True,
    help="Where the gateway is to listen, on --address.",
)
@click.option("--gateway-image", metavar="NAME", help="Image of the gateway, for compose and kubernetes.")
@click.option(
    "--memory",
    metavar="SIZE",
    callback=lambda _, __, given: _size(given),
    help="Most host memory that Triton may take, such as 64G; by default all, and in a cluster what the weights need.",
)
@click.option("--user", default="pipeline", show_default=True, help="Who runs the systemd unit.")
@_kubernetes_options
@options_of(PackageSettings, "wanted")
@options_of(LaunchSettings, "launch")
@click.pass_context
def command(
    context: click.Context,
    /,
    recipe: str | None,
    overrides: tuple[str, ...],
    store: Path | None,
    target: Any,
    output: Path | None,
    dry_run: bool,
    as_json: bool,
    port: int,
    gateway_image: str | None,
    memory: str | None,
    user: str,
    wanted: PackageSettings,
    launch: LaunchSettings,
    **options: Any,
) -> None:
    """Write what other tools run RECIPE by, and run nothing; on this machine, `pipeline serve` runs it.

    A compose file has Triton and the OpenAI gateway, with health checks by inference, limits, GPUs and what happens
    when one dies. A systemd unit runs `pipeline serve` as a service of its own user. The folder for Kubernetes has a
    base, what a cluster may add (scaling, monitoring, a way in from outside, API keys), and a Job that builds the
    package in the cluster, where it is not built here.

    \b
    pipeline deploy llama-3.1-8b-fp8
    pipeline deploy llama-3.1-8b-fp8 --target compose --output ./deployment --memory 64G
    pipeline deploy --package ./package --target systemd
    pipeline deploy llama-3.1-8b-fp8 --target kubernetes --output ./cluster --hostname llm.example --expose gateway:web
    kubectl apply -k cluster/namespace && kubectl apply -k cluster/build && kubectl apply -k cluster/overlays/plain
    """
    from pipeline.serving.deployments import recipe_of
    from pipeline.serving.launch import ServeOptions
    from pipeline.serving.manifests import ManifestOptions, manifest_files
    from pipeline.serving.manifests.kubernetes import SITE
    from pipeline.stages.served_package import choose_package
    from pipeline.store import Store

    given = [
        name for name in _OF_KUBERNETES if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given and target != "kubernetes":
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{named}: goes with --target kubernetes")
    shelf = Store.at(store)
    report = reporter(silent=as_json)
    # A cluster may build what it serves.
    if recipe is None and wanted.package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    if recipe is None and overrides:
        raise click.UsageError("--set changes a RECIPE: name one beside --package")
    loaded = None if recipe is None else recipe_of(recipe, overrides, shelf)
    chosen = choose_package(
        loaded, shelf, wanted, report,
        preview=dry_run or (target == "kubernetes" and not wanted.build),
    )  # fmt: skip
    kind: ManifestTarget = target or ("systemd" if chosen.deployment.requirements is None else "docker")
    more = ManifestOptions(
        gateway_port=port,
        gateway_image=gateway_image,
        memory=memory,
        recipe=_recipe_text(chosen),
        user=user,
        program=_program(),
        kubernetes=_of_kubernetes(chosen, shelf, options, offline=wanted.offline)
        if kind == "kubernetes"
        else None,
    )
    launch = _with_usual_ports(launch, chosen)
    serving = ServeOptions(
        launch.choose_ports(chosen.served_recipe.serving), launch, allowed=wanted.allowed,
        recipe=chosen.argv, settings=chosen.settings,
    )  # fmt: skip
    files = manifest_files(kind, chosen.deployment, chosen.folder, serving, more)
    written = None
    if output is not None and not dry_run:
        paths = [
            _write(output / name, text)
            for name, text in files.items()
            # A person's own stays as it is.
            if not (kind == "kubernetes" and name.startswith(SITE) and (output / name).exists())
        ]
        written = output.absolute() if kind == "kubernetes" else paths[0]
    if as_json:
        print_json(
            {
                "name": chosen.deployment.name,
                "target": kind,
                "package": str(chosen.folder),
                "built": chosen.built,
                "note": chosen.note,
                "files": files,
                "written": None if written is None else str(written),
            }
        )
        return
    for line in chosen.note.splitlines():
        note(f"{line}, or build/ in the cluster" if "build/job.yaml" in files else line)
    if written is not None:
        click.echo(f"wrote {written}")
    elif len(files) == 1:
        click.echo(next(iter(files.values())), nl=False)
    else:
        for name, text in files.items():
            click.echo(f"# {name}\n{text}")


def _of_kubernetes(
    chosen: ChosenPackage, shelf: Store, options: dict[str, Any], *, offline: bool
) -> KubernetesOptions:
    from pipeline.serving.manifests import KubernetesOptions
    from pipeline.serving.manifests.kubernetes.cluster import resource_name
    from pipeline.stages.builder import UNKNOWN_PACKAGE
    from pipeline.store import manifest
    from pipeline.store.object_store import content_digest
    from pipeline.store.signature import VerifyKeys

    if chosen.folder == UNKNOWN_PACKAGE:
        raise UserError(f"the name of the package is not known, and manifests have it: {chosen.note}")
    values = {name: options[name] for name in _OF_KUBERNETES}
    recipe = chosen.served_recipe
    questions = None if recipe.golden is None else Path(recipe.golden.file).read_text(encoding="utf-8")
    namespace = values.pop("namespace") or resource_name(chosen.deployment.name)
    keys = VerifyKeys.configured()
    return KubernetesOptions(
        recipe,
        namespace,
        questions=questions,
        sizes=_artifact_sizes(chosen, shelf, offline=offline),
        content=content_digest(chosen.folder) if (chosen.folder / manifest.FILE).is_file() else None,
        verify_key=None if keys is None else keys.pem,
        **values,
    )


def _artifact_sizes(chosen: ChosenPackage, shelf: Store, *, offline: bool) -> ArtifactSizes | None:
    """Sizes by the recipe's models, and of a package that is there its own."""
    from pipeline.plan.artifact_sizes import ArtifactSizes, artifact_sizes
    from pipeline.prepare.model_probe import probe_models
    from pipeline.store import Manifest, manifest

    known: ArtifactSizes | None = None
    if chosen.recipe is not None:
        with suppress(UserError):
            probes = probe_models(chosen.recipe, shelf, offline=offline)
            sizes = {role: one.sizes for role, one in probes.items() if one.sizes is not None}
            known = artifact_sizes(chosen.recipe, sizes)
    if not (chosen.folder / manifest.FILE).is_file():
        return known
    total = Manifest.load(chosen.folder).total_bytes
    known = known or ArtifactSizes.of_weights(total)
    return replace(known, package=ArtifactSizes.of_weights(total).package)


def _with_usual_ports(launch: LaunchSettings, chosen: ChosenPackage) -> LaunchSettings:
    """Ports that are taken here may be free where it will run."""
    from pipeline.serving.ports import GRPC, HTTP, METRICS

    serving = chosen.served_recipe.serving
    usual = {"metrics_port": METRICS}
    usual |= {"http_port": HTTP} if serving.http else {}
    usual |= {"grpc_port": GRPC} if serving.grpc else {}
    return launch.model_copy(update={name: getattr(launch, name) or port for name, port in usual.items()})


def _recipe_text(chosen: ChosenPackage) -> str | None:
    from pipeline.documents import dump_yaml

    return None if chosen.settings is None else dump_yaml(dict(chosen.settings))


def _program() -> tuple[str, ...]:
    """What starts this installation, in any folder and whoever's process it is."""
    script = shutil.which("pipeline")
    return (script,) if script is not None else (sys.executable, "-m", "pipeline.cli.main")


def _size(text: str | None) -> str | None:
    if text is None or re.fullmatch(r"[1-9]\d*[KMGT]", text):
        return text
    raise click.BadParameter(f"{text}: write a number and K, M, G or T, like 64G")


def _write(file: Path, text: str) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            file.chmod(0o755)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    return file.absolute()

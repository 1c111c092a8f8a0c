"""`pipeline deploy`: files by which Docker, Compose, systemd, Kubernetes or Dynamo run a deployment."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import Verb, complete_recipe, open_store, set_option
from pipeline.cli.output import note, print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.errors import UserError
from pipeline.plan.settings import DeviceSettings, PackageSettings

if TYPE_CHECKING:
    from pipeline.deploy.package import DeployedPackage
    from pipeline.deploy.targets import DeployTarget
    from pipeline.recipe import Recipe
    from pipeline.serving.ports import Ports
    from pipeline.stages.served_package import ChosenPackage
    from pipeline.store import Store


_WRITTEN = ("triton", "deploy", "kubernetes")


@click.command(name="deploy", cls=Verb)
@click.argument("recipe", metavar="[RECIPE]", required=False, shell_complete=complete_recipe)
@set_option
@click.option(
    "--target",
    type=click.Choice(["docker", "compose", "systemd", "kubernetes", "dynamo"]),
    metavar="docker|compose|systemd|kubernetes|dynamo",
    help="A script with the `docker run` line of Triton; a compose file, or a systemd unit, of Triton and the gateway; "
    "a folder for kustomize with as many of both as are needed; a script with Triton behind NVIDIA Dynamo. By default "
    "docker, and systemd for a CPU.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write into this folder; by default it is printed.",
)
@click.option("--dry-run", is_flag=True, help="Write nothing; also for a recipe that is not built yet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the files' text.")
@options_of(PackageSettings, "wanted")
@options_of(DeviceSettings, "placed")
def command(
    recipe: str | None,
    wanted: PackageSettings,
    placed: DeviceSettings,
    output: Path | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Write the files with which other tools run RECIPE; nothing is started (`pipeline serve` runs it on this machine).

    The compose file has Triton and the OpenAI gateway, with health checks by inference, limits, GPUs and restarts. The
    systemd unit runs `pipeline serve` under an account of its own. The folder for Kubernetes has a base, components
    that a cluster may add (scaling, monitoring, access from outside, API keys), and a Job that builds the package in
    the cluster if it is not built here. With `dynamo`, the package becomes a worker of NVIDIA Dynamo, whose frontend
    takes the gateway's place.

    \b
    pipeline deploy llama-3.1-8b-fp8
    pipeline deploy llama-3.1-8b-fp8 --target compose --output ./deployment --set triton.memory=64G
    pipeline deploy --package ./package --target systemd
    pipeline deploy llama-3.3-70b-two-nodes --target kubernetes --output ./cluster
    kubectl apply -k cluster/namespace && kubectl apply -k cluster/build && kubectl apply -k cluster/overlays/plain

    The rest is set in sections of the recipe: `triton` (ports, image, memory, timeouts), `gateway` (limits, logs),
    `deploy` (address of the gateway), `kubernetes` (replicas, names, access).
    """
    from pipeline.deploy.kubernetes import SITE
    from pipeline.deploy.targets import deployment_files
    from pipeline.serving.deployments import recipe_to_serve
    from pipeline.serving.launch import ServeOptions
    from pipeline.stages.served_package import choose_package

    target: DeployTarget | None = options["target"]
    if recipe is None and wanted.package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    store = open_store()
    # A cluster may build what it serves.
    chosen = choose_package(
        recipe_to_serve(recipe, options["overrides"], store, wanted.package), store, wanted,
        reporter(silent=options["as_json"]), preview=dry_run or (target == "kubernetes" and not wanted.build),
    )  # fmt: skip
    kind = target or ("systemd" if chosen.deployment.requirements is None else "docker")
    package = _package(chosen, store, details=kind in ("kubernetes", "dynamo"))
    serving = ServeOptions(
        _usual_ports(package.recipe), package.recipe.triton, placed.devices, allowed=wanted.allowed,
        recipe=chosen.argv, settings=chosen.settings,
    )  # fmt: skip
    files = deployment_files(kind, package, serving, _program())
    written = None
    if output is not None and not dry_run:
        paths = [
            _write(output / name, text)
            for name, text in files.items()
            # A person's own stays as it is.
            if not (kind == "kubernetes" and name.startswith(SITE) and (output / name).exists())
        ]
        written = output.absolute() if len(paths) > 1 else paths[0]
    if options["as_json"]:
        print_json(
            {
                "name": package.name,
                "target": kind,
                "package": str(package.folder),
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


def _package(chosen: ChosenPackage, store: Store, *, details: bool) -> DeployedPackage:
    """Describe the package; the details are for a cluster, which fetches and builds packages itself."""
    from pipeline.deploy.package import DeployedPackage
    from pipeline.documents import dump_yaml
    from pipeline.stages.builder import UNKNOWN_PACKAGE
    from pipeline.store.signature import VerifyKeys

    # The other sections are what the files say.
    values = {name: value for name, value in (chosen.settings or {}).items() if name not in _WRITTEN}
    recipe, keys = chosen.served_recipe, VerifyKeys.configured()
    package = DeployedPackage(
        chosen.deployment, chosen.folder, recipe, recipe_text=dump_yaml(values) if values else None
    )
    if not details:
        return package
    if chosen.folder == UNKNOWN_PACKAGE:
        raise UserError(f"the name of the package is not known, and manifests have it: {chosen.note}")
    return replace(
        package,
        questions=None if recipe.golden is None else Path(recipe.golden.file).read_text(encoding="utf-8"),
        verify_key=None if keys is None else keys.pem,
        **_known_artifacts(chosen, store),
    )


def _known_artifacts(chosen: ChosenPackage, store: Store) -> dict[str, Any]:
    """Sizes by the recipe's models; and for a package that is there, its own, and its digest."""
    from pipeline.plan.artifact_sizes import ArtifactSizes, artifact_sizes
    from pipeline.plan.model_facts import local_adapters
    from pipeline.prepare.model_probe import probe_models
    from pipeline.store import Manifest, manifest
    from pipeline.store.object_store import content_digest

    known: ArtifactSizes | None = None
    if chosen.recipe is not None:
        with suppress(UserError):
            probes = probe_models(chosen.recipe, store)
            sizes = {role: probe.sizes for role, probe in probes.items() if probe.sizes is not None}
            known = artifact_sizes(chosen.recipe, sizes, local_adapters(chosen.recipe))
    if not (chosen.folder / manifest.FILE).is_file():
        return {"sizes": known}
    bound = ArtifactSizes.of_weights(Manifest.load(chosen.folder).total_bytes)
    return {"sizes": replace(known or bound, package=bound.package), "content": content_digest(chosen.folder)}


def _usual_ports(recipe: Recipe) -> Ports:
    """Ports that the recipe names, or Triton's usual ones: those that are taken here may be free where it will run."""
    from pipeline.serving.ports import GRPC, HTTP, METRICS, Ports

    wanted, serving = recipe.triton, recipe.serving
    return Ports(
        http=(wanted.http_port or HTTP) if serving.http else None,
        grpc=(wanted.grpc_port or GRPC) if serving.grpc else None,
        metrics=wanted.metrics_port or METRICS,
    )


def _program() -> tuple[str, ...]:
    """Beginning of a command line that starts this installation, in any folder and for any user."""
    script = shutil.which("pipeline")
    return (script,) if script is not None else (sys.executable, "-m", "pipeline.cli.main")


def _write(file: Path, text: str) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            file.chmod(0o755)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    return file.absolute()

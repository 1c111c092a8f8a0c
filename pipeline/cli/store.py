"""`pipeline store`: what lies in the store, whether it is intact, and what can go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli.options import VerbGroup, json_option, open_store
from pipeline.cli.output import note, print_columns, print_json, reporter, short_path
from pipeline.errors import StoreError, UserError
from pipeline.store import Artifact, Store, Verification, gc, human_bytes, verify


@click.group(name="store", cls=VerbGroup)
def command() -> None:
    """Look after the artifacts that builds leave on disk."""


@command.command()
@json_option
@click.argument("names", metavar="[STAGE|RECIPE]...", nargs=-1)
def ls(names: tuple[str, ...], as_json: bool) -> None:
    """List the artifacts, the one used last first; of a stage, or that a recipe asked for first, if any is named."""
    opened = open_store()
    artifacts = [
        artifact
        for artifact in opened.list()
        if set(names) <= {artifact.manifest.stage, artifact.manifest.recipe}
    ]
    damaged = opened.scan()[1]
    if as_json:
        print_json(
            {"root": str(opened.root), "artifacts": [_row(a) for a in artifacts], "unreadable": damaged}
        )
        return
    if artifacts:
        rows = (
            (a.name, a.manifest.recipe, human_bytes(a.manifest.total_bytes), a.manifest.provenance.created)
            for a in artifacts
        )
        print_columns([("ARTIFACT", "RECIPE", "SIZE", "MADE (UTC)"), *rows])
    total = human_bytes(sum(artifact.manifest.total_bytes for artifact in artifacts))
    note(f"{_count(len(artifacts), 'artifact')}, {total} in {short_path(opened.root)}")
    for reason in damaged.values():
        note(f"unreadable: {reason}")


@command.command()
@click.argument("name", metavar="ARTIFACT")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show what ARTIFACT was made from, by whom, and what it holds.

    ARTIFACT is its name, its digest, or the beginning of either.
    """
    artifact = open_store().get(name)
    if as_json:
        print_json({"path": str(artifact.path), **artifact.manifest.model_dump(mode="json", by_alias=True)})
        return
    click.echo(artifact.manifest.as_text(), nl=False)
    note(f"in {short_path(artifact.path)}")


@command.command(name="verify")
@click.argument("names", nargs=-1, metavar="[ARTIFACT]...")
@json_option
@click.option("--remove", is_flag=True, help="Remove what is damaged; the next build makes it again.")
def verify_(names: tuple[str, ...], as_json: bool, remove: bool) -> None:
    """Hash the files of each ARTIFACT again (all, if none is named) and compare with its manifest.

    The exit code is 1 if any of them is damaged.
    """
    opened = open_store()
    unreadable = opened.scan()[1]
    wanted = [name for name in names if name not in unreadable]
    artifacts = tuple(opened.get(name) for name in wanted) if names else opened.list()
    damaged = {name: reason for name, reason in unreadable.items() if not names or name in names}
    report = reporter(silent=as_json)
    results = {artifact.name: verify(artifact, report, opened.hashes) for artifact in artifacts}
    opened.hashes.save()
    damaged |= {name: str(result) for name, result in results.items() if not result.ok}
    removed = [name for name in damaged if remove and _remove(opened, name)]
    if as_json:
        print_json(
            {
                "root": str(opened.root),
                "artifacts": {name: _verdict(result) for name, result in results.items()},
                "unreadable": {name: reason for name, reason in damaged.items() if name not in results},
                "removed": removed,
            }
        )
    else:
        for name in sorted(results.keys() | damaged.keys()):
            gone = " (removed)" if name in removed else ""
            click.echo(f"{name}  {damaged.get(name, 'intact')}{gone}")
        if damaged and not remove:
            note("`pipeline store verify --remove` removes what is damaged; then build it again")
    if damaged:
        sys.exit(1)


@command.command()
@click.argument("name", metavar="ARTIFACT")
@click.argument("address", metavar="URL")
def push(name: str, address: str) -> None:
    """Send ARTIFACT to an object store, after a check of its files, and print where it is then.

    URL is the folder below which artifacts lie: s3://bucket/folder, gs://…, az://…, file:///…; credentials are those of
    the environment. A server of your own that speaks S3 is named by ?endpoint=.

    \b
    pipeline store push package-42e451333aac24b05b44 s3://models/packages
    pipeline store push package-42e451333aac24b05b44 's3://models/packages?endpoint=http://minio:9000'
    """
    from pipeline.store.object_store import content_digest, send_artifact

    opened, report = open_store(), reporter()
    artifact = opened.get(name)
    opened.check(artifact)
    click.echo(send_artifact(artifact, address, report))
    note(f"by content: {artifact.name}@sha256:{content_digest(artifact.path)}")


@command.command()
@click.argument("name", metavar="ARTIFACT")
@click.argument("address", metavar="URL")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Put it into this folder, instead of the store.",
)
@click.option("--without-weights", is_flag=True, help="Only what a gateway needs of a package.")
def pull(name: str, address: str, output: Path | None, without_weights: bool) -> None:
    """Fetch ARTIFACT from an object store, and print its folder.

    Large files come in parts, several at once. Every file is verified by SHA-256 while it comes, and the artifact
    appears when all of them are there. What was fetched before the command was killed is not fetched again.

    NAME@sha256:DIGEST takes the artifact only with that manifest, which has the hashes of all files; `store push`
    prints it. With $PIPELINE_VERIFY_KEY, a file of public keys, an artifact must be signed by one of them.

    \b
    pipeline store pull package-42e451333aac24b05b44 s3://models/packages --output /packages
    """
    from pipeline.store.object_store import fetch_artifact
    from pipeline.store.signature import VerifyKeys
    from pipeline.triton.repository import is_no_weight

    if without_weights and output is None:
        raise click.UsageError("--without-weights: name a folder by --output; artifacts of a store are whole")
    into = output or open_store().artifacts
    wanted = is_no_weight if without_weights else lambda *_: True
    keys = VerifyKeys.configured()
    artifact = fetch_artifact(name, address, into, reporter(), only=wanted, keys=keys)
    click.echo(str(artifact.path))


@command.command()
@click.argument("name", metavar="ARTIFACT")
@click.option(
    "--key",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Private Ed25519 key, as PEM: openssl genpkey -algorithm ed25519.",
)
def sign(name: str, key: Path) -> None:
    """Sign ARTIFACT after a check of its files, for `store push` and for whoever copies its folder.

    A machine with $PIPELINE_VERIFY_KEY, a file of public keys, pulls and serves only what one of these keys signed.

    \b
    openssl pkey -in packages.key -pubout -out packages.pem
    pipeline store sign package-42e451333aac24b05b44 --key packages.key
    """
    from pipeline.store.signature import sign as sign_artifact

    opened = open_store()
    artifact = opened.get(name)
    opened.check(artifact)
    click.echo(str(sign_artifact(artifact.path, key)))


@command.command(name="gc")
@json_option
@click.option("--yes", "-y", is_flag=True, help="Remove, and do not ask.")
@click.option(
    "--keep",
    "kept_names",
    multiple=True,
    metavar="ARTIFACT",
    help="Keep it, and all that it was made from, though no recipe needs it: the packages that other machines serve, "
    "or may go back to.",
)
@click.option(
    "--drop-handed-over",
    "dropped",
    multiple=True,
    metavar="RECIPE",
    help="Give up the builds of RECIPE that were handed over to another machine; then what only they need may go.",
)
def gc_(as_json: bool, yes: bool, kept_names: tuple[str, ...], dropped: tuple[str, ...]) -> None:
    """Remove what no recipe needs any longer, after saying what and asking.

    With --json nothing is asked, and nothing removed without --yes.

    The newest package of each recipe stays, with everything it was made from; so does whatever a running build or
    server uses, or a build that waits for `pipeline adopt`. Leftovers of killed builds are removed, including downloads
    that could have been resumed.
    """
    opened = open_store()
    waiting = gc.awaited_builds(opened)
    given_up = [build for build in waiting if build.recipe in dropped]
    for recipe in sorted(set(dropped) - {build.recipe for build in given_up}):
        raise UserError(f"--drop-handed-over {recipe}: no build of it waits for `pipeline adopt`")
    kept = [build for build in waiting if build not in given_up]
    garbage = gc.find_garbage(opened, given_up, [opened.get(name) for name in kept_names])
    removes = yes or not as_json
    if not as_json:
        if garbage:
            rows = ((item.name, human_bytes(item.bytes), item.reason) for item in garbage)
            print_columns([("ARTIFACT", "SIZE", "WHY IT CAN GO"), *rows])
        for build in kept:
            note(
                f"kept for {build.recipe}, whose build was handed over at {build.created} ({build.script}); "
                f"--drop-handed-over {build.recipe} gives it up"
            )
        if not garbage:
            note(f"{_directories(garbage)} could go from {short_path(opened.root)}")
        elif not yes:
            click.confirm(f"Remove {_directories(garbage)}?", abort=True, err=True)
    for build in given_up if removes else ():
        build.drop(opened)
    removed = gc.collect(opened, garbage) if removes else ()
    if as_json:
        print_json(
            {
                "root": str(opened.root),
                "garbage": [
                    {**asdict(item), "path": str(item.path), "removed": item in removed} for item in garbage
                ],
                "removed_bytes": sum(item.bytes for item in removed),
                "handed_over": [asdict(build) for build in kept],
            }
        )
    elif removed:
        note(f"removed {_directories(removed)}")
    for item in garbage if removes else ():
        if item not in removed:
            note(f"kept {item.name}: it came into use")


def _directories(garbage: Sequence[gc.Garbage]) -> str:
    return f"{_count(len(garbage), 'directory', 'directories')}, {human_bytes(sum(folder.bytes for folder in garbage))}"


def _remove(store: Store, name: str) -> bool:
    path = store.artifacts / name
    if gc.remove(store, gc.Garbage(path, name, 0, "damaged")):
        return True
    raise StoreError(f"{path}: damaged, and in use by a running build or server; stop it first")


def _row(artifact: Artifact) -> dict[str, object]:
    manifest = artifact.manifest
    return {
        "name": artifact.name,
        "digest": artifact.digest,
        "stage": manifest.stage,
        "recipe": manifest.recipe,
        "bytes": manifest.total_bytes,
        "created": manifest.provenance.created,
        "path": str(artifact.path),
    }


def _verdict(result: Verification) -> dict[str, object]:
    return {"ok": result.ok, "missing": result.missing, "extra": result.extra, "changed": result.changed}


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"

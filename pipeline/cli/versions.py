"""`pipeline versions`: the releases of TensorRT-LLM that recipes may name, and why a combination is refused."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

import click

from pipeline.cli.options import Verb, json_option, open_store
from pipeline.cli.output import print_json, print_rich
from pipeline.contracts import llm_args
from pipeline.contracts.images import ServingImage, serving_image
from pipeline.contracts.releases import TRACKS, Release, Track, containers, half, release, releases
from pipeline.contracts.support import Answer
from pipeline.errors import UserError
from pipeline.recipe.quantization import Format, KvCacheFormat

if TYPE_CHECKING:
    from pipeline.plan.compatibility import Compatibility, FeatureAnswer

_FORMATS, _KV_CACHES = get_args(Format), get_args(KvCacheFormat)


@click.command(name="versions", cls=Verb)
@click.argument("version", metavar="[VERSION]", required=False)
@click.option("--runtime", type=click.Choice(TRACKS), help="Only this runtime.")
@click.option("--gpu", metavar="GPU", help="On this GPU, such as h100-sxm-80g.")
@click.option(
    "--quantization",
    type=click.Choice(_FORMATS),
    default="none",
    show_default=True,
    help="Format of the weights.",
)
@click.option(
    "--kv-cache",
    type=click.Choice(_KV_CACHES),
    default="auto",
    show_default=True,
    help="Format of the KV cache.",
)
@click.option(
    "--model",
    metavar="CLASS|hf:ORG/NAME|local:FOLDER",
    help="A model, or the class that its config.json names, such as GptOssForCausalLM.",
)
@json_option
def command(
    version: str | None,
    runtime: Track | None,
    gpu: str | None,
    model: str | None,
    quantization: str,
    kv_cache: str,
    as_json: bool,
) -> None:
    """Print the releases of TensorRT-LLM with their runtimes, containers and pins, or check one combination.

    Release candidates are marked. Below the table: which runtime upstream still develops, and which facts of a release
    were not read from its own files.

    Given a GPU, a format, a model, or a VERSION and a runtime, it says whether the combination exists, or why not (exit
    code 2). For a model it says which releases list it, and which features upstream has for it.

    \b
    pipeline versions
    pipeline versions 1.2.1
    pipeline versions 1.2.1 --gpu b200-sxm-180g --quantization int4_awq
    pipeline versions --runtime pytorch --model GptOssForCausalLM
    """
    from pipeline.contracts.gpus import gpu as find_gpu
    from pipeline.plan.compatibility import check_compatibility
    from pipeline.prepare.model_probe import find_architecture

    if gpu is not None:
        find_gpu(gpu)  # refuses an unknown name once, not for each release
    architecture, published = find_architecture(model, open_store()) if model is not None else (None, "none")
    form = published if quantization == "none" else quantization
    combining = gpu or architecture or quantization != "none" or kv_cache != "auto" or (version and runtime)
    if combining:
        versions = (version,) if version else tuple(known.version for known in releases())
        runtimes: tuple[Track, ...] = (runtime,) if runtime else TRACKS
        answers = [
            check_compatibility(number, kind, gpu, form, kv_cache, architecture)
            for number in versions
            for kind in runtimes
        ]
        _print_answers(answers, architecture is not None, as_json)
        if not any(answer.offered for answer in answers):
            sys.exit(UserError.exit_code)
        return
    listed = (release(version),) if version else releases()
    _print_matrix([entry for entry in listed if runtime is None or runtime in entry.tracks], as_json)


def _print_matrix(chosen: list[Release], as_json: bool) -> None:
    if as_json:
        rows = [
            asdict(entry)
            | {"arguments_rest_on": _rests_on(entry)}
            | {"images": {track: asdict(image) for track, image in _images(entry).items()}}
            for entry in chosen
        ]
        print_json({"releases": rows, "runtimes": {track: half(track) for track in TRACKS}})
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    headers = (
        "VERSION",
        "RUNTIMES",
        "TRITON CONTAINERS",
        "TENSORRT",
        "TORCH",
        "CUDA",
        "MODELOPT",
        "DRIVER FROM",
    )
    for header in headers:
        table.add_column(header, no_wrap=header not in ("TORCH", "TRITON CONTAINERS"))
    for entry in chosen:
        table.add_row(*_row(entry))
    print_rich(table)
    for track in TRACKS:
        if len(chosen) > 1 or track not in chosen[0].tracks or track == "tensorrt":
            click.echo(half(track))
    for entry in chosen:
        if (text := _rests_on(entry)) is not None:
            click.echo(f"{entry.version}: its arguments of the LLM API rest on {text}.")
    shown = {c.release for entry in chosen for c in entry.containers}
    for disputed in containers():
        if disputed.conflict and (len(chosen) > 1 or disputed.release in shown):
            click.echo(
                f"* {disputed.release}: {disputed.conflict}; what is really inside is looked up before loading"
            )
    _print_built(chosen)


def _rests_on(release: Release) -> str | None:
    return llm_args.rests_on(release.version) if "pytorch" in release.tracks else None


def _print_built(chosen: list[Release]) -> None:
    """Print which images are built before they serve; for one release also how, and what is untested about it."""
    built = [
        (entry, track, image) for entry in chosen for track, image in _images(entry).items() if image.why
    ]
    if len(chosen) > 1 and built:
        names = ", ".join(f"{entry.version} {track}" for entry, track, _ in built)
        click.echo(f"Images that are built first (`pipeline versions VERSION` prints the command): {names}")
        return
    for entry, track, image in built:
        click.echo(f"{track} is served in {image.name}, which is built first: {image.why}")
        click.echo("\n".join(f"  {line}" for line in image.build_command()))
        for unseen in {container.unseen for container in entry.containers if container.unseen}:
            click.echo(f"  {unseen}")


def _images(release: Release) -> dict[Track, ServingImage]:
    """Image that serves a release, by runtime."""
    return {track: serving_image(release.version, track) for track in release.tracks}


def _row(release: Release) -> tuple[str, ...]:
    marks = (("*" if c.conflict else " built" if c.joins else "") for c in release.containers)
    shown = ", ".join(
        f"{c.release or c.image}{mark}" for c, mark in zip(release.containers, marks, strict=True)
    )
    oldest = release.containers[0].driver if release.containers else ""
    tensorrt = release.tensorrt or ("not known" if "tensorrt" in release.tracks else "none")
    pins = (release.torch or "not known", release.cuda or "not known", release.modelopt or "none")
    version = f"{release.version} candidate" if release.candidate else release.version
    return (version, ", ".join(release.tracks), shown, tensorrt, *pins, oldest)


def _named(feature: FeatureAnswer) -> str:
    limits = [f"compute capability {feature.capabilities}"] if feature.capabilities else []
    limits += [f"with {feature.needs[0]}"] if feature.needs else []
    return f"{feature.label} ({', '.join(limits)})" if limits else feature.label


def _print_answers(answers: list[Compatibility], of_model: bool, as_json: bool) -> None:
    if as_json:
        print_json([asdict(answer) | {"offered": answer.offered} for answer in answers])
        return
    for answer in answers:
        verdict = "yes" if answer.offered else "no"
        click.echo(
            f"{answer.version} {answer.runtime}: {verdict}{f', {answer.image}' if answer.image else ''}"
        )
        for reason in answer.reasons:
            click.echo(f"  {reason.severity}: {reason.text} [{', '.join(reason.sources)}]")
        features = (answer.features or {}).values()
        for verdict in get_args(Answer):
            named = [_named(feature) for feature in features if feature.answer == verdict]
            if named:
                click.echo(f"  features, {verdict}: {', '.join(named)}")
        if of_model and answer.features is None and answer.runtime == "pytorch":
            click.echo("  features: upstream's matrix has no row for the model")

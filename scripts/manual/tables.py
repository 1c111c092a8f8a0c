"""Tables of what is packaged and known: recipes, releases of TensorRT-LLM, GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.contracts.gpus import gpus
from pipeline.contracts.llm_args import rests_on
from pipeline.contracts.releases import TRACKS, half, releases
from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.parallelism import parallelism
from pipeline.prepare.report import make_report
from pipeline.recipe import CpuRuntime, Recipe, load_recipe
from pipeline.recipe.library import headline, packaged
from pipeline.runtimes.pytorch.upstream import compare_with_upstream
from pipeline.store import Store


def packaged_recipes() -> str:
    """Markdown: what each packaged recipe comes to by its own plan, and each whole, beside upstream's configuration."""
    lines = [
        "# Packaged recipes",
        "",
        "Verbs take these by name: `pipeline plan llama-3.1-8b-fp8`. `pipeline recipes copy NAME my.yaml` makes one",
        "yours. `tiny-cpu` is built and served by the tests; the others need GPUs and have not run anywhere",
        "([status](../status.md)).",
        "",
        "The figures are those of `pipeline plan NAME`: memory of the fullest GPU, and the forecast of p95 with as",
        "many requests of the longest lengths as the recipe allows, beside its SLO. Differences from the configuration",
        "by upstream that a recipe for the LLM API follows: `pipeline recipes show NAME --upstream`.",
        "",
        "| recipe | weights | GPUs | GiB: weights, KV cache, GPU | requests | first token ms | between tokens ms |"
        " upstream |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    recipes = {name: load_recipe(name) for name in packaged()}
    lines += [_row(recipe) for recipe in recipes.values() if recipe.runtime.kind != "cpu"]
    for name, file in packaged().items():
        text = file.read_text(encoding="utf-8")
        lines += ["", f"## {name}", "", headline(text), "", "```yaml", text.rstrip(), "```"]
        if recipes[name].runtime.kind == "pytorch":
            lines += ["", *_beside_upstream(recipes[name])]
    return "\n".join(lines) + "\n"


def _row(recipe: Recipe) -> str:
    report = make_report(recipe, Store(Path("/nonexistent/store")), offline=True)
    memory, speed, runtime = report.memory, report.performance, recipe.runtime
    assert memory is not None
    assert speed is not None
    assert not isinstance(runtime, CpuRuntime)
    fullest = max(memory.ranks, key=lambda rank: rank.used)
    weights = sum(line.bytes for line in fullest.lines if line.group == "weights")
    sizes = [f"{size / 2**30:.1f}" for size in (weights, fullest.group("kv_cache"), fullest.capacity)]
    load, slo, upstream = speed.curve[-1], recipe.slo, "–"
    if runtime.kind == "pytorch":
        found = compare_with_upstream(recipe)
        upstream = "none" if found.configuration is None else f"{len(found.differences)} differ"
    form = recipe.quantization.format
    stored = offline_sizes(recipe)["target"].stored
    cells = (
        f"[{recipe.name}](#{re.sub(r'[^a-z0-9-]', '', recipe.name)})",
        f"{stored}, as published"
        if form == "none" and stored != "none"
        else "bfloat16"
        if form == "none"
        else form,
        f"{parallelism(recipe, 'target').world} x {runtime.gpu}",
        ", ".join(sizes),
        f"{load.batch}",
        f"{load.ttft_ms:.0f} of {slo.ttft_p95_ms or 0:.0f}",
        f"{load.itl_p95_ms:.0f} of {slo.itl_p95_ms or 0:.0f}",
        upstream,
    )
    return f"| {' | '.join(cells)} |"


def _beside_upstream(recipe: Recipe) -> list[str]:
    found = compare_with_upstream(recipe)
    follows = found.configuration
    if follows is None:
        return [f"Upstream: {found.without}."]
    head = (
        f"It follows upstream's `{follows.file}`, for {', '.join(follows.models)} on {follows.gpus}, but for:"
    )
    return [
        head,
        "",
        *(
            f"- `{row.key}`: `{row.upstream or '–'}` there, `{row.here or '–'}` here: {row.why}."
            for row in found.differences
        ),
    ]


def releases_and_gpus() -> str:
    """Markdown: what `pipeline versions` prints, and the GPUs that recipes may name."""
    out = [
        "# Releases and GPUs",
        "",
        "## Releases of TensorRT-LLM",
        "",
        "What recipes may name as `runtime.version`, from `pipeline/contracts/data/releases.yaml`, where each row has",
        "its source. `pipeline versions 1.2.1 --gpu b200-sxm-180g --quantization int4_awq` says whether a",
        "combination exists, and why not. A candidate is not final; `init` chooses none.",
        "",
        *(line for track in TRACKS for line in (half(track), "")),
        "| release | runtimes | TensorRT | torch | ModelOpt | transformers | newest container | oldest driver |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for release in releases():
        carrying = max(release.containers, key=lambda image: image.release or "", default=None)
        image, driver = (f"`{carrying.image}`", carrying.driver) if carrying else ("–", "–")
        pins = [
            pin or "–" for pin in (release.tensorrt, release.torch, release.modelopt, release.transformers)
        ]
        version = f"{release.version} (candidate)" if release.candidate else release.version
        out.append(f"| {version} | {', '.join(release.tracks)} | {' | '.join(pins)} | {image} | {driver} |")
    out += [
        "",
        "The arguments of the LLM API of a release were read from its own `llm_args.py`, but for these:",
        "",
        *(
            f"- {release.version}: {text}"
            for release in releases()
            if (text := rests_on(release.version)) is not None
        ),
        "",
        "## GPUs",
        "",
        "What recipes may name as `runtime.gpu`, from `pipeline/contracts/data/gpus.yaml`.",
        "",
        "| name | chip | architecture | compute capability | GiB as sold | GiB as its driver reports it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for card in gpus():
        out.append(
            f"| `{card.name}` | {card.chip} | {card.architecture} | {card.capability} | {card.memory_gib:g} |"
            f" {card.usable_gib:.1f} |"
        )
    return "\n".join(out) + "\n"

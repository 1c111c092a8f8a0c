"""Tables of what is packaged and known: recipes, releases of TensorRT-LLM, GPUs."""

from __future__ import annotations

from pipeline.contracts.gpus import gpus
from pipeline.contracts.llm_args import rests_on
from pipeline.contracts.releases import TRACKS, half, releases
from pipeline.recipe.library import headline, packaged


def packaged_recipes() -> str:
    """Markdown: each packaged recipe, whole."""
    lines = [
        "# Packaged recipes",
        "",
        "Verbs take these by name: `pipeline plan llama-3.1-8b-fp8`. `pipeline recipes copy NAME my.yaml` makes one",
        "yours. `tiny-cpu` is built and served by the tests; the others need GPUs and have not run anywhere",
        "([status](../status.md)).",
    ]
    for name, file in packaged().items():
        text = file.read_text(encoding="utf-8")
        lines += ["", f"## {name}", "", headline(text), "", "```yaml", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


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
    for one in releases():
        carrying = max(one.containers, key=lambda image: image.release or "", default=None)
        image, driver = (f"`{carrying.image}`", carrying.driver) if carrying else ("–", "–")
        pins = [pin or "–" for pin in (one.tensorrt, one.torch, one.modelopt, one.transformers)]
        version = f"{one.version} (candidate)" if one.candidate else one.version
        out.append(f"| {version} | {', '.join(one.tracks)} | {' | '.join(pins)} | {image} | {driver} |")
    out += [
        "",
        "The arguments of the LLM API of a release were read from its own `llm_args.py`, but for these:",
        "",
        *(f"- {one.version}: {text}" for one in releases() if (text := rests_on(one.version)) is not None),
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

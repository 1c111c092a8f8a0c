"""Settings of the verbs that decide and make: `init`, `migrate`, `plan`, `build`. Light to import, for help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, DirectoryPath, Field

from pipeline.errors import Fault, UserError
from pipeline.settings import Option, Settings

if TYPE_CHECKING:
    from click import Context, Parameter
    from click.shell_completion import CompletionItem


def _known_rules(names: frozenset[str]) -> frozenset[str]:
    if not names:
        return names
    from pipeline.plan.preflight import check_allowed

    return check_allowed(names)


def _device(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("write numbers of GPUs with commas between them, like 0,1")
    return int(text)


def _complete_gpu(_context: Context, _parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from pipeline.contracts.gpus import gpus

    return [CompletionItem(gpu.name) for gpu in gpus() if gpu.name.startswith(incomplete)]


class DeviceSettings(Settings):
    """GPUs of this machine that are used."""

    devices: Annotated[tuple[int, ...], Option("--gpus", metavar="0,1,…", parse=_device, separator=",")] = (
        Field(default=(), description="GPUs that may be used; by default all that are needed.")
    )


class PreparationSettings(Settings):
    """Preparation of a recipe, as for every verb that needs its plan."""

    allowed: Annotated[
        frozenset[str], AfterValidator(_known_rules), Option("--allow", metavar="RULE", parse=str)
    ] = Field(
        default=frozenset(),
        description="Let an error of this preflight rule pass; it is recorded. May be repeated; pipeline rules lists "
        "them.",
    )


class PackageSettings(PreparationSettings):
    """Choice of the package that is served or exchanged, and how it may be made."""

    package: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Take this package, such as one from another machine; a RECIPE beside it gives settings only.",
    )
    build: bool = Field(default=False, description="Build what is missing first, as `pipeline build` does.")


class BuildSettings(DeviceSettings, PreparationSettings):
    """Settings of `pipeline build`."""

    until: Annotated[str, Option(metavar="STEP")] = Field(
        default="package", description="Stop after this step, e.g. evaluate."
    )
    executor: Literal["auto", "native", "docker", "print", "print-all"] = Field(
        default="auto",
        description="How trtllm-build is run (runtime tensorrt): native, on this machine; docker, in the container "
        "that will serve; print, by a script for another machine. auto is native if it is on PATH, else docker. The "
        "script does the whole build if the steps before the engines cannot be done here; with print-all it always "
        "does, for any runtime.",
    )
    executor_timeout_s: Annotated[float | None, Option(metavar="SECONDS")] = Field(
        default=None, gt=0, description="Time limit of trtllm-build for one engine; by default none."
    )


class InitSettings(Settings):
    """A user's wishes for a recipe that does not exist yet; None leaves one open."""

    gpu: Annotated[str | None, Option(metavar="NAME", complete=_complete_gpu)] = Field(
        default=None,
        description="GPU to run on, such as l4-24g; by default what this machine has, or its CPU.",
    )
    gpus: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, ge=1, le=64, description="Most GPUs to use; by default all of this machine, or 8."
    )
    runtime: Literal["cpu", "tensorrt", "pytorch"] | None = Field(
        default=None,
        description="By default cpu without a GPU, else pytorch (the LLM API). tensorrt builds engines, which upstream "
        "has frozen at 1.2.1.",
    )
    name: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="Name of the deployment; by default that of the model."
    )
    max_input_tokens: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, ge=1, description="Longest prompt."
    )
    max_output_tokens: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, ge=1, description="Longest answer."
    )


class MigrateSettings(Settings):
    """Settings of `pipeline migrate`."""

    version: Annotated[str | None, Option(metavar="VERSION")] = Field(
        default=None,
        description="Release of TensorRT-LLM to migrate to; by default the newest stable one with the PyTorch backend "
        "whose container is known.",
    )
    output: Annotated[tuple[Path, ...], Option(metavar="FILE.yaml|FILE.json|FILE.md")] = Field(
        default=(),
        description="Where the recipe goes (.yaml), by default NAME-pytorch.yaml beside the old one; or write what "
        "changes as JSON, or as tables in Markdown, there too. May be repeated.",
    )
    force: bool = Field(default=False, description="Overwrite the recipe's file.")
    check: bool = Field(
        default=False,
        description="Compare the packages of both recipes, as `pipeline compare` does: both must be built, and this "
        "machine must be able to serve them.",
    )

    def conflicts(self) -> Iterator[Fault]:
        """Yield files that cannot be written."""
        for file in self.output:
            if file.suffix not in (".yaml", ".yml", ".json", ".md"):
                yield Fault("must end in .yaml, .json or .md", key="--output", value=str(file))
        if len(self.outputs(".yaml", ".yml")) > 1:
            yield Fault("names two files for the recipe", key="--output")

    def outputs(self, *suffixes: str) -> list[Path]:
        """List the files of `--output` with these endings."""
        return [file for file in self.output if file.suffix in suffixes]


def _gpus_named(text: str) -> tuple[str, ...]:
    """GPU of that name, or all whose names begin with it: `h100` is each of three."""
    from pipeline.contracts.gpus import gpu, gpus

    name = text.strip()
    try:
        return tuple(known.name for known in gpus() if known.name.startswith(f"{name}-")) or (gpu(name).name,)
    except UserError as error:
        raise ValueError(str(error)) from None


def _prices_of(text: str) -> dict[str, float]:
    name, _, price = text.partition("=")
    try:
        value = float(price)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("is not a price above 0; write GPU=PRICE_PER_HOUR, like h100-sxm-80g=2.5")
    return dict.fromkeys(_gpus_named(name), value)


def _flat(parts: Any) -> Any:
    """Join what each text of a repeated option stands for."""
    if all(isinstance(part, Mapping) for part in parts):
        return {name: price for part in parts for name, price in part.items()} if parts else {}
    return tuple(
        dict.fromkeys(name for part in parts for name in ((part,) if isinstance(part, str) else part))
    )


class WorkloadOptions(Settings):
    """Traffic and what it may cost; what is None or empty stands for the recipe's own."""

    prices: Annotated[
        Mapping[str, float],
        BeforeValidator(lambda value: value if isinstance(value, Mapping) else _flat(value)),
        Option("--price", metavar="GPU=PER_HOUR", parse=_prices_of),
    ] = Field(default={}, description="Price of an hour of one GPU, in any currency. May be repeated.")
    prompt_tokens: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, ge=1, le=10_000_000, description="Length of prompts; by default the recipe's longest."
    )
    output_tokens: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, ge=1, le=10_000_000, description="Length of answers; by default the recipe's longest."
    )
    acceptance: Annotated[float | None, Option(metavar="SHARE")] = Field(
        default=None, ge=0, le=1, description="Share of the draft's tokens that the target accepts, 0 to 1."
    )


class PlanSettings(WorkloadOptions):
    """Settings of `pipeline plan RECIPE`."""

    rate: Annotated[float | None, Option(metavar="PER_SECOND")] = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Requests a second at the day's peak: how many replicas meet the SLO, and what they take.",
    )
    output: Annotated[Path | None, Option(metavar="FILE.yaml")] = Field(
        default=None,
        description="Write the recipe with what the plan found: the requests at a time that meet the SLO, or the "
        "replicas of --rate, from which `pipeline deploy` makes manifests.",
    )
    calibration: Annotated[Literal["none"] | Path | None, Option(metavar="FILE|none")] = Field(
        default=None,
        description="Forecast with these constants instead of the store's; none: with those of published figures.",
    )


class ComparisonOptions(WorkloadOptions):
    """Traffic, and the GPUs that are compared under it."""

    devices: Annotated[
        tuple[str, ...],
        BeforeValidator(_flat),
        Option("--gpus", metavar="NAME,…", parse=_gpus_named, separator=","),
    ] = Field(
        default=(),
        description="GPUs to compare; a beginning of a name is all of them (h100). By default those with a price, or "
        "all.",
    )


class CompareSettings(ComparisonOptions):
    """Settings of `pipeline plan compare`."""

    output: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None, description="Draw the front, as .html or .png."
    )

    def conflicts(self) -> Iterator[Fault]:
        """Yield an output in a form that is not drawn."""
        if self.output is not None and self.output.suffix not in (".html", ".png"):
            yield Fault("must end in .html or .png", key="--output", value=str(self.output))

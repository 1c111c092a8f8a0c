"""Settings of `pipeline accept`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import DirectoryPath, Field, FilePath

from pipeline.settings import Option, Settings


class AcceptLoad(Settings):
    """Requests that a recipe is checked by."""

    prompt_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Length of the prompts that are measured; if not given, up to 1,024 of the recipe's limit.",
        examples=[512],
    )
    output_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Length of the answers that are measured; if not given, up to 128 of the recipe's limit.",
    )
    rounds: int = Field(
        default=3, ge=1, description="Requests of each stream that are measured under each load."
    )
    questions: int = Field(
        default=32, ge=1, le=320, description="Answers that draft equality and the gate are judged by."
    )


class AcceptSettings(Settings):
    """How a recipe is checked."""

    output: Annotated[Path, Option(metavar="PATH", default="this folder")] = Field(
        default=Path(),
        description="The report, ending in .json, or a folder for it. A page to read (.md) is written beside it. Both "
        "can be read by their owner alone.",
    )
    skip: Annotated[tuple[str, ...], Option(metavar="STEP")] = Field(
        default=(), description="Leave a step out; build: take the package that is there."
    )
    resume: Annotated[FilePath | None, Option(metavar="FILE")] = Field(
        default=None,
        description="Take over what passed in this report, if the package is still the same.",
    )
    load: AcceptLoad = Field(
        default=AcceptLoad(), description="Lengths and numbers of requests: a YAML file, or one key of it."
    )
    upstream: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Folder with upstream's end_to_end_grpc_client.py; by default where NVIDIA's containers have it.",
    )

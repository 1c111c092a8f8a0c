"""Settings of a gateway: options of `pipeline gateway` and `pipeline serve`, the section `gateway` of its recipes, and
the message to each of its processes.

This module needs nothing but the core's distributions: a command line is read before the extra `gateway` is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, DirectoryPath, Field, FilePath, ValidationError

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.recipe import GatewaySection, Recipe
from pipeline.settings import Option, Settings

LIMITS_VARIABLE = "PIPELINE_LIMITS_REDIS"
# Environment variables that name the receiver of spans.
TRACES_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _parse_endpoint(text: str) -> tuple[str, str]:
    """Read [NAME=]HOST:PORT or [NAME=]dns:NAME:PORT; the name is empty if there is none."""
    from pipeline.client.endpoints import parse_target
    from pipeline.client.errors import Refused

    name, mark, url = text.rpartition("=")
    if ":" not in url or (mark and not name):
        raise ValueError("is not NAME=HOST:PORT")
    try:
        return name, parse_target(url)
    except Refused as error:
        raise ValueError(str(error)) from error


class ListenSettings(Settings):
    """Address of a gateway, and who may use it."""

    host: Annotated[str, Option(metavar="ADDRESS")] = Field(
        default="127.0.0.1", description="Address to listen on."
    )
    port: Annotated[int, Option(metavar="PORT")] = Field(
        default=8080, description="Port to listen on; 0 takes a free one."
    )
    keys: Annotated[FilePath | None, Option(metavar="FILE")] = Field(
        default=None,
        description="Tenants with their API keys and limits (YAML); without it no key is needed.",
    )


class GatewaySettings(ListenSettings, GatewaySection):
    """All settings of a gateway: those of its start, and the section `gateway` that its recipes agree on."""

    model_config = ConfigDict(strict=False)

    @classmethod
    def of(cls, listening: ListenSettings, recipes: Sequence[Recipe]) -> Self:
        """Make the settings of a gateway in front of some recipes.

        A value of a recipe, or of `--set`, comes before an environment variable.

        Raises:
            InvalidInput: The recipes do not agree; it names each key, and its value in each recipe.
        """
        section = _agreed_section(recipes)
        redis = section.limits_redis or os.environ.get(LIMITS_VARIABLE) or None
        start = listening.model_dump(include=set(ListenSettings.model_fields))
        try:
            return cls(**start, **{**dict(section), "limits_redis": redis})
        except ValidationError as error:
            detail = error.errors()[0]
            raise UserError(f"${LIMITS_VARIABLE}: {redis}: {detail['msg']}") from None


def _agreed_section(recipes: Sequence[Recipe]) -> GatewaySection:
    if not recipes:
        return GatewaySection()
    first, faults = recipes[0], []
    for key in GatewaySection.model_fields:
        values = {recipe.name: getattr(recipe.gateway, key) for recipe in recipes}
        if any(value != values[first.name] for value in values.values()):
            listed = ", ".join(
                f"{json.dumps(value, default=str)} in {name}" for name, value in values.items()
            )
            fix = f"--set gateway.{key}=VALUE sets it in all"
            faults.append(Fault(f"differs: {listed}", key=f"gateway.{key}", fix=fix))
    if faults:
        raise InvalidInput("one gateway in front of several recipes", faults)
    return first.gateway


class ModelSources(Settings):
    """Models of a gateway that stands apart from their servers, and the servers that run them."""

    package: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Serve the model of this package, with --endpoint; a RECIPE beside it gives settings, such as its "
        "cache.",
    )
    endpoints: Annotated[
        tuple[tuple[str, str], ...],
        Option("--endpoint", metavar="[NAME=]HOST:PORT", parse=_parse_endpoint),
    ] = Field(
        default=(),
        description="gRPC address of a Triton server elsewhere; NAME= says which recipe it runs, if there are several. "
        "Repeat it for several servers; dns:NAME:PORT stands for all addresses of a DNS name, which is resolved again "
        "every few seconds.",
    )
    wait_s: Annotated[float, Option(metavar="S")] = Field(
        default=0.0,
        ge=0,
        description="Seconds to wait until `pipeline serve` runs the recipes. With --endpoint it starts at once; see "
        "/readyz.",
    )


class WorkerPlace(Settings):
    """Place of one process among those that serve a gateway together.

    Attributes:
        number: from 0; a worker that is started again has the same.
        workers: number of workers.
        link: descriptor of the worker's end of a socket pair with its parent.
        usage: descriptor of the memory with the limits of tenants.
        metrics: folder of the files with counters and histograms.
    """

    number: int
    workers: int
    link: int
    usage: int
    metrics: Path


class GatewayStart(Settings):
    """Everything a gateway's process needs to know: from its command line, or as a message from the process above it.

    Attributes:
        recipes: names or files of recipes, or names of running deployments.
        overrides: fields of the recipes, as in `--set`.
        store: root of the store; None: the usual store.
        sockets: descriptors of bound sockets that the process inherits; empty: it binds its own.
        parent: process id of the process above it, without which it ends; None if it runs by itself.
        undecided: whether `settings` are those of the command line alone, and the recipes' sections come to them.
        worker: its place, if it is one of several; None: it serves the gateway, or is the parent of those that do.
    """

    recipes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    store: Path | None = None
    sources: ModelSources = ModelSources()
    settings: GatewaySettings = GatewaySettings()
    sockets: tuple[int, ...] = ()
    parent: int | None = None
    undecided: bool = False
    worker: WorkerPlace | None = None

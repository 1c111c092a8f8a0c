"""Settings of `pipeline bench`, and of the server that it measures."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field

from pipeline.bench.load_settings import Load, LoadSettings
from pipeline.errors import Fault
from pipeline.settings import Option, Settings

_SWEEP_TO = 1024.0


def output_faults(files: Sequence[Path], *suffixes: str) -> Iterator[Fault]:
    """Yield a fault for each file of `--output` whose ending says no format, or whose folder cannot be written to."""
    for file in files:
        if file.suffix not in suffixes:
            yield Fault(f"must end in {' or '.join(suffixes)}", key="--output", value=str(file))
        elif not os.access(file.absolute().parent, os.W_OK):
            yield Fault("its folder cannot be written to", key="--output", value=str(file))


def read_slo_target(text: str) -> tuple[str, float]:
    """Read a target such as `ttft_p95_ms=500`.

    Raises:
        ValueError: The text has another form; the message says what is expected.
    """
    from pipeline.recipe import Slo

    key, _, value = text.partition("=")
    try:
        target = float(value)
    except ValueError:
        target = 0.0
    if key not in Slo.model_fields or not 0 < target < math.inf:
        raise ValueError(f"must be {' or '.join(Slo.model_fields)}, =, and milliseconds")
    return key, target


class SubjectSettings(Settings):
    """Server that is measured: a deployment of this machine, or an address."""

    url: Annotated[str | None, Option(metavar="URL")] = Field(
        default=None,
        description="Ask this address instead of a deployment of this machine: http://host:port of an OpenAI API, or "
        "host:port of Triton's gRPC.",
    )
    model: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="With --url: the model to ask; of Triton by default tensorrt_llm_bls."
    )
    tokenizer: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="With --url: the model's tokenizer.json and chat template, for prompts of a length and chats of "
        "Triton.",
    )
    way: Literal["gateway", "triton"] | None = Field(
        default=None,
        description="Through the deployment's gateway, or straight to Triton; by default through its gateway, if it "
        "has one.",
    )
    slo: Annotated[tuple[tuple[str, float], ...], Option(parse=read_slo_target, metavar="KEY=MS")] = Field(
        default=(),
        description="A target, such as ttft_p95_ms=500, instead of the recipe's. May be repeated.",
    )
    wait_s: Annotated[float, Option(metavar="S")] = Field(
        default=0.0, ge=0, description="Seconds to wait for the deployment to be ready."
    )

    @property
    def is_http(self) -> bool:
        """Whether `url` is the address of an OpenAI API rather than that of Triton's gRPC."""
        return self.url is not None and self.url.startswith(("http://", "https://"))

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that only go with an address, or only with a deployment."""
        yield from super().conflicts()
        if self.url is None:
            for name, value in (("--model", self.model), ("--tokenizer", self.tokenizer)):
                if value is not None:
                    yield Fault("goes with --url only", key=name)
            return
        if self.is_http and self.model is None:
            yield Fault("is needed with the address of an OpenAI API", key="--model")
        if not self.is_http and not re.fullmatch(r"[^/\s]+:\d+", self.url):
            yield Fault("must be http://host:port, or host:port of gRPC", key="--url", value=self.url)
        if self.way is not None:
            problem = "goes with the name of a deployment: an address says it by its form"
            yield Fault(problem, key="--way")


class BenchSettings(SubjectSettings):
    """Settings of `pipeline bench`."""

    load: LoadSettings = Field(
        default=LoadSettings(), description="Load to put on it: a YAML file, or one key of it."
    )
    sweep: bool = Field(
        default=False,
        description="Double the load until the SLO breaks, then narrow down where. A load of two values is the first, "
        "and the largest that is tried; by default 1 and 1024 conversations at a time.",
    )
    max_failed: Annotated[float, Option(metavar="SHARE")] = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of requests that may fail before the exit code is 3.",
    )
    output: Annotated[tuple[Path, ...], Option(metavar="FILE.json|FILE.html")] = Field(
        default=(), description="Write the result as JSON, or as one HTML page. May be repeated."
    )

    @property
    def measured(self) -> LoadSettings:
        """The load; of a sweep, with its first level alone."""
        if not self.sweep:
            return self.load
        if not (self.load.concurrency or self.load.rate):
            return self.load.at(Load("concurrency", 1))
        return self.load.at(self.load.loads[0])

    @property
    def sweep_to(self) -> float | None:
        """Largest load of a sweep; None to measure the given loads alone."""
        if not self.sweep:
            return None
        largest = (self.load.concurrency or self.load.rate)[1:]
        return largest[0] if largest else _SWEEP_TO

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that do not go together."""
        yield from super().conflicts()
        if self.url is not None and self.tokenizer is None and self.load.file is None:
            yield Fault(
                "is needed for prompts of a length", key="--tokenizer", fix="or give --load prompts=FILE"
            )
        if self.sweep and self.load.trace is not None:
            yield Fault("a trace has one load", key="--sweep")
        values = self.load.concurrency or self.load.rate
        if self.sweep and (len(values) > 2 or sorted(values) != list(values)):
            yield Fault(
                "takes the first load, and the largest, of --load", key="--sweep", fix="name one or two"
            )
        yield from output_faults(self.output, ".json", ".html")

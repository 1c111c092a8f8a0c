"""Settings of `pipeline tune`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field

from pipeline.bench.load_settings import LoadSettings, Several
from pipeline.bench.settings import output_faults
from pipeline.errors import Fault
from pipeline.settings import Option, Settings

Objective = Literal["goodput", "throughput", "latency"]


class StudySettings(Settings):
    """Search space and length of a search."""

    objective: Annotated[tuple[Objective, ...], Several] = Field(
        default=(),
        description="Figure to improve within the recipe's SLO: goodput (requests a second that each meet it), "
        "throughput (tokens a second) or latency (of whole requests, p95, at the largest load). Of two or more, trials "
        "are spread over the front of them, and the first decides. If not given, goodput; throughput without an SLO.",
        examples=["throughput"],
    )
    trials: int = Field(
        default=12,
        ge=1,
        le=1000,
        description="Whole trials whose time the search takes, those of an earlier search included. One that is "
        "stopped early counts as a part of one.",
    )
    keys: Annotated[tuple[str, ...], Several] = Field(
        default=(), description="Try these keys only; if not given, all that the recipe's runtime reads."
    )
    fix: Annotated[tuple[str, ...], Several] = Field(
        default=(), description="Leave these as the recipe has them (KEY), or at a value (KEY=VALUE)."
    )
    rounds: int = Field(
        default=3,
        ge=0,
        le=100,
        description="Pairs of rounds at the end, in which the best trial and the recipe as it is are measured in "
        "turns; 0: none, and nothing is recommended.",
    )
    restart: bool = Field(
        default=False,
        description="Forget the trials of this search; by default it is continued.",
    )


class TuneSettings(Settings):
    """How values of a recipe are searched."""

    load: LoadSettings = Field(
        default=LoadSettings(), description="Load of the trials: a YAML file, or one key of it."
    )
    study: StudySettings = Field(
        default=StudySettings(),
        description="Keys and number of trials: a YAML file, or one key of it.",
    )
    executor: Literal["auto", "native", "docker", "print"] = Field(
        default="auto",
        description="Executor that builds engines, as of pipeline build. print: write the trials as a script for "
        "another machine.",
    )
    adopt: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None, description="Take over the figures that such a script left."
    )
    output: Annotated[tuple[Path, ...], Option(metavar="FILE.yaml|FILE.json|FILE.html")] = Field(
        default=(),
        description="Where the tuned recipe goes (.yaml), by default NAME-tuned.yaml beside the recipe; or write all "
        "trials as JSON, or the page with the front, there too. May be repeated.",
    )
    force: bool = Field(default=False, description="Overwrite the tuned recipe's file.")

    @property
    def elsewhere(self) -> bool:
        """Whether another machine measures."""
        return self.executor == "print" or self.adopt is not None

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that exclude each other, and files that cannot be written."""
        if self.adopt is not None and self.study.restart:
            yield Fault("forgets the trials that --adopt has figures of", where="--study", key="restart")
        if len(self.outputs(".yaml", ".yml")) > 1:
            yield Fault("names two files for the tuned recipe", key="--output")
        yield from output_faults(self.outputs(".json", ".html"), ".json", ".html")
        for file in self.output:
            if file.suffix not in (".yaml", ".yml", ".json", ".html"):
                yield Fault("must end in .yaml, .json or .html", key="--output", value=str(file))

    def outputs(self, *suffixes: str) -> list[Path]:
        """List the files of `--output` with these endings."""
        return [file for file in self.output if file.suffix in suffixes]

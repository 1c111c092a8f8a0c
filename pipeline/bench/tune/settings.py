"""Settings of `pipeline tune`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, DirectoryPath, Field

from pipeline.bench.load_settings import LoadSettings, Several
from pipeline.bench.settings import output_faults
from pipeline.document_faults import refusal
from pipeline.errors import Fault
from pipeline.settings import Option, Settings

Objective = Literal["goodput", "throughput", "latency"]

MAX_LENGTH = 64  # of drafts, by the recipe's schema


def read_lengths(text: str) -> tuple[int, ...]:
    """Read `0-8`, `0,2,4` or both mixed.

    Raises:
        ValueError: It is neither.

    >>> read_lengths("0,2-4")
    (0, 2, 3, 4)
    """
    lengths: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise ValueError(f"{text!r} is not a list of lengths: write 0-8 or 0,2,4")
        # One more than there may be, so that `draft_lengths` refuses the lengths out of bounds by name.
        lengths |= set(range(int(low), min(int(high or low), max(int(low), MAX_LENGTH + 1)) + 1))
    return tuple(sorted(lengths))


def _lengths(value: Any) -> Any:
    try:
        return read_lengths(str(value)) if isinstance(value, str | int) else value
    except ValueError as error:
        raise refusal(str(error)) from None


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
        description="Trials that are measured, those of an earlier search included.",
    )
    keys: Annotated[tuple[str, ...], Several] = Field(
        default=(), description="Try these keys only; if not given, all that the recipe's runtime reads."
    )
    fix: Annotated[tuple[str, ...], Several] = Field(
        default=(), description="Leave these as the recipe has them (KEY), or at a value (KEY=VALUE)."
    )
    draft_lengths: Annotated[tuple[int, ...], BeforeValidator(_lengths)] = Field(
        default=(),
        description="Try the number of drafted tokens alone, such as 0-8 or 0,2,4 (0: no draft), and recommend one or "
        "none.",
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

    def conflicts(self) -> Iterator[Fault]:
        """Yield keys that exclude each other."""
        for name, values in (("keys", self.keys), ("fix", self.fix)):
            if values and self.draft_lengths:
                yield Fault("goes without draft_lengths, which tries one key alone", key=name)


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
